"""The daemon is killed under a running agent, which does not notice: its call waits, and is sent again to the next daemon."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotd import failpoints
from tests.e2e.support import Snap, wait_until
from tests.leftovers import nothing_left

STEPS = 12
PROGRAM = """
import os, sys, threading, time
from snapshotd.agent import checkpoint, emit, message, model, now, state, store, task, tasks, tool, uuid

ME = os.getpid()

@tool
def work(number):
    emit("at %d\\n" % number)
    with open("/workspace/log", "a") as log:
        log.write("%d\\n" % number)
    emit("done with %d\\n" % number, stream="stderr")
    return {"lines": sum(1 for _ in open("/workspace/log")), "pid": os.getpid() == ME}

@model
def ask(prompt):
    return {"text": prompt.upper()}

message("user", "work")
name = uuid()
for number in range(%STEPS%):
    with task("task %d" % number):
        began = now()
        print("step", number, flush=True)
        done = work(number)
        message("assistant", {"number": number, "done": done, "later": now() >= began})
        state["last"] = number
        said = ask("%d of %s" % (number, name))
        message("assistant", said["text"] == ("%d of %s" % (number, name)).upper())
    if number % 4 == 3:
        checkpoint("at %d" % number)
        state["stored"] = store.put("survived", number, namespace=name)
assert uuid() != name
message("assistant", [one["status"] for one in tasks()])
print("all done", flush=True)
""".replace("%STEPS%", str(STEPS))


SHOWN = sorted([*(f"{what} {number}" for number in range(STEPS) for what in ("step", "at")), "all done"])
"""What a follower sees on standard output; what a program prints and what a call emits come on ways of their own."""


@pytest.fixture
def lone(own_snap: Snap) -> Iterator[Snap]:
    yield own_snap
    for one in sorted(own_snap.json("ls"), key=lambda one: one["forked_from"] is None):
        own_snap("rm", "--force", one["id"])
    nothing_left(own_snap.state_dir, running=True)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "agent.py"
    path.write_text(PROGRAM)
    return path


def _found(snap: Snap, name: str) -> dict[str, Any]:
    """What a run came to."""
    log = snap.json("log", "--all", name)
    works = [one for one in log if one["tool"]["name"] == "work"]
    return {
        "steps": [(one["tool"]["name"], one["tool"]["status"]) for one in log],
        "files": snap("cat", f"{name}:/workspace/log").stdout,
        "output": [snap("show", "--output", "stdout", one["id"]).stdout for one in works],
        "errors": [snap("show", "--output", "stderr", one["id"]).stdout for one in works],
        "printed": snap("show", "--output", "stdout", log[-1]["id"]).stdout,
        "conversation": [(one["role"], one["content"]) for one in snap.json("show", "--conversation", name)],
        "state": snap.json("state", name),
        "journal": [(one["kind"], one["name"], one["status"]) for one in snap.json("journal", name)],
    }


def _expected() -> dict[str, Any]:
    numbers = range(STEPS)
    steps, journal = [("start", "done")], []
    conversation: list[tuple[str, Any]] = [("user", "work")]
    for number in numbers:
        steps += [("work", "done"), ("task", "done")]
        journal += [("tool", "work", "done"), ("model", "ask", "done"), ("task", f"task {number}", "done")]
        conversation += [
            ("assistant", {"number": number, "done": {"lines": number + 1, "pid": True}, "later": True}), ("assistant", True),
        ]  # fmt: skip
        if number % 4 == 3:
            steps.append(("checkpoint", "done"))
            journal.append(("checkpoint", "checkpoint", "done"))
    return {
        "steps": [*steps, ("exit", "done")],
        "files": "".join(f"{number}\n" for number in numbers),
        "output": [f"at {number}\n" for number in numbers],
        "errors": [f"done with {number}\n" for number in numbers],
        "printed": "".join(f"step {number}\n" for number in numbers) + "all done\n",
        "conversation": [*conversation, ("assistant", ["completed"] * STEPS)],
        "state": {"last": STEPS - 1, "stored": STEPS // 4},
        "journal": journal,
    }


def _ended(running: subprocess.Popen[str]) -> None:
    """The follower was there to the end, and has shown everything once."""
    out, errors = running.communicate(timeout=240)
    assert running.returncode == 0, errors
    assert sorted(out.splitlines()) == SHOWN


@pytest.mark.timeout(600)
def test_killed_again_and_again(lone: Snap, runtime: str, program: Path) -> None:
    snap = lone
    chance = random.Random(f"{runtime}-1")
    running = snap.start("run", "--runtime", runtime, "--name", "tough", program)
    wait_until(lambda: bool(snap.json("ps")), "it runs")
    kills = 0
    while running.poll() is None and kills < 6:
        snap.kill_daemon()
        kills += 1
        snap("ls")  # or the follower was faster: there is a next one
        try:
            running.wait(chance.uniform(0.05, 0.7))
        except subprocess.TimeoutExpired:
            continue
    _ended(running)
    assert _found(snap, "tough") == _expected()


@pytest.mark.runc
@pytest.mark.timeout(600)
@pytest.mark.parametrize("hit", [1, 7])
@pytest.mark.parametrize("failpoint", [name for name in failpoints.NAMES if name.startswith(("engine.step.", "engine.journal."))])
def test_killed_at_a_failpoint(lone: Snap, runc_ready: None, program: Path, failpoint: str, hit: int) -> None:
    snap = lone
    snap.stop_daemon()
    hit = 1 if failpoint == "engine.step.outputs_saved" else hit  # passed once: by the end of the program
    armed = Snap(snap.state_dir, {**snap.env, "SNAPSHOTD_FAILPOINT": f"{failpoint}:{hit}"})
    first = armed.json("daemon", "--restart")["started"]
    running = snap.start("run", "--runtime", "runc", "--name", "armed", program)
    _ended(running)
    assert snap.daemon_pid() != first, "it died"
    assert _found(snap, "armed") == _expected()
