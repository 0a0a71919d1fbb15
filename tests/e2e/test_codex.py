"""Codex as it comes from npm, behind the gateway of its sandbox."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.model_rig import WAITS, Agents, from_npm, provider

VERSION = "0.169.0"
FILE = "@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex"
CODEX = (
    "/workspace/codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox -m gpt-5 "
    '-c openai_base_url="\\"$OPENAI_BASE_URL\\""'
)
START = ("--", "bash", "-c", f"mkdir -p /work && cd /work && exec {CODEX} 'do it all'")


def _shell(command: str) -> dict[str, Any]:
    return {"name": "exec_command", "arguments": {"cmd": command, "yield_time_ms": 30000}}


MAIN = [
    {"text": "I greet.", "calls": [_shell("echo hello > greeting")]},
    {"text": "I edit.", "calls": [_shell("sed -i s/hello/bye/ greeting")]},
    {"text": "I fail.", "calls": [_shell("exit 3")]},
    {"text": "Both at once.", "calls": [_shell("echo l > left"), _shell("echo r > right")]},
    {"text": "I sum up.", "calls": [_shell("cat greeting left right > sum")]},
    {"text": "All is done."},
]
FILES = {"greeting": "bye\n", "left": "l\n", "right": "r\n", "sum": "bye\nl\nr\n"}

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture
def codex(tmp_path: Path) -> tuple[str, ...]:
    """Options of a run: the program is in its workspace."""
    folder = tmp_path / "program"
    folder.mkdir()
    shutil.copy(from_npm("@openai/codex", VERSION, FILE), folder / "codex")
    return ("--workspace", str(folder), "--env", "TZ=Etc/GMT+12")


def test_one_snapshot_for_each_call(agents: Agents, codex: tuple[str, ...], tmp_path: Path) -> None:
    with provider(tmp_path, *MAIN) as at:
        trajectory = agents.run(at, *START, more=codex)
        steps = [step for step in agents.steps(trajectory) if step["tool"]["name"] not in ("start", "exit")]
        assert [step["tool"]["name"] for step in steps] == ["exec_command"] * 6
        assert [call["status"] for call in agents.calls(trajectory)] == ["done"] * 6
        assert [step["tool"]["arguments"]["cmd"] for step in steps] == [
            call["arguments"]["cmd"] for turn in MAIN for call in turn.get("calls", ())
        ]
        assert agents.files(trajectory, "/work") == FILES
        said = agents.said(trajectory)
        texts = [content for role, content in said if role == "assistant" and "I greet." in str(content)]
        assert len(texts) == 1, "each message once"
        for number in (1, 3, 5):
            at.forget()
            another_day = ("--variant", "later:env.TZ=Etc/GMT-14")
            (fork,) = agents.snap.json("fork", "--resume", *another_day, steps[number]["id"])["trajectories"]
            agents.snap("attach", fork)
            assert "diverged" not in agents.names(fork)
            assert agents.files(fork, "/work") == FILES
            assert at.asked()[0] > 0, "what is recorded is not asked again"
            assert len(agents.said(fork)) == len(said)


def test_two_sub_agents(agents: Agents, codex: tuple[str, ...], tmp_path: Path) -> None:
    """Their calls end at once, and they work on in the background."""
    spawn = [
        {"name": "spawn_agent", "namespace": "multi_agent_v1", "arguments": {"message": f"EXPLORE-{name} now"}}
        for name in ("ALPHA", "BETA")
    ]
    lanes = {
        f"EXPLORE-{name}": [{"text": name, "calls": [_shell(f"echo {name} > {name}")]}, {"text": f"{name} is done"}]
        for name in ("ALPHA", "BETA")
    }
    both = _shell("until [ -e ALPHA ] && [ -e BETA ]; do sleep 0.1; done; sleep 1; cat ALPHA BETA > both")
    ends = [{"text": "All is done."}] * 3  # a sub-agent that ends late is told to the model once more
    main = [{"text": "I ask two.", "calls": spawn}, {"text": "I wait.", "calls": [both]}, *ends]
    with provider(tmp_path, *main, conversations=lanes) as at:
        trajectory = agents.run(at, *START, more=codex)
        calls = agents.calls(trajectory)
        assert sorted(call["name"] for call in calls) == ["exec_command"] * 3 + ["spawn_agent"] * 2
        assert all(call["arguments"] and call["status"] == "done" for call in calls)
        assert agents.files(trajectory, "/work")["both"] == "ALPHA\nBETA\n"
        models = [entry for entry in agents.snap.json("journal", trajectory) if entry["kind"] == "model"]
        callers = {model["details"]["lane"]: model["details"].get("caller") for model in models}
        assert sorted(callers.values(), key=str) == [None, "call_0_0", "call_0_1"]
        steps = [step for step in agents.steps(trajectory) if step["tool"]["name"] == "exec_command"]
        (fork,) = agents.snap.json("fork", "--resume", steps[0]["id"])["trajectories"]
        agents.snap("attach", fork)
        assert "diverged" not in agents.names(fork)
        assert agents.files(fork, "/work") == agents.files(trajectory, "/work")


def test_killed_and_resumed_then_rewound(agents: Agents, codex: tuple[str, ...], tmp_path: Path) -> None:
    waiting = {"text": "I wait.", "calls": [_shell(f"bash -c '{WAITS}'")]}
    with provider(tmp_path, *MAIN[:2], waiting, {"text": "Done."}) as at:
        trajectory = agents.start(at, *START, more=codex)
        agents.kill(trajectory)
        at.forget()
        agents.resume(trajectory)
        assert at.asked() == [3]
        assert [call["status"] for call in agents.calls(trajectory)].count("done") == 3
        assert agents.files(trajectory, "/work") == {"greeting": "bye\n", "waited": "x\n"}

        at.forget()
        first = next(step for step in agents.steps(trajectory) if step["tool"]["name"] == "exec_command")
        agents.snap("rewind", trajectory, first["id"])
        assert agents.files(trajectory, "/work") == {"greeting": "hello\n"}
        agents.resume(trajectory)
        assert [step for step in at.asked() if step != 0] == [1, 2, 3]
        assert agents.files(trajectory, "/work") == {"greeting": "bye\n", "waited": "x\n"}
