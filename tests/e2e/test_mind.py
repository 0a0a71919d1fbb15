"""The agent's mind through the command line: run, look, go back, approve, edit, retry, go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from snapshotd.types import new_id
from tests.e2e.support import Snap, wait_until

SECRET = "planted-" + "sesame-4711"
AGENT = """
import os
import sys
from snapshotd.agent import message, state, task, tool

@tool(side_effect="irreversible", compensate=["sh", "-c", "echo undone >> /workspace/undone"])
def send(n):
    with open("/workspace/sent", "a") as f:
        f.write(f"{n}\\n")
    return {"n": n}

@tool(approve="really?")
def deploy(where):
    return where

@tool
def write(n):
    with open(f"/workspace/f{n}", "w") as f:
        f.write(str(n))
    return n

message("user", "go")
with task("first"):
    for n in range(3):
        write(n)
send(1)
state["sent"] = True
message("assistant", "sent")
print(os.environ["TOKEN"], flush=True)
if len(sys.argv) > 1:
    print(deploy(sys.argv[1]), flush=True)
write(9)
"""


def started(snap: Snap, folder: Path, runtime: str, *args: str) -> str:
    """The name of a run of the agent; with arguments it asks for approval and is left running."""
    agent, name = folder / "agent.py", f"mind-{new_id()[:8]}"
    agent.write_text(AGENT)
    words = [
        "run",
        "--runtime",
        runtime,
        "--name",
        name,
        "--secret",
        f"TOKEN={SECRET}",
        *(["-d"] if args else []),
        agent,
        *args,
    ]
    said = snap(*words)
    assert SECRET not in said.stdout + said.stderr
    return name


def snapshot_of(snap: Snap, name: str, tool: str) -> str:
    """The first snapshot that a tool left."""
    return next(str(item["id"]) for item in snap.json("log", name) if item["tool"]["name"] == tool)


def test_back_and_on_again(snap: Snap, tmp_path: Path, runtime: str) -> None:
    name = started(snap, tmp_path, runtime)
    journal = snap.json("journal", name)
    assert [entry["name"] for entry in journal] == ["write", "write", "write", "first", "send", "write"]
    results = [entry["result"] for entry in journal]
    assert results == [0, 1, 2, None, {"n": 1}, 9]
    assert snap.json("state", name) == {"sent": True}
    assert [(item["name"], item["status"]) for item in snap.json("tasks", name)] == [("first", "completed")]
    first = snapshot_of(snap, name, "write")

    refused = snap("rewind", name, first, code=2)
    assert "send (" in refused.stderr
    preview = snap.json("rewind", "--preview", name, first)
    assert {item["path"] for item in preview["changes"]} == {
        "/workspace/f1",
        "/workspace/f2",
        "/workspace/f9",
        "/workspace/sent",
    }
    assert [message["content"] for message in preview["messages"]] == ["sent"]
    snap("rewind", "--compensate", name, first)
    assert [entry["name"] for entry in snap.json("journal", name)] == ["write"]
    assert [(item["name"], item["compensated"]) for item in snap.json("effects", name)] == [("send", "done")]
    snap("cat", f"{name}:f9", code=4)
    snap("undo", name)
    assert snap("cat", f"{name}:f9").stdout == "9"
    assert [entry["name"] for entry in snap.json("journal", name)] == [entry["name"] for entry in journal]

    snap("rewind", "--yes", name, snapshot_of(snap, name, "task"))
    snap("rewind", "--yes", name, first)
    events = [json.loads(line) for line in snap("resume", "--json", name).stdout.splitlines()]
    replayed = [event["name"] for event in events if event["event"] == "replayed"]
    assert replayed == ["write"], "the rest happened again"
    assert snap("cat", f"{name}:sent").stdout == "1\n"
    assert snap("cat", f"{name}:f9").stdout == "9"


def test_an_approval_with_other_arguments(snap: Snap, tmp_path: Path, runtime: str) -> None:
    name = started(snap, tmp_path, runtime, "production")
    line = snap.json("show", name)["trajectory"]

    def waiting() -> list[str]:
        return [item["id"] for item in snap.json("approvals") if item["trajectory"] == line]

    wait_until(lambda: bool(waiting()), "the approval is asked for")
    (identity,) = waiting()
    view = snap.json("approval", identity)
    assert view["arguments"] == {"where": "production"}
    assert "/workspace/sent" in {item["path"] for item in view["changes"]}
    (tmp_path / "other.json").write_text('{"where": "staging"}')
    snap("approve", identity, "--by", "ann", "--reason", "rather there", "--arguments", tmp_path / "other.json")
    followed = snap("attach", name)
    assert "staging" in followed.stdout
    assert SECRET not in followed.stdout
    snap("deny", identity, code=6)


def test_an_edit_is_where_the_agent_goes_on(snap: Snap, tmp_path: Path, runtime: str) -> None:
    name = started(snap, tmp_path, runtime)
    (tmp_path / "new.txt").write_text("edited")
    words = ("--file", f"f0={tmp_path}/new.txt", "--state", "hint=[1]", "--message", "user=look again", "--resume")
    first = snapshot_of(snap, name, "write")
    assert snap.json("state", snap("edit", first, *words[:-1]).stdout.strip()) == {"hint": [1]}
    made = snap("edit", first, *words).stdout.strip()
    snap("attach", made)
    assert snap("cat", f"{made}:f0").stdout == "edited"
    assert snap("cat", f"{made}:f9").stdout == "9"
    assert snap.json("state", made) == {"hint": [1], "sent": True}
    assert [message["content"] for message in snap.json("show", "--conversation", made)] == ["go", "look again", "sent"]
    assert snap("cat", f"{name}:f0").stdout == "0", "the old one is as it was"


def test_only_the_first_of_two_writers_takes_the_step(snap: Snap, runtime: str) -> None:
    trajectory, head = snap.create("--runtime", runtime)
    snap("exec", "--if-head", head, trajectory, "--", "touch", "one")
    refused = snap("exec", "--if-head", head, trajectory, "--", "touch", "two", code=125)
    assert snap.json("show", trajectory)["id"][:12] in refused.stderr
    snap("cat", f"{trajectory}:two", code=4)


def test_values_outlive_what_wrote_them(snap: Snap) -> None:
    space = f"tests/{new_id()[:8]}"
    assert snap("store", "put", space, "plan", '{"n": 1}').stdout == "1\n"
    snap("store", "put", space, "plan", "2", "--if-version", "7", code=6)
    assert snap.json("store", "get", space, "plan")["value"] == {"n": 1}


LOOP = """
import os

