"""A model call with its usage, and time, chance and names that stay the same when the program starts again."""

import time

from snapshotd.agent import message, messages, model, now, random, record_usage, tool, uuid


@model(name="parrot")
def ask(conversation):
    record_usage(input_tokens=len(conversation), output_tokens=1, cost_usd=0.01)
    return {"role": "assistant", "content": conversation[-1]["content"].upper()}


@tool
def save(text):
    with open("answer", "w") as file:
        file.write(text)


message("user", "hello")
reply = ask(messages())
message(reply["role"], reply["content"])
print(f"{random():.6f}", uuid(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now())))
save(reply["content"])
