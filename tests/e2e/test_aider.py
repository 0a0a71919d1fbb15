"""Aider as it comes from PyPI, behind the gateway of its sandbox: it takes its edits from the text of a reply, and tells
the model what its test command says until that succeeds."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.model_rig import WAITS, Agents, provider
from tests.e2e.support import Snap
from tests.kept import CACHE

CHECK = "cat greeting; ls; grep -q bye greeting && test -e left"
"""The command that tests what aider did: it fails after the first two replies."""
AIDER = ("aider", "--model", "openai/gpt-4o", "--auto-test", "--message", "greet", "--test-cmd")


def _edit(file: str, old: str, new: str) -> str:
    return f"{file}\n```\n<<<<<<< SEARCH\n{old}=======\n{new}>>>>>>> REPLACE\n```\n"


REPLIES = [
    _edit("greeting", "", "hello\n"),
    _edit("greeting", "hello\n", "bye\n"),
    "I write.\n\n" + _edit("left", "", "l\n"),
]


def _steps(*places: int) -> list[dict[str, str]]:
    """`places`: of the replies, by the number of messages that a request holds in the model's name. Some of them are
    aider's own words. A request without any is the one for the message of a commit."""
    replies = dict(zip(places, REPLIES, strict=True))
    return [{"text": replies.get(number, "a commit")} for number in range(places[-1] + 1)]


WITH_GIT, WITHOUT_GIT = (1, 5, 8), (1, 4, 7)

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
    """Without aider's own and git's."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        files = Path(folder) / "files"
        agents.snap("restore", snapshot, "--path", "/workspace", "--to", files)
        return {file.name: file.read_text() for file in files.iterdir() if not file.name.startswith(".")}


@pytest.mark.parametrize("git", [True, False], ids=["git", "no-git"])
def test_one_snapshot_for_each_turn(agents: Agents, tmp_path: Path, git: bool) -> None:
    """With git, as aider does unless told otherwise, another model words the message of each commit. What it is asked holds what the
    tests said, which is another thing each time."""
    places = WITH_GIT if git else WITHOUT_GIT
    words = (*AIDER, f"cat /proc/sys/kernel/random/uuid; {CHECK}", *([] if git else ["--no-git"]))
    with provider(tmp_path, *_steps(*places)) as at:
        trajectory = agents.run(at, *words, more=_project(tmp_path))
        assert [step for step in at.asked() if step] == list(places)
        assert len(at.asked()) == (6 if git else 3)
        assert agents.names(trajectory) == ["start", "turn", "turn", "exit"]
        turns = _turns(agents, trajectory)
        assert [_files(agents, turn) for turn in turns] == [{"greeting": "hello\n"}, {"greeting": "bye\n"}]
        end = {"greeting": "bye\n", "left": "l\n"}
        assert _files(agents, trajectory) == end
        entries = agents.snap.json("journal", trajectory)
        own = [entry for entry in entries if not entry["details"].get("side")]
        assert Counter(entry["kind"] for entry in own) == Counter(model=3, checkpoint=2)
        assert {entry["details"]["lane"] for entry in own} == {0}
        said = agents.said(trajectory)
        assert sum("REPLACE" in str(content) for role, content in said if role == "assistant") == 3
        for number, turn in enumerate(turns):
            at.forget()
            (fork,) = agents.snap.json("fork", "--resume", turn)["trajectories"]
            agents.snap("attach", fork)
            assert "diverged" not in agents.names(fork)
            assert [step for step in at.asked() if step] == list(places)[number + 1 :], (
                "what is recorded is not asked again"
            )
            assert _files(agents, fork) == end
            assert [role for role, _ in agents.said(fork)] == [role for role, _ in said]


def test_killed_and_resumed_then_rewound(agents: Agents, tmp_path: Path) -> None:
    words = (*AIDER, f"! test -e left || bash -c '{WAITS}'; {CHECK}", "--no-git")
    with provider(tmp_path, *_steps(*WITHOUT_GIT)) as at:
        trajectory = agents.start(at, *words, more=_project(tmp_path))
        agents.kill(trajectory)
        at.forget()
        agents.resume(trajectory)
        assert at.asked() == [], "each reply was recorded before aider had it"
        assert agents.names(trajectory).count("turn") == 2
        end = {"greeting": "bye\n", "left": "l\n", "waited": "x\n"}
        assert _files(agents, trajectory) == end

        agents.snap("rewind", trajectory, _turns(agents, trajectory)[0])
        assert _files(agents, trajectory) == {"greeting": "hello\n"}
        agents.resume(trajectory)
        assert at.asked() == list(WITHOUT_GIT[1:])
        assert _files(agents, trajectory) == end
