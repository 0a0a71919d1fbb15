"""Aider as it comes from PyPI, behind the gateway of its sandbox: it takes its edits from the text of a reply, and tells
the model what its test command says until that succeeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.model_rig import WAITS, Agents, provider
from tests.e2e.support import Snap
from tests.kept import CACHE

CHECK = "cat greeting; ls; grep -q bye greeting && test -e left"
"""The command that tests what aider did: it fails after the first two replies."""
AIDER = ("aider", "--no-git", "--model", "openai/gpt-4o", "--auto-test", "--message", "greet", "--test-cmd")


def _edit(file: str, old: str, new: str) -> str:
    return f"{file}\n```\n<<<<<<< SEARCH\n{old}=======\n{new}>>>>>>> REPLACE\n```\n"


REPLIES = {
    1: _edit("greeting", "", "hello\n"),
    4: _edit("greeting", "hello\n", "bye\n"),
    7: "I write.\n\n" + _edit("left", "", "left\n"),
}
"""By the number of messages that a request holds in the model's name: some are aider's own."""
STEPS = [{"text": REPLIES.get(number, "beyond the script")} for number in range(8)]

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture
def agents(snap: Snap, runc_ready: None, full_image: str) -> Agents:
    """pip's packages are kept from run to run."""
    return Agents(Snap(snap.state_dir, {**snap.env, "XDG_CACHE_HOME": str(CACHE)}), "runc", full_image)


def _project(folder: Path) -> tuple[str, ...]:
    (folder / "project").mkdir()
    return ("--workspace", str(folder / "project"))


def _turns(agents: Agents, trajectory: str) -> list[str]:
    return [step["id"] for step in agents.steps(trajectory) if step["tool"]["name"] == "turn"]


def _files(agents: Agents, snapshot: str) -> dict[str, str]:
    """Without aider's own."""
    return {name: text for name, text in agents.files(snapshot).items() if not name.startswith(".aider")}


def test_one_snapshot_for_each_turn(agents: Agents, tmp_path: Path) -> None:
    with provider(tmp_path, *STEPS) as at:
        trajectory = agents.run(at, *AIDER, CHECK, more=_project(tmp_path))
        assert at.asked() == list(REPLIES)
        assert agents.names(trajectory) == ["start", "turn", "turn", "exit"]
        turns = _turns(agents, trajectory)
        assert [_files(agents, turn) for turn in turns] == [{"greeting": "hello\n"}, {"greeting": "bye\n"}]
        end = {"greeting": "bye\n", "left": "left\n"}
        assert _files(agents, trajectory) == end
        entries = agents.snap.json("journal", trajectory)
        assert [entry["kind"] for entry in entries].count("model") == 3
        assert {entry["details"]["lane"] for entry in entries} == {0}
        said = agents.said(trajectory)
        assert sum("REPLACE" in str(content) for role, content in said if role == "assistant") == 3
        for number, turn in enumerate(turns):
            at.forget()
            (fork,) = agents.snap.json("fork", "--resume", turn)["trajectories"]
            agents.snap("attach", fork)
            assert "diverged" not in agents.names(fork)
            assert at.asked() == list(REPLIES)[number + 1 :], "what is recorded is not asked again"
            assert _files(agents, fork) == end
            assert [role for role, _ in agents.said(fork)] == [role for role, _ in said]


def test_killed_and_resumed_then_rewound(agents: Agents, tmp_path: Path) -> None:
    waits = f"! test -e left || bash -c '{WAITS}'; {CHECK}"
    with provider(tmp_path, *STEPS) as at:
        trajectory = agents.start(at, *AIDER, waits, more=_project(tmp_path))
        agents.kill(trajectory)
        at.forget()
        agents.resume(trajectory)
        assert at.asked() == []
        assert agents.names(trajectory).count("turn") == 2
        end = {"greeting": "bye\n", "left": "left\n", "waited": "x\n"}
        assert _files(agents, trajectory) == end

        agents.snap("rewind", trajectory, _turns(agents, trajectory)[0])
        assert _files(agents, trajectory) == {"greeting": "hello\n"}
        agents.resume(trajectory)
        assert at.asked() == list(REPLIES)[1:]
        assert _files(agents, trajectory) == end
