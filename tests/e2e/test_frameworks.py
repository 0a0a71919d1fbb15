"""Agents of OpenAI's Agents SDK and of LangGraph, with the packages from PyPI, behind the gateway of their sandbox."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.e2e.model_rig import PROGRAMS, WAITS, Agents, bash, from_pip, provider
from tests.e2e.support import Snap

PACKAGES = ("openai-agents==0.24.0", "openai==3.57.0", "langgraph==1.2.24", "langchain-openai==1.7.4")
START = (
    "--",
    "bash",
    "-c",
    "mkdir -p /work && cd /work && PYTHONPATH=/workspace/packages exec python3 -W ignore /workspace/agent.py 'do it all'",
)
MAIN = [
    bash("echo hello > greeting", "I greet."),
    bash("sed -i s/hello/bye/ greeting", "I edit."),
    bash("exit 3", "I fail."),
    {
        "text": "Both at once.",
        "calls": [{"name": "bash", "arguments": {"command": f"echo {name} > {name}"}} for name in ("left", "right")],
    },
    {
        "text": "I ask two.",
        "calls": [{"name": "agent", "arguments": {"input": f"EXPLORE-{name} now"}} for name in ("ALPHA", "BETA")],
    },
    {"text": "All is done."},
]
LANES = {
    f"EXPLORE-{name.upper()}": [
        *[bash(f"echo {number} > {name}{number}", name) for number in (1, 2)],
        {"text": f"{name} is done"},
    ]
    for name in ("alpha", "beta")
}
FILES = {
    "greeting": "bye\n",
    **{name: f"{name}\n" for name in ("left", "right")},
    **{f"{name}{number}": f"{number}\n" for name in ("alpha", "beta") for number in (1, 2)},
}
CALLS = ["agent"] * 2 + ["bash"] * 9

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.parametrize("program", ["sdk_agent.py", "graph_agent.py"]),
]


@pytest.fixture
def options(tmp_path: Path, program: str) -> tuple[str, ...]:
    """Options of a run: program and packages are in its workspace."""
    folder = tmp_path / "workspace"
    shutil.copytree(from_pip("frameworks", PACKAGES), folder / "packages", copy_function=os.link)
    shutil.copy(PROGRAMS / program, folder / "agent.py")
    return ("--workspace", str(folder))


@pytest.fixture
def agents(snap: Snap, runc_ready: None) -> Agents:
    return Agents(snap, "runc")


def test_one_snapshot_for_each_call(agents: Agents, options: tuple[str, ...], tmp_path: Path) -> None:
    with provider(tmp_path, *MAIN, conversations=LANES) as at:
        trajectory = agents.run(at, *START, more=options)
        steps = [step for step in agents.steps(trajectory) if step["tool"]["name"] not in ("start", "exit")]
        calls = agents.calls(trajectory)
        assert sorted(call["name"] for call in calls) == sorted(step["tool"]["name"] for step in steps) == CALLS
        assert all(call["arguments"] and call["status"] == "done" for call in calls)
        assert agents.files(trajectory, "/work") == FILES
        models = [entry for entry in agents.snap.json("journal", trajectory) if entry["kind"] == "model"]
        callers = [model["details"].get("caller") for model in models]
        assert (callers.count("call_4_0"), callers.count("call_4_1"), callers.count(None)) == (3, 3, len(MAIN))
        said = agents.said(trajectory)
        asked = len(at.asked())
        for number in (1, 4, 6):
            at.forget()
            (fork,) = agents.snap.json("fork", "--resume", steps[number]["id"])["trajectories"]
            agents.snap("attach", fork)
            assert "diverged" not in agents.names(fork)
            assert agents.files(fork, "/work") == FILES
            assert 0 < len(at.asked()) < asked, "what is recorded is not asked again"
            assert agents.said(fork) == said


def test_killed_and_resumed_then_rewound(agents: Agents, options: tuple[str, ...], tmp_path: Path) -> None:
    with provider(tmp_path, *MAIN[:2], bash(WAITS, "I wait."), {"text": "Done."}) as at:
        trajectory = agents.start(at, *START, more=options)
        agents.kill(trajectory)
        at.forget()
        agents.resume(trajectory)
        assert at.asked() == [3]
        assert [call["status"] for call in agents.calls(trajectory)].count("done") == 3
        assert agents.files(trajectory, "/work") == {"greeting": "bye\n", "waited": "x\n"}

        at.forget()
        first = next(step for step in agents.steps(trajectory) if step["tool"]["name"] == "bash")
        agents.snap("rewind", trajectory, first["id"])
        assert agents.files(trajectory, "/work") == {"greeting": "hello\n"}
        agents.resume(trajectory)
        assert at.asked() == [1, 2, 3]
        assert agents.files(trajectory, "/work") == {"greeting": "bye\n", "waited": "x\n"}
