"""Trajectories for evaluation and training: what a run recorded, as documents that others read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from snapshotd.engine.transfer.trajectories.atif import problem
from tests.e2e.model_rig import PROGRAMS, Agents, bash, provider
from tests.e2e.support import AGENT, Snap

pytestmark = pytest.mark.runc
PLANTED = "planted-" + "sesame-4711"
PROGRAM = (
    AGENT
    + """
from snapshotd.agent import model, record_usage
import json

@model(name="parrot")
def ask(text):
    record_usage(input_tokens=3, output_tokens=2, cost_usd=0.5)
    return {"role": "assistant", "content": text}

message("system", "Be short. \\x1b[2J")
message("user", "do it with " + os.environ["TOKEN"])
ask("I plan.")
reply = ask("I look.")
message("assistant", reply["content"])
shell("echo one; echo $TOKEN")
shell("exit 3")
message("assistant", {"content": None, "tool_calls": [
    {"id": "c1", "type": "function", "function": {"name": "shell", "arguments": json.dumps({"script": "echo two"})}}]})
shell("echo two")
message("tool", {"tool_call_id": "c1", "content": "two, cut"})
message("assistant", "Done.")
shell("head -c 3000000 /dev/zero | tr '\\\\0' z")
"""
)


def documents(snap: Snap, *words: str) -> list[dict[str, Any]]:
    """What an export prints, one document a line; those of the interchange format are right."""
    found = snap("export", *words).stdout
    assert found.isascii()
    assert "\x1b" not in found
    assert PLANTED not in found
    lines = found.splitlines()
    if "atif" in words:
        assert [problem(line) for line in lines] == [None] * len(lines)
    return [json.loads(line) for line in lines]


def shape(steps: list[dict[str, Any]]) -> list[tuple[str, str, list[str]]]:
    return [
        (step["source"], step["message"], [call["function_name"] for call in step.get("tool_calls", ())])
        for step in steps
    ]


def test_a_program_with_the_library(snap: Snap, runc_ready: None, tmp_path: Path) -> None:
    program = tmp_path / "agent.py"
    program.write_text(PROGRAM)
    trajectory = snap("run", "--runtime", "runc", "--secret", f"TOKEN={PLANTED}", "-d", program).stdout.strip()
    snap("attach", trajectory)
    taken = {one["tool"]["name"]: one["id"] for one in snap.json("log", "--all", trajectory)}
    (found,) = documents(snap, trajectory, "--format", "atif")
    steps = found["steps"]
    assert [one[0] for one in shape(steps)] == ["system", "user"] + ["agent"] * 4
    assert shape(steps)[2:] == [
        ("agent", "I plan.", []),
        ("agent", "I look.", ["shell", "shell"]),
        ("agent", "", ["shell"]),
        ("agent", "Done.", ["shell"]),
    ]
    assert "[secret:env-TOKEN:" in steps[1]["message"]
    assert steps[3]["metrics"] == {"prompt_tokens": 3, "completion_tokens": 2, "cost_usd": 0.5}
    looked, failed = steps[3]["observation"]["results"]
    assert json.loads(looked["content"])["output"].startswith("one\n[secret:env-TOKEN:")
    assert json.loads(failed["content"])["exit_code"] == 3
    assert steps[4]["observation"]["results"] == [{"source_call_id": "c1", "content": "two, cut"}]
    (huge,) = steps[5]["observation"]["results"]
    assert len(huge["content"]) < 1_100_000
    assert "[cut: 30000" in huge["content"]
    assert steps[5]["extra"] == {"snapshot": taken["shell"]}
    assert steps[5]["tool_calls"][0]["extra"] == {"snapshot": taken["shell"], "status": "done"}
    assert found["agent"]["name"] == "agent.py"
    assert found["final_metrics"] == {
        "total_prompt_tokens": 6,
        "total_completion_tokens": 4,
        "total_cost_usd": 1.0,
        "total_steps": 6,
    }
    assert found["extra"]["outcome"] == {"status": "finished", "exit_code": 0}

    (line,) = documents(snap, trajectory, "--format", "jsonl")
    assert [message["role"] for message in line["messages"]] == [
        *("system", "user", "assistant", "assistant", "tool", "tool", "assistant", "tool", "assistant", "tool")
    ]
    assert line["messages"][6]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "shell", "arguments": '{"script": "echo two"}'}}
    ]
    assert line["messages"][7] == {"role": "tool", "tool_call_id": "c1", "content": "two, cut"}
    assert [turn["message"] for turn in line["turns"]] == [2, 3, 6, 8]
    assert line["usage"] == {"input_tokens": 6, "output_tokens": 4, "cost_usd": 1.0}


def test_sub_agents_and_forks(snap: Snap, runc_ready: None, tmp_path: Path) -> None:
    """Each conversation of a gateway's agent, the calls that led to them, and a fork with its shared beginning."""
    agents = Agents(snap, "runc")
    ask = {
        "text": "I ask two.",
        "calls": [{"name": "agent", "arguments": {"prompt": f"explore {n}"}} for n in ("alpha", "beta")],
    }
    conversations = {f"explore {n}": [bash(f"echo {n} > {n}", n), {"text": f"{n} is done"}] for n in ("alpha", "beta")}
    main = [
        bash("echo begun > begun", "I begin."),
        ask,
        bash("cat alpha beta > sum", "I sum up."),
        {"text": "All is done."},
    ]
    with provider(tmp_path, *main, conversations=conversations) as at:
        trajectory = agents.run(at, PROGRAMS / "team_agent.py", "do it all", kind="anthropic")
        begun = next(step["id"] for step in agents.steps(trajectory) if step["tool"]["name"] == "bash")
        (fork,) = snap.json("fork", begun, "--resume")["trajectories"]
        agents.snap("attach", fork)
    (found,) = documents(snap, trajectory, "--format", "atif")
    assert shape(found["steps"]) == [
        ("system", "You lead.", []),
        ("user", "do it all", []),
        ("agent", "I begin.", ["bash"]),
        ("agent", "I ask two.", ["agent", "agent"]),
        ("agent", "I sum up.", ["bash"]),
        ("agent", "All is done.", []),
    ]
    called = found["steps"][3]["observation"]["results"]
    assert [result["content"] for result in called] == ["alpha is done", "beta is done"]
    by_id = {one["trajectory_id"]: one for one in found["subagent_trajectories"]}
    for result, name in zip(called, ("alpha", "beta"), strict=True):
        (ref,) = result["subagent_trajectory_ref"]
        child = by_id.pop(ref["trajectory_id"])
        assert shape(child["steps"])[1:] == [
            ("user", f"Today.\nexplore {name}", []),
            ("agent", name, ["bash"]),
            ("agent", f"{name} is done", []),
        ]
        assert child["extra"]["caller"] == result["source_call_id"]
        assert child["steps"][2]["tool_calls"][0]["extra"]["status"] == "done"
    assert not by_id
    assert [tool["function"]["name"] for tool in found["agent"]["tool_definitions"]] == ["bash", "agent"]

    first, second = documents(snap, trajectory, "--format", "atif", "--with-forks")
    assert first == found
    assert second["extra"]["parent"] == trajectory
    assert second["extra"]["fork_point"] == begun
    assert shape(second["steps"]) == shape(found["steps"])
    copied = [step.get("is_copied_context", False) for step in second["steps"]]
    assert copied == [True, True, True, False, False, False]

    lines = documents(snap, fork, "--format", "jsonl")
    assert next(line["lane"] for line in lines) is None
    assert sorted(line["caller"] or "" for line in lines) == ["", "call_1_0", "call_1_1"]
    main_line = lines[0]
    assert main_line["messages"][: main_line["shared_messages"]][-1]["role"] == "tool"
    assert main_line["tools"][0]["function"]["name"] == "bash"
    assert main_line["parameters"] == {"max_tokens": 100}

    both = tmp_path / "both.jsonl"
    told = snap.json("export", trajectory, fork, "--format", "jsonl", "-o", both)
    assert told["bytes"] == both.stat().st_size
    assert len(both.read_text().splitlines()) == 6


