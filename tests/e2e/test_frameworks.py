"""Agents of the frameworks that people build them with, with the packages from PyPI, behind the gateway of their sandbox."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.model_rig import PROGRAMS, WAITS, Agents, bash, from_pip, provider
from tests.e2e.support import Snap

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
CALLS = Counter(agent=2, bash=9)
TURNS = Counter(turn=9)


@dataclass(frozen=True)
class Framework:
    """An agent of a framework: its program, and the packages that it needs. `manner`: how it talks to its model. "calls" and their
    results; "reports": it tells the results as text; "code": the model's words are code, and no calls are asked for."""

    program: str
    packages: tuple[str, ...]
    manner: str = "calls"
    image: str = "minimal"
    """Or "full": its packages need the C++ library."""

    @property
    def steps(self) -> Counter[str]:
        """The snapshots that it takes when it does all of `MAIN`, by the names of their calls."""
        return TURNS if self.manner == "code" else CALLS

    @property
    def outcome(self) -> str:
        return "unknown" if self.manner == "reports" else "done"

    def script(self, *steps: dict[str, Any]) -> list[dict[str, Any]]:
        """Steps of the model, in the words that this agent understands."""
        spoken = {"reports": _answered, "code": _in_code}.get(self.manner)
        return list(steps) if spoken is None else list(map(spoken, steps))


def _answered(step: dict[str, Any]) -> dict[str, Any]:
    """The agent ends with a call, too."""
    return step if "calls" in step else {"calls": [{"name": "final_answer", "arguments": {"answer": step["text"]}}]}


def _in_code(step: dict[str, Any]) -> dict[str, Any]:
    """One block of code for all the calls of a step."""
    calls = _answered(step)["calls"]
    lines = [f"print({call['name']}({next(iter(call['arguments'].values()))!r}))" for call in calls]
    if calls[0]["name"] == "final_answer":
        lines = [lines[0].removeprefix("print(").removesuffix(")")]
    return {"text": f"{step['text']}\n<code>\n" + "\n".join(lines) + "\n</code>"}


OPENAI = ("openai-agents==0.24.0", "openai==3.57.0", "langgraph==1.2.24", "langchain-openai==1.7.4")
SMOLAGENTS = ("smolagents==1.26.0", "openai==3.57.0")
FRAMEWORKS = {
    "openai-agents": Framework("sdk_agent.py", OPENAI),
    "langgraph": Framework("graph_agent.py", OPENAI),
    "agno": Framework("agno_agent.py", ("agno==3.1.10", "openai==3.57.0")),
    "pydantic-ai": Framework("pydantic_agent.py", ("pydantic-ai-slim[openai]==2.68.0",)),
    "crewai": Framework("crew_agent.py", ("crewai==1.15.30",), image="full"),
    "strands": Framework("strands_agent.py", ("strands-agents[openai]==1.62.0",)),
    "deepagents": Framework("deep_agent.py", ("deepagents==0.7.32", "langchain-openai==1.7.4")),
    "smolagents": Framework("smol_agent.py", SMOLAGENTS, "reports"),
    "smolagents-code": Framework("smol_agent.py", SMOLAGENTS, "code"),
}

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=FRAMEWORKS),
]


@pytest.fixture
def options(tmp_path: Path, framework: Framework) -> tuple[str, ...]:
    """Options of a run: program and packages are in its workspace."""
    folder = tmp_path / "workspace"
    name = framework.packages[0].partition("==")[0].partition("[")[0]
    shutil.copytree(from_pip(name, framework.packages), folder / "packages", copy_function=os.link)
    shutil.copy(PROGRAMS / framework.program, folder / "agent.py")
    return ("--workspace", str(folder), "-e", f"MANNER={framework.manner}")


@pytest.fixture
def agents(snap: Snap, runc_ready: None, framework: Framework, request: pytest.FixtureRequest) -> Agents:
    image = request.getfixturevalue("full_image") if framework.image == "full" else "default"
    return Agents(snap, "runc", image)


def test_one_snapshot_for_each_call(
    agents: Agents, options: tuple[str, ...], framework: Framework, tmp_path: Path
) -> None:
    lanes = {text: framework.script(*steps) for text, steps in LANES.items()}
    with provider(tmp_path, *framework.script(*MAIN), conversations=lanes) as at:
        trajectory = agents.run(at, *START, more=options)
        steps = [step for step in agents.steps(trajectory) if step["tool"]["name"] not in ("start", "exit")]
        assert Counter(step["tool"]["name"] for step in steps) == framework.steps
        calls = [call for call in agents.calls(trajectory) if call["name"] != "final_answer"]
        assert Counter(call["name"] for call in calls) == (Counter() if framework.manner == "code" else CALLS)
        assert all(call["arguments"] and call["status"] == framework.outcome for call in calls)
        assert agents.files(trajectory, "/work") == FILES
        models = [entry for entry in agents.snap.json("journal", trajectory) if entry["kind"] == "model"]
        assert len(models) == len(MAIN) + 6
        assert len({model["details"]["lane"] for model in models}) == 3
        if framework.manner != "code":  # nothing tells who asked a model that is asked within code
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


def test_killed_and_resumed_then_rewound(
    agents: Agents, options: tuple[str, ...], framework: Framework, tmp_path: Path
) -> None:
    name = next(iter(framework.steps)) if framework.manner == "code" else "bash"
    steps = framework.script(*MAIN[:2], bash(WAITS, "I wait."), {"text": "Done."})
    with provider(tmp_path, *steps) as at:
        trajectory = agents.start(at, *START, more=options)
        agents.kill(trajectory)
        at.forget()
        agents.resume(trajectory)
        assert at.asked() == [3]
        assert agents.names(trajectory).count(name) == 3
        assert agents.files(trajectory, "/work") == {"greeting": "bye\n", "waited": "x\n"}

        at.forget()
        first = next(step for step in agents.steps(trajectory) if step["tool"]["name"] == name)
        agents.snap("rewind", trajectory, first["id"])
        assert agents.files(trajectory, "/work") == {"greeting": "hello\n"}
        agents.resume(trajectory)
        assert at.asked() == [1, 2, 3]
        assert agents.files(trajectory, "/work") == {"greeting": "bye\n", "waited": "x\n"}
