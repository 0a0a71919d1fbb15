"""Anthropic messages without any client: a tool `agent` leads a conversation of its own, side by side with others, as
Claude Code's sub-agents do. Input of tools is sent back with a field that the model left out, and the title of the
conversation is asked for on the way. With LAST_FIRST in the environment, results are sent in the other order.
`--continue` goes on with the conversation that /root/session.json holds."""

import http.client
import json
import os
import subprocess
import sys
import threading

SESSION = "/root/session.json"
TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("bash", "agent")]


def ask(system: str, messages: list, tools: list) -> dict:
    connection = http.client.HTTPConnection(os.environ["ANTHROPIC_BASE_URL"].split("/")[2])
    body = {"model": "claude", "max_tokens": 100, "system": system, "messages": messages, "tools": tools}
    connection.request("POST", "/v1/messages", json.dumps(body), {"anthropic-version": "2023-06-01"})
    answer = connection.getresponse()
    reply = json.loads(answer.read())
    if answer.status != 200:
        sys.exit(f"{answer.status}: {reply['error']['message']}")
    return reply


def do(block: dict, results: list, place: int) -> None:
    if block["name"] == "agent":
        text = talk("You are a sub-agent.", [{"role": "user", "content": f"Today.\n{block['input']['prompt']}"}])
        results[place] = {"type": "tool_result", "tool_use_id": block["id"], "content": text}
        return
    done = subprocess.run(["bash", "-c", block["input"]["command"]], capture_output=True, text=True)
    results[place] = {
        "type": "tool_result",
        "tool_use_id": block["id"],
        "content": done.stdout,
        "is_error": done.returncode != 0,
    }


def talk(system: str, messages: list, keep: bool = False) -> str:
    while True:
        reply = ask(system, messages, TOOLS)
        calls = [block for block in reply["content"] if block["type"] == "tool_use"]
        for block in calls:
            block["input"] = {"background": False, **block["input"]}
        messages.append({"role": "assistant", "content": reply["content"]})
        if keep:
            with open(SESSION, "w") as file:
                json.dump(messages, file)
        if not calls:
            return "".join(block["text"] for block in reply["content"])
        results: list = [None] * len(calls)
        threads = [threading.Thread(target=do, args=(block, results, place)) for place, block in enumerate(calls)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if None in results:
            os._exit(1)
        if "LAST_FIRST" in os.environ:
            results.reverse()
        messages.append({"role": "user", "content": results})


def main(prompt: str, *options: str) -> None:
    messages = []
    if "--continue" in options:
        with open(SESSION) as file:
            messages = json.load(file)
    messages.append({"role": "user", "content": prompt})
    sys.stdout.write(talk("You lead.", messages, keep=True) + "\n")


main(*sys.argv[1:])
