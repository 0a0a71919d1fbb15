"""An agent that knows nothing of snapshotd: a loop over OpenAI's chat completions, with a shell as its tool."""

import json
import os
import subprocess
import urllib.request


def ask(messages):
    body = json.dumps({"model": "any", "messages": messages}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]


messages = [{"role": "user", "content": "greet me in a file"}]
while True:
    reply = ask(messages)
    messages.append(reply)
    print(reply["content"])
    if not reply.get("tool_calls"):
        break
    for call in reply["tool_calls"]:
        done = subprocess.run(
            json.loads(call["function"]["arguments"])["command"], shell=True, capture_output=True, text=True
        )
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout})
