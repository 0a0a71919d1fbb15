"""Claude Code as it comes from npm, behind the gateway of its sandbox: shell, edit, a failing command, two sub-agents at
once. Killed and resumed, forked from the middle, and run again on another day."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.model_rig import WAITS, Agents, from_npm, provider

VERSION = "2.1.197"
PACKAGE = "@anthropic-ai/claude-code-linux-x64"
ENVIRONMENT = ("IS_SANDBOX=1", "DISABLE_AUTOUPDATER=1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1")
CLAUDE = "/workspace/claude --dangerously-skip-permissions --model claude-sonnet-4-5 -p"
START = ("--", "bash", "-c", f"mkdir -p /work && cd /work && exec {CLAUDE} 'do it all'")


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def _bash(command: str) -> dict[str, Any]:
    return _call("Bash", command=command, description="a step")


def _agent(task: str) -> dict[str, Any]:
    return _call("Agent", description="a part", prompt=task, subagent_type="general-purpose")


def _lane(name: str) -> list[dict[str, Any]]:
    steps = [{"text": name, "calls": [_bash(f"echo {number} > {name}{number}")]} for number in (1, 2)]
    return [*steps, {"text": f"{name} is done"}]


MAIN = [
    {"text": "I greet.", "calls": [_bash("echo hello > greeting")]},
    {"text": "I read.", "calls": [_call("Read", file_path="/work/greeting")]},
    {"text": "I edit.", "calls": [_call("Edit", file_path="/work/greeting", old_string="hello", new_string="bye")]},
    {"text": "I fail.", "calls": [_bash("exit 3")]},
    {"text": "Both at once.", "calls": [_bash("echo l > left"), _bash("echo r > right")]},
    {"text": "I ask two.", "calls": [_agent("EXPLORE-ALPHA now"), _agent("EXPLORE-BETA now")]},
    {"text": "All is done."},
]
LANES = {"EXPLORE-ALPHA": _lane("a"), "EXPLORE-BETA": _lane("b")}
FILES = {
    "greeting": "bye\n",
    "left": "l\n",
    "right": "r\n",
    **{f"{name}{number}": f"{number}\n" for name in "ab" for number in (1, 2)},
}
CALLS = ["Agent"] * 2 + ["Bash"] * 8 + ["Edit", "Read"]

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture
def claude(tmp_path: Path) -> tuple[str, ...]:
    """Options of a run: the program is in its workspace."""
    folder = tmp_path / "program"
    folder.mkdir()
    shutil.copy(from_npm(PACKAGE, VERSION, f"{PACKAGE}/claude"), folder / "claude")
    pairs = (word for name in ENVIRONMENT for word in ("--env", name))
    return ("--workspace", str(folder), "--env", "TZ=Etc/GMT+12", *pairs)


def test_one_snapshot_for_each_call(agents: Agents, claude: tuple[str, ...], tmp_path: Path) -> None:
    with provider(tmp_path, *MAIN, conversations=LANES, toolless=[{"text": "A title"}]) as at:
        trajectory = agents.run(at, *START, kind="anthropic", more=claude)
        steps = [step for step in agents.steps(trajectory) if step["tool"]["name"] not in ("start", "exit")]
        calls = agents.calls(trajectory)
        assert sorted(call["name"] for call in calls) == sorted(step["tool"]["name"] for step in steps) == CALLS
        assert all(call["arguments"] for call in calls)
        assert [call["status"] for call in calls].count("failed") == 1
        assert agents.files(trajectory, "/work") == FILES
        said = agents.said(trajectory)
        assert [role for role, _ in said].count("assistant") == len(MAIN), "each message once, and none of a sub-agent"
        models = [entry for entry in agents.snap.json("journal", trajectory) if entry["kind"] == "model"]
        assert all(model["status"] == "done" for model in models)
        callers = [model["details"].get("caller") for model in models]
        assert (callers.count("call_5_0"), callers.count("call_5_1")) == (3, 3)

        asked = len(at.asked())
        for number in (1, 4, 7, 9):
            at.forget()
            another_day = ("--variant", "later:env.TZ=Etc/GMT-14")
            forked = agents.snap.json("fork", "--resume", *another_day, steps[number]["id"])
            (fork,) = forked["trajectories"]
            agents.snap("attach", fork)
            assert "diverged" not in agents.names(fork)
            assert agents.files(fork, "/work") == FILES
            assert len(at.asked()) < asked, "what is recorded is not asked again"
            assert [role for role, _ in agents.said(fork)] == [role for role, _ in said]


def test_killed_and_resumed_then_rewound(agents: Agents, claude: tuple[str, ...], tmp_path: Path) -> None:
    waiting = {"text": "I wait.", "calls": [_bash(f"bash -c '{WAITS}'")]}
    with provider(tmp_path, *MAIN[:3], waiting, {"text": "Done."}, toolless=[{"text": "A title"}]) as at:
        trajectory = agents.start(at, *START, kind="anthropic", more=claude)
        agents.kill(trajectory)
        at.forget()
        agents.resume(trajectory)
        assert [step for step in at.asked() if step != 0] == [4]
        done = [call["name"] for call in agents.calls(trajectory) if call["status"] == "done"]
        assert done == ["Bash", "Read", "Edit", "Bash"]
        assert agents.files(trajectory, "/work") == {"greeting": "bye\n", "waited": "x\n"}

        at.forget()
        first = next(step for step in agents.steps(trajectory) if step["tool"]["name"] == "Bash")
        agents.snap("rewind", trajectory, first["id"])
        assert agents.files(trajectory, "/work") == {"greeting": "hello\n"}
        agents.resume(trajectory)
        assert [step for step in at.asked() if step != 0] == [1, 2, 3, 4]
        assert agents.files(trajectory, "/work") == {"greeting": "bye\n", "waited": "x\n"}


def test_rewound_within_two_sub_agents_at_once(agents: Agents, claude: tuple[str, ...], tmp_path: Path) -> None:
    """Ten times: to the end of one call while others ran, of either sub-agent, and of the first to have ended."""
    with provider(tmp_path, *MAIN[-2:], conversations=LANES, toolless=[{"text": "A title"}]) as at:
        trajectory = agents.run(at, *START, kind="anthropic", more=claude)
        asked = len(at.asked())
        for number in range(10):
            ended = [call["snapshot"] for call in sorted(agents.calls(trajectory), key=lambda call: call["ended_at"])]
            assert len(ended) == 6
            agents.snap("rewind", trajectory, ended[number % 5])
            at.forget()
            agents.snap("resume", "--quiet", trajectory)
            assert "diverged" not in agents.names(trajectory)
            assert agents.files(trajectory, "/work") == {
                f"{name}{step}": f"{step}\n" for name in "ab" for step in (1, 2)
            }
            assert all(call["status"] == "done" for call in agents.calls(trajectory)), number
            assert 0 < len(at.asked()) < asked, "what is recorded is not asked again"


def test_a_session_goes_on_in_a_fork(agents: Agents, claude: tuple[str, ...], tmp_path: Path) -> None:
    """The session's files are in the snapshot, so a plain fork and the program's own way to go on keep the history."""
    more = [{"text": "More.", "calls": [_bash("echo more > more")]}, {"text": "More is done."}]
    with provider(tmp_path, *MAIN[:3], {"text": "Begun."}, *more, toolless=[{"text": "A title"}]) as at:
        trajectory = agents.run(at, *START, kind="anthropic", more=claude)
        go_on = ("--", "bash", "-c", f"cd /work && exec {CLAUDE} --continue 'and more'")
        (fork,) = agents.snap.json("fork", trajectory, *go_on)["trajectories"]
        agents.snap("attach", fork)
        assert at.asked()[-2:] == [4, 5], "the model was told everything before"
    assert agents.names(fork) == ["Bash", "exit"]
    assert [call["name"] for call in agents.calls(fork)] == ["Bash"]
    assert agents.files(fork, "/work") == {"greeting": "bye\n", "more": "more\n"}
    said = [role for role, _ in agents.said(fork)]
    assert said.count("assistant") == 6, "each of the model's messages once"
