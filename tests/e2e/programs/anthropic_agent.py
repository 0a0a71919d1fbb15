"""As openai_agent.py, for Anthropic's client."""

import subprocess
import sys

from anthropic import Anthropic

TOOLS = [
    {
        "name": "bash",
        "description": "Run a command.",
        "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    }
]


def main(prompt: str) -> None:
    client = Anthropic()
    messages: list = [{"role": "user", "content": prompt}]
    while True:
        with client.messages.stream(
            model="claude", max_tokens=1000, system="You repair things.", messages=messages, tools=TOOLS
        ) as events:
            reply = events.get_final_message()
        messages.append(
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in reply.content]}
        )
        results = []
        for block in reply.content:
            if block.type == "tool_use":
                done = subprocess.run(["bash", "-c", block.input["command"]], capture_output=True, text=True)
                results.append(
                    {
                        "type": "tool_result",
                        "tool_use_id": block.id,
                        "content": done.stdout + done.stderr,
                        "is_error": done.returncode != 0,
                    }
                )
        if not results:
            sys.stdout.write(f"{reply.content[0].text}\n")
            return
        messages.append({"role": "user", "content": results})


main(*sys.argv[1:])
