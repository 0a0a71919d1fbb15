"""As openai_agent.py, without any client: needs no packages, and goes on when the provider refuses its first wish."""

import http.client
import json
import os
import subprocess
import sys


def ask(messages: list) -> dict:
    connection = http.client.HTTPConnection(os.environ["OPENAI_BASE_URL"].split("/")[2])
    connection.request("POST", "/v1/chat/completions", json.dumps({"model": "gpt-5", "messages": messages}))
    answer = connection.getresponse()
    body = json.loads(answer.read())
    return body["choices"][0]["message"] if answer.status == 200 else {"status": answer.status}


def main(prompt: str) -> None:
    messages = [{"role": "user", "content": prompt}]
    while True:
        message = ask(messages)
        if "status" in message:
            messages[0]["content"] = f"{prompt} (after {message['status']})"
            continue
        messages.append(message)
        for call in message.get("tool_calls") or ():
            done = subprocess.run(
                ["bash", "-c", json.loads(call["function"]["arguments"])["command"]], capture_output=True, text=True
            )
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout})
        if not message.get("tool_calls"):
            sys.stdout.write(f"{message['content']}\n")
            return


main(*sys.argv[1:])
