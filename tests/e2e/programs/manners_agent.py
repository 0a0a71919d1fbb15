"""Agents that are asked otherwise than by calls and results: argv is a manner and the prompt.

reports: it tells the model the results as text. acts: it is told commands in the model's words, and offers no tools.
arranges: the same, and shows its files between what was said and its newest words, as aider does. follows: it sends
what is new alone, and names the response before. keeps: the same, in a conversation that the provider keeps."""

import http.client
import json
import os
import re
import subprocess
import sys

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


def post(path: str, body: dict) -> dict:
    connection = http.client.HTTPConnection(os.environ["OPENAI_BASE_URL"].split("/")[2])
    connection.request("POST", path, json.dumps({"model": "gpt-5", **body}))
    answer = connection.getresponse()
    reply = json.load(answer)
    if answer.status != 200:
        sys.exit(f"{answer.status}: {reply['error']['message']}")
    return reply


def run(command: str) -> str:
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    return f"{os.getpid()}: {done.stdout}"


def in_words(prompt: str, *, tools: bool) -> str:
    said = [{"role": "system", "content": "You work."}, {"role": "user", "content": prompt}]
    while True:
        body = {"messages": said, "tools": TOOLS} if tools else {"messages": said}
        reply = post("/v1/chat/completions", body)["choices"][0]["message"]
        calls = reply.get("tool_calls") or ()
        commands = [json.loads(call["function"]["arguments"])["command"] for call in calls] if tools else []
        commands = commands or re.findall("<run>(.*?)</run>", reply["content"] or "", re.DOTALL)
        if not commands:
            return reply["content"]
        said.append({"role": "assistant", "content": f"{reply['content']} Calling: {commands}"})
        said.append({"role": "user", "content": "Observations:\n" + "\n".join(map(run, commands))})


def arranged(prompt: str) -> str:
    said, newest = [], prompt
    while True:
        shown = {"role": "user", "content": f"My files: {sorted(os.listdir())}"}
        asked = {"role": "user", "content": newest}
        reply = post(
            "/v1/chat/completions", {"messages": [{"role": "system", "content": "You work."}, *said, shown, asked]}
        )
        text = reply["choices"][0]["message"]["content"].strip()
        commands = re.findall("<run>(.*?)</run>", text, re.DOTALL)
        if not commands:
            return text
        said += [asked, {"role": "assistant", "content": text}]
        newest = "Observations:\n" + "\n".join(map(run, commands))


def remembered(prompt: str, *, kept: "str | None") -> str:
    new, before = [{"role": "user", "content": prompt}], {}
    while True:
        named = {"conversation": kept} if kept else before
        response = post("/v1/responses", {"instructions": "You work.", "input": new, **named})
        before = {"previous_response_id": response["id"]}
        calls = [item for item in response["output"] if item["type"] == "function_call"]
        if not calls:
            return response["output"][-1]["content"][0]["text"]
        results = [(call["call_id"], run(json.loads(call["arguments"])["command"])) for call in calls]
        new = [{"type": "function_call_output", "call_id": call_id, "output": output} for call_id, output in results]


def main(manner: str, prompt: str) -> None:
    if manner == "arranges":
        sys.stdout.write(arranged(prompt) + "\n")
    elif manner in ("reports", "acts"):
        sys.stdout.write(in_words(prompt, tools=manner == "reports") + "\n")
    else:
        sys.stdout.write(remembered(prompt, kept="conv_of_mine" if manner == "keeps" else None) + "\n")


main(*sys.argv[1:])
