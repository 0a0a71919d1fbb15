"""Promotion: a branch becomes the head of the trajectory that it came from, with files and mind, and undo takes it back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotd.errors import Conflict
from tests.e2e.support import AGENT, Snap

PROGRAM = (
    AGENT
    + """
from snapshotd.agent import state

@tool(side_effect="irreversible", compensate=["sh", "-c", "echo undone >> /workspace/undone"])
def send(text):
    return "sent " + text

way = os.environ.get("WAY", "own")
for name in ("one", "two", "three"):
    at = name if name == "one" else name + "-" + way
    message("user", "say " + at)
    state["at"] = at
    shell("echo %s > file; touch %s" % (at, at))
    if name == "two":
        send(at)
message("assistant", "done " + way)
"""
)


@pytest.fixture
def line(snap: Snap, runtime: str, tmp_path: Path) -> Iterator[str]:
    program = tmp_path / "agent.py"
    program.write_text(PROGRAM)
    snap("run", "--quiet", "--runtime", runtime, "--name", tmp_path.name, program)
    yield tmp_path.name
    for trajectory in reversed(snap.json("ls")):
        snap("rm", "--force", trajectory["id"], code=None)


def forked(snap: Snap, line: str, *ways: str) -> list[str]:
    """Branches that go on from the first step, each in its way, to their end."""
    first = next(one["id"] for one in snap.json("log", line) if one["tool"]["name"] == "shell")
    variants = [word for way in ways for word in ("--variant", f"{way}:env.WAY={way}")]
    forks: list[str] = snap.json("fork", first, "--resume", *variants)["trajectories"]
    for fork in forks:
        snap("wait", fork)
    return forks


def mind(snap: Snap, ref: str) -> dict[str, Any]:
    return {
        "said": snap.json("show", "--conversation", ref),
        "state": snap.json("state", ref),
        "done": [(one["name"], one["arguments"], one["status"], one["error"]) for one in snap.json("journal", ref)],
    }


def test_a_branch_becomes_the_head_and_undo_takes_it_back(snap: Snap, line: str) -> None:
    left, right = forked(snap, line, "left", "right")
    before, log = mind(snap, line), snap.json("log", line)
    refused = snap("promote", right, code=Conflict.exit_code).stderr
    assert "leaves them behind" in refused
    assert "1 irreversible call since" in refused
    assert snap.json("log", line) == log, "a refusal changes nothing"
    taken = snap.json("promote", "--yes", right)
    assert taken["trajectory"] == log[-1]["trajectory"]
    assert (taken["tool"]["name"], taken["tool"]["arguments"]["branch"]) == ("promote", right)
    assert snap.json("diff", right, line) == []
    assert mind(snap, line) == mind(snap, right)
    assert snap.manifest(line) == snap.manifest(right), "the sandbox itself has the files"
    assert [one["arguments"] for one in snap.json("effects", line)] == [{"text": "two-own"}]
    undone = snap.json("exec", line, "--", "true")["snapshot"]
    assert "nothing to undo" in snap("undo", line, code=Conflict.exit_code).stderr
    assert undone != taken["id"]
    again = snap.json("promote", "--yes", left)
    assert mind(snap, again["id"]) == mind(snap, left)
    snap("undo", line)
    assert mind(snap, line) == mind(snap, right)
    snap("rewind", "--yes", line, log[-1]["id"])
    assert mind(snap, line) == before
    assert snap.json("diff", log[-1]["id"], line) == []


@pytest.mark.long  # its files and its mind: the first test
def test_the_program_goes_on_from_a_promoted_branch(snap: Snap, line: str) -> None:
    """Its arguments are its own, so a branch that went its way is met call by call, and none runs again."""
    (branch,) = forked(snap, line, "own")
    snap("promote", "--yes", branch)
    snap("stop", line)
    count = len(snap.json("journal", line))
    snap("resume", line)
    snap("wait", line)
    assert len(snap.json("journal", line)) == count, "each call was answered from the record"
    assert [one["status"] for one in snap.json("ls") if line in (one["id"], one["name"])] == ["finished"]
    assert snap("cat", f"{line}:/workspace/file").stdout == "three-own\n"


def test_calls_left_behind_are_compensated_once(snap: Snap, line: str) -> None:
    (branch,) = forked(snap, line, "left")
    snap("promote", "--compensate", branch)
    assert [one["compensated"] for one in snap.json("effects", line)] == ["done"]
    assert [one["tool"]["name"] for one in snap.json("log", line)].count("compensate") == 1
    assert snap.json("diff", branch, line) == [], "what the compensation wrote is left behind, too"


@pytest.mark.long  # forks of any kind: test_fork.py
def test_neither_needs_the_other_afterwards(snap: Snap, line: str) -> None:
    (branch,) = forked(snap, line, "left")
    snap("promote", "--wait", "stored", "--yes", branch)
    there = mind(snap, line)
    snap("rm", "--force", branch)
    assert mind(snap, line) == there
    assert snap("cat", f"{line}:/workspace/file").stdout == "three-left\n"
    assert snap("check", "--read-data").returncode == 0


@pytest.mark.long  # refused alike: test_what_is_not_merged in test_merge.py
@pytest.mark.runc
def test_what_is_not_promoted(snap: Snap) -> None:
    box, first = snap.create("--runtime", "runc")
    other, _ = snap.create("--runtime", "runc")
    assert "was not forked" in snap("promote", box, code=Conflict.exit_code).stderr
    (branch,) = snap.json("fork", first)["trajectories"]
    assert "no step" in snap("promote", branch, code=Conflict.exit_code).stderr
    snap.sh(branch, "echo branch > file")
    assert "no branch" in snap("promote", branch, "--into", other, code=Conflict.exit_code).stderr
    snap.sh(branch, "sleep 1000 >/dev/null 2>&1 & echo started")
    assert "stop it first" in snap("promote", branch, code=Conflict.exit_code).stderr
    snap("stop", branch)
    (deep,) = snap.json("fork", branch)["trajectories"]
    snap.sh(deep, "echo deep > file")
    snap.sh(box, "sleep 1000 >/dev/null 2>&1 & echo started")
    assert "stop it first" in snap("promote", "--yes", deep, "--into", box, code=Conflict.exit_code).stderr
    snap("stop", box)
    taken = snap.json("promote", "--wait", "stored", "--yes", deep, "--into", box)
    assert snap("cat", f"{box}:/workspace/file").stdout == "deep\n"
    assert taken["tool"]["arguments"]["of"] == snap.json("show", deep)["id"]
    assert snap("cat", f"{branch}:/workspace/file").stdout == "branch\n"
    for each in (deep, branch, other, box):
        snap("rm", "--force", each)


@pytest.mark.long  # what is refused changes nothing: test_bad_input.py
def test_what_is_refused_leaves_no_sandbox_behind(snap: Snap) -> None:
    line, first = snap.create("--runtime", "runc")
    snap("stop", line)
    (fork,) = snap.json("fork", first)["trajectories"]
    snap("stop", fork)
    for words in (("undo", line), ("promote", fork), ("rewind", line, "--to", "f" * 12), ("retry", line, "nothing")):
        assert snap(*words, code=None).returncode, words
        status = {one["id"]: one["status"] for one in snap.json("ls")}
        assert (status[line], status[fork]) == ("stopped", "stopped"), words
    assert snap.json("rm", line, fork)["removed"] == [fork, line], "forks go before what they began at"