from snapshotd.agent import message, messages, model, tool

@model(name="m")
def ask(said):
    results = [one["content"] for one in said if one["role"] == "tool"]
    if len(results) < 3:
        return {"call": len(results), "knows": results}
    return {"answer": results}

@tool
def step(n):
    with open(f"/workspace/f{n}", "w") as file:
        file.write(str(n))
    return f"result {n}"

message("user", "go")
while True:
    reply = ask(messages())
    message("assistant", reply)
    if "answer" in reply:
        break
    result = step(reply["call"])
    print(sorted(os.listdir("/workspace")), flush=True)
    message("tool", result)
print(reply["answer"], flush=True)
"""


@pytest.mark.long  # one call: system/test_retry_and_edit.py
def test_the_result_of_any_call_of_a_loop_is_another_one(snap: Snap, tmp_path: Path) -> None:
    """Its model calls take the conversation as it was said, and the files beside them are those after the call."""
    (tmp_path / "agent.py").write_text(LOOP)
    (tmp_path / "new.json").write_text('"other"')
    snap("run", "--name", "loop", tmp_path / "agent.py")
    steps = [item["id"] for item in snap.json("log", "loop") if item["tool"]["name"] == "step"]
    made = []
    for n, step in enumerate(steps):
        edit = snap("edit", "--resume", "--result", tmp_path / "new.json", step).stdout.strip()
        varied = snap.json("fork", "--resume", "--variant", 'v:result="other"', step)["trajectories"]
        made += [(n, name) for name in (edit, *varied)]
    assert len(made) == 6
    for n, name in made:
        followed = snap("attach", "-q", name)
        wanted = [f"result {k}" if k != n else "other" for k in range(3)]
        listed = [str([f"f{j}" for j in range(k + 1)]) for k in range(3)]
        assert followed.stdout.splitlines() == [*listed, str(wanted)]
        said = [(one["role"], one["content"]) for one in snap.json("show", "--conversation", name)]
        results = [content for role, content in said if role == "tool"]
        assert results == wanted
        assert [role for role, _ in said] == ["user", *["assistant", "tool"] * 3, "assistant"]
        assert said[-1] == ("assistant", {"answer": wanted})
        assert "diverged" not in [item["tool"]["name"] for item in snap.json("log", name)]
        snap("rm", "--force", name)
