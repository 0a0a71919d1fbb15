"""An agent as people write them, with the provider's own client and no word about snapshots: argv is the prompt, then
options."""

import json
import subprocess
import sys

from openai import OpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]


def run(command: str) -> str:
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    return json.dumps({"exit_code": done.returncode, "output": done.stdout + done.stderr})


def ask(client: OpenAI, messages: list, stream: bool):
    request = {"model": "gpt-5", "messages": messages, "tools": TOOLS}
    if not stream:
        return client.chat.completions.create(**request).choices[0].message
    with client.chat.completions.stream(**request) as events:
        for _ in events:
            pass
        return events.get_final_completion().choices[0].message


def main(prompt: str, *options: str) -> None:
    client = OpenAI(max_retries=3)
    messages = [{"role": "system", "content": "You repair things."}, {"role": "user", "content": prompt}]
    while True:
        message = ask(client, messages, "--stream" in options)
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        for call in message.tool_calls or ():
            result = run(json.loads(call.function.arguments)["command"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            sys.stdout.write(f"{message.content}\n")
            return


main(*sys.argv[1:])
