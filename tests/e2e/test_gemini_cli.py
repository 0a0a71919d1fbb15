"""Gemini CLI as it comes from npm, run by its name, behind the gateway of its sandbox."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.model_rig import WAITS, Agents, provider
from tests.e2e.support import Snap
from tests.kept import CACHE

ROUTED = {"toolless": [{"text": '{"complexity_reasoning": "It is easy.", "complexity_score": 10}'}] * 9}
"""The replies to the question on the side which model a task needs."""


def _shell(command: str) -> dict[str, Any]:
    return {"name": "run_shell_command", "arguments": {"command": command, "description": "x"}}


def _edit(old: str, new: str) -> dict[str, Any]:
    arguments = {"file_path": "/workspace/greeting", "old_string": old, "new_string": new, "instruction": "x"}
    return {"name": "replace", "arguments": arguments}


MAIN = [
    {"text": "I greet.", "calls": [_shell("echo hello > greeting")]},
    {"text": "I edit.", "calls": [_edit("hello", "bye")]},
    {"text": "I fail.", "calls": [_edit("nowhere to be found", "x")]},
    {"text": "Both at once.", "calls": [_shell("echo l > left"), _shell("echo r > right")]},
    {"text": "I sum up.", "calls": [_shell("cat greeting left right > sum; exit 3")]},
    {"text": "All is done."},
]
FILES = {"greeting": "bye\n", "left": "l\n", "right": "r\n", "sum": "bye\nl\nr\n"}
AFTER = [
    {"greeting": "hello\n"},
    {"greeting": "bye\n"},
    {"greeting": "bye\n"},
    {"greeting": "bye\n", "left": "l\n", "right": "r\n"},
    {"greeting": "bye\n", "left": "l\n", "right": "r\n"},
    FILES,
]
"""The files after each call. Calls of one reply end together, as far as the gateway can see."""

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture
def agents(snap: Snap, runc_ready: None, full_image: str) -> Agents:
    found = Agents(snap, "runc", full_image)
    found.snap.env["XDG_CACHE_HOME"] = str(CACHE)
    return found


@pytest.fixture
def options(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "project").mkdir()
    return ("--workspace", str(tmp_path / "project"), "--env", "TZ=Etc/GMT+12")


@pytest.mark.parametrize("model", [(), ("-m", "with-ids")], ids=["calls without ids", "calls with ids"])
def test_one_snapshot_for_each_call(
    agents: Agents, options: tuple[str, ...], tmp_path: Path, model: tuple[str, ...]
) -> None:
    with provider(tmp_path, *MAIN, **ROUTED) as at:
        trajectory = agents.run(at, "gemini", *model, "-p", "do it all", kind="gemini", more=options)
        steps = [step for step in agents.steps(trajectory) if step["tool"]["name"] not in ("start", "exit")]
        names = [call["name"] for turn in MAIN for call in turn.get("calls", ())]
        assert [step["tool"]["name"] for step in steps] == names
        calls = agents.calls(trajectory)
        assert [call["name"] for call in calls] == names
        assert [call["status"] for call in calls] == ["done", "done", "failed", "done", "done", "done"]
        assert [agents.files(step["id"]) for step in steps] == AFTER
        said = agents.said(trajectory)
        assert [role for role, _ in said].count("assistant") == len(MAIN), "each message once"

        for number in (1, 3, 5):
            at.forget()
            another_day = ("--variant", "later:env.TZ=Etc/GMT-14")
            (fork,) = agents.snap.json("fork", "--resume", *another_day, steps[number]["id"])["trajectories"]
            agents.snap("attach", fork)
            assert "diverged" not in agents.names(fork)
            assert agents.files(fork) == FILES
            assert at.asked()[0], "what is recorded is not asked again"
            assert len(agents.said(fork)) == len(said)


def test_killed_and_resumed(agents: Agents, options: tuple[str, ...], tmp_path: Path) -> None:
    waiting = {"text": "I wait.", "calls": [_shell(f"bash -c '{WAITS}'")]}
    with provider(tmp_path, *MAIN[:2], waiting, {"text": "Done."}, **ROUTED) as at:
        trajectory = agents.start(at, "gemini", "-p", "do it all", kind="gemini", more=options)
        agents.kill(trajectory)
        at.forget()
        agents.resume(trajectory)
        assert at.asked() == [3]
    assert [call["status"] for call in agents.calls(trajectory)].count("done") == 3
    assert agents.files(trajectory) == {"greeting": "bye\n", "waited": "x\n"}


def test_a_session_goes_on_in_a_fork(agents: Agents, options: tuple[str, ...], tmp_path: Path) -> None:
    """The session's files are in the snapshot, so a plain fork and the program's own way to go on keep the history."""
    more = [{"text": "More.", "calls": [_shell("echo more > more")]}, {"text": "More is done."}]
    with provider(tmp_path, *MAIN[:2], {"text": "Begun."}, *more, **ROUTED) as at:
        trajectory = agents.run(at, "gemini", "-p", "do it all", kind="gemini", more=options)
        (fork,) = agents.snap.json("fork", trajectory, "--", "--resume", "latest", "-p", "and more")["trajectories"]
        agents.snap("attach", fork)
        assert at.asked()[-2:] == [3, 4], "the model was told everything before"
    assert agents.names(fork) == ["run_shell_command", "exit"]
    assert agents.files(fork) == {"greeting": "bye\n", "more": "more\n"}
    models = [entry for entry in agents.snap.json("journal", fork) if entry["kind"] == "model"]
    assert [bool(model["details"].get("side")) for model in models] == [True, False, False]
    assert [role for role, _ in agents.said(fork)].count("assistant") == 5, "each of the model's messages once"
