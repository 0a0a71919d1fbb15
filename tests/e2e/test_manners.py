"""Agents that do not send the conversation as it was, with calls and their results: a snapshot for each step all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import long
from tests.e2e.model_rig import PROGRAMS, WAITS, Agents, bash, let_go, provider, waits
from tests.e2e.support import Snap

PROGRAM = PROGRAMS / "manners_agent.py"
COMMANDS = ("echo 1 > one", "cat one one > two", "rm one; echo 3 > three")
FILES = {"two": "1\n1\n", "three": "3\n"}
MANNERS = ("reports", "acts", "arranges", "follows", "keeps")
IN_WORDS = ("acts", "arranges")


def script(manner: str, *commands: str) -> dict[str, Any]:
    """Each command a step; and the end."""
    steps = [bash(command, f"Step {number}.") for number, command in enumerate(commands)]
    if manner in IN_WORDS:
        steps = [{"text": f"Step {number}. <run>{command}</run>\n"} for number, command in enumerate(commands)]
    script: dict[str, Any] = {"steps": [*steps, {"text": "Done."}]}
    return script if manner != "keeps" else {**script, "by": "sequence"}  # the provider keeps what was said


def taken(agents: Agents, trajectory: str) -> list[dict[str, Any]]:
    """The snapshots of the agent's steps."""
    return [step for step in agents.steps(trajectory) if step["tool"]["name"] in ("bash", "turn")]


@pytest.mark.parametrize("manner", long.some(MANNERS, 3))
def test_a_snapshot_for_each_step_from_which_it_goes_on(agents: Agents, tmp_path: Path, manner: str) -> None:
    whole = script(manner, *COMMANDS)
    with provider(tmp_path, *whole.pop("steps"), **whole) as at:
        trajectory = agents.run(at, PROGRAM, manner, "do it")
        steps = taken(agents, trajectory)
        outcome = "unknown" if manner == "reports" else "done"
        name = "turn" if manner in IN_WORDS else "bash"
        assert [(step["tool"]["name"], step["tool"]["status"]) for step in steps] == [(name, outcome)] * 3
        assert [sorted(agents.files(step["id"])) for step in steps] == [["one"], ["one", "two"], ["three", "two"]]
        entries = agents.snap.json("journal", trajectory)
        ends = [entry for entry in entries if entry["kind"] == ("checkpoint" if name == "turn" else "tool")]
        assert len(ends) + [entry["kind"] for entry in entries].count("model") == len(entries) == 7
        assert {entry["details"]["lane"] for entry in entries} == {0}
        assert [entry["snapshot"] for entry in ends] == [step["id"] for step in steps]
        said = agents.said(trajectory)
        assert sum(content == "You work." for _, content in said) == 1
        if manner == "keeps":
            return  # its provider's conversation cannot go back
        for number, step in enumerate(steps):
            at.forget()
            (fork,) = agents.snap.json("fork", "--resume", step["id"])["trajectories"]
            agents.snap("attach", fork)
            assert agents.files(fork) == FILES
            assert at.asked() == list(range(number + 1, 4)), "what is recorded is not asked again"
            assert [step["tool"]["name"] for step in agents.steps(fork)] == [*[name] * (2 - number), "exit"]
            assert len(agents.said(fork)) == len(said)


@pytest.mark.parametrize("manner", long.some(MANNERS, 1))
def test_killed_and_resumed(agents: Agents, tmp_path: Path, manner: str) -> None:
    whole = script(manner, COMMANDS[0], COMMANDS[1], WAITS, COMMANDS[2])
    with provider(tmp_path, *whole.pop("steps"), **whole) as at:
        trajectory = agents.start(at, PROGRAM, manner, "do it")
        agents.kill(trajectory)
        assert len(taken(agents, trajectory)) == 2
        agents.resume(trajectory)
        assert at.asked() == [0, 1, 2, 3, 4]
        assert len(taken(agents, trajectory)) == 4
        assert agents.files(trajectory) == {**FILES, "waited": "x\n"}


@pytest.mark.parametrize("manner", long.some(MANNERS, 1))
def test_the_daemon_is_killed_in_between(own_snap: Snap, runc_ready: None, tmp_path: Path, manner: str) -> None:
    """The next daemon goes on with the lane, and the agent notices nothing."""
    agents = Agents(own_snap, "runc")
    whole = script(manner, COMMANDS[0], WAITS, *COMMANDS[1:])
    with provider(tmp_path, *whole.pop("steps"), **whole) as at:
        trajectory = agents.start(at, PROGRAM, manner, "do it")
        waits(trajectory)
        own_snap.kill_daemon()
        own_snap("ls")
        let_go(trajectory)
        agents.snap("attach", trajectory)
        assert at.asked() == [0, 1, 2, 3, 4]
    assert len(taken(agents, trajectory)) == 4
    assert {entry["details"]["lane"] for entry in agents.snap.json("journal", trajectory)} == {0}
    assert agents.files(trajectory) == {**FILES, "waited": "x\n"}