ASKS = """
import http.client, json, os, subprocess, sys

def ask(messages):
    connection = http.client.HTTPConnection(os.environ["OPENAI_BASE_URL"].split("/")[2])
    connection.request("POST", "/v1/chat/completions", json.dumps({"model": "m", "messages": messages}))
    reply = connection.getresponse().read()
    print(b"token_ids" in reply or b"logprob\\"" in reply, flush=True)
    return json.loads(reply)["choices"][0]["message"]

messages = [{"role": "user", "content": sys.argv[1] + os.environ.get(sys.argv[1], "")}]
while True:
    messages.append(ask(messages))
    calls = messages[-1].get("tool_calls")
    if not calls:
        break
    for call in calls:
        done = subprocess.run(json.loads(call["function"]["arguments"])["command"], shell=True, capture_output=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout.decode()})
"""


@pytest.mark.long  # what is captured: unit/gateway/test_tokens.py
def test_captured_tokens(snap: Snap, runc_ready: None, tmp_path: Path) -> None:
    """They are with the model calls and in both exports, forks go on capturing, and a secret's ids are not kept."""
    program = tmp_path / "asks.py"
    program.write_text(ASKS)
    agents = Agents(snap, "runc")
    more = ("--capture-tokens", "--secret", f"TOKEN={PLANTED}")
    with provider(tmp_path, bash("ls", "I look at it."), {"text": "Done."}) as at:
        trajectory = agents.run(at, program, "go", more=more)
        assert [request["body"]["logprobs"] for request in at.requests()] == [True, True]
        assert agents.snap("logs", trajectory).stdout == "False\nFalse\n"
        (found,) = documents(snap, trajectory, "--format", "atif")
        assert [step.get("metrics", {}).get("logprobs") for step in found["steps"]] == [None, [-0.5, -1.0], [-0.5]]
        assert found["steps"][2]["metrics"]["prompt_token_ids"] == [7, 8, 9]
        (line,) = documents(snap, trajectory, "--format", "jsonl")
        assert [turn["completion_token_ids"][:2] for turn in line["turns"]] == [[100, 101], [100]]
        assert line["parameters"] is None
        details = [one["details"] for one in snap.json("journal", trajectory) if one["kind"] == "model"]
        assert [one["capture"] for one in details] == [{"added": ["logprobs", "return_token_ids"]}] * 2

        at.forget()
        first = next(step["id"] for step in agents.steps(trajectory) if step["tool"]["name"] == "bash")
        (fork,) = snap.json("fork", first, "--resume")["trajectories"]
        agents.snap("attach", fork)
        assert [request["body"]["return_token_ids"] for request in at.requests()] == [True]

        at.forget()
        off = "off:env.SNAPSHOTD_PROVIDER_CAPTURE_TOKENS=0"
        (fork,) = snap.json("fork", first, "--resume", "--variant", off)["trajectories"]
        agents.snap("attach", fork)
        assert [sorted(request["body"]) for request in at.requests()] == [["messages", "model"]]

        hidden = agents.run(at, program, "TOKEN", more=more)
        (line,) = documents(snap, hidden, "--format", "jsonl")
        assert line["messages"][0]["content"].startswith("TOKEN[secret:env-TOKEN:")
        assert not any("logprobs" in turn or "completion_token_ids" in turn for turn in line["turns"])
    refused = snap("run", "--capture-tokens", program, code=125)
    assert "--provider openai" in refused.stderr
