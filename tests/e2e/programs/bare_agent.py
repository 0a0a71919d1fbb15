"""As openai_agent.py, and asks as its client does (streams, three repetitions of what failed), with the standard library alone."""

import http.client
import json
import os
import subprocess
import sys

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
REPETITIONS = 3


def run(command: str) -> str:
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    return json.dumps({"exit_code": done.returncode, "output": done.stdout + done.stderr})


def begun(request: dict) -> http.client.HTTPResponse:
    """The answer, of which nothing has been read."""
    for _ in range(REPETITIONS + 1):
        connection = http.client.HTTPConnection(os.environ["OPENAI_BASE_URL"].split("/")[2])
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(request))
            answer = connection.getresponse()
        except OSError as exc:
            failure = str(exc)
        else:
            if answer.status == 200:
                return answer
            failure = f"{answer.status}: {answer.read().decode()}"
    sys.exit(failure)


def streamed(answer: http.client.HTTPResponse) -> dict:
    """A message of its pieces. What ends before it says so is an error, which is not repeated."""
    text, calls, ended = "", {}, False
    for line in answer:
        data = line.decode().strip().removeprefix("data: ")
        if not data or ended:
            continue
        ended = data == "[DONE]"
        for choice in () if ended else json.loads(data)["choices"]:
            text += choice["delta"].get("content") or ""
            for piece in choice["delta"].get("tool_calls") or ():
                call = calls.setdefault(piece["index"], {"type": "function", "function": {"name": "", "arguments": ""}})
                call["id"] = piece.get("id") or call["id"]
                for name, value in piece["function"].items():
                    call["function"][name] += value or ""
    if not ended:
        sys.exit("the stream broke off")
    return {"role": "assistant", "content": text or None, **({"tool_calls": [*calls.values()]} if calls else {})}


def ask(messages: list, stream: bool) -> dict:
    answer = begun({"model": "gpt-5", "messages": messages, "tools": TOOLS, "stream": stream})
    if stream:
        return streamed(answer)
    return json.load(answer)["choices"][0]["message"]


def main(prompt: str, *options: str) -> None:
    messages = [{"role": "system", "content": "You repair things."}, {"role": "user", "content": prompt}]
    while True:
        message = ask(messages, "--stream" in options)
        messages.append(message)
        for call in message.get("tool_calls") or ():
            result = run(json.loads(call["function"]["arguments"])["command"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if not message.get("tool_calls"):
            sys.stdout.write(f"{message['content']}\n")
            return


main(*sys.argv[1:])
