"""An agent from PyPI, as it is: nobody told it about snapshots, and a fork of it goes on in the middle of its
conversation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.model_rig import WAITS, Agents, bash, provider
from tests.e2e.support import Snap

REQUIREMENTS = "mini-swe-agent==2.4.6\nlitellm<1.80\n"  # newer ones of litellm want much more to be installed
COMMAND = (
    "--",
    "python3",
    "-m",
    "minisweagent.run.mini",
    "-m",
    "openai/gpt-5",
    "-t",
    "repair it",
    "-y",
    "--exit-immediately",
    "-o",
    "/tmp/out.json",
)
ENVIRONMENT = (
    "--env",
    "MSWEA_CONFIGURED=true",
    "--env",
    "MSWEA_COST_TRACKING=ignore_errors",
    "--env",
    "MSWEA_SILENT_STARTUP=1",
)
SCRIPT = (
    bash("echo one > one; date +%s%N > stamp; echo looked", "I look."),
    bash("cat one; echo two > two", "I repair."),
    bash("cat two && echo three > three", "I test."),
    bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat three", "I am done."),
)

pytestmark = [
    pytest.mark.long,  # test_gateway.py has the same with the clients that such agents are made of
    pytest.mark.timeout(1800),  # its packages are installed once for each runtime
]


@pytest.fixture
def agents(snap: Snap, runtime: str, full_image: str, tmp_path: Path) -> Agents:
    requirements = tmp_path / "requirements.txt"
    requirements.write_text(REQUIREMENTS)
    return Agents(snap, runtime, full_image, requirements)


def test_mini_swe_agent(agents: Agents, tmp_path: Path) -> None:
    with provider(tmp_path, *SCRIPT) as at:
        trajectory = agents.run(at, *COMMAND, more=ENVIRONMENT)
        assert at.asked() == [0, 1, 2, 3]
        steps = agents.steps(trajectory)
        assert [step["tool"]["name"] for step in steps] == ["start", "bash", "bash", "bash", "exit"]
        assert [step["tool"]["arguments"] for step in steps[1:4]] == [
            turn["calls"][0]["arguments"] for turn in SCRIPT[:3]
        ]
        files = [agents.files(step["id"]) for step in steps]
        assert [sorted(found) for found in files] == [
            [],
            ["one", "stamp"],
            ["one", "stamp", "two"],
            ["one", "stamp", "three", "two"],
            ["one", "stamp", "three", "two"],
        ]
        said = agents.said(trajectory)
        assert [role for role, _ in said] == ["system", "user", *["assistant", "tool"] * 3, "assistant"]
        assert "repair it" in said[1][1]
        outputs = [agents.snap("show", "--output", "output", step["id"]).stdout for step in steps[1:4]]
        assert ["looked" in outputs[0], "one" in outputs[1], "two" in outputs[2]] == [True] * 3

        at.forget()
        (fork,) = agents.snap.json("fork", "--resume", steps[2]["id"])["trajectories"]
        agents.snap("attach", fork)
        assert at.asked() == [2, 3], "what is recorded is not asked again"
    assert agents.names(fork) == ["bash", "exit"]
    assert agents.said(fork) == said
    assert agents.files(fork) == files[-1]
    agents.snap("rm", "--force", fork)
    agents.snap("rm", "--force", trajectory)


def test_killed_and_resumed_then_rewound(agents: Agents, tmp_path: Path) -> None:
    edits = bash("echo hello > greeting", "I greet."), bash("sed -i s/hello/bye/ greeting; exit 3", "I edit, and fail.")
    end = bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", "I am done.")
    with provider(tmp_path, *edits, bash(WAITS, "I wait."), end) as at:
        trajectory = agents.start(at, *COMMAND, more=ENVIRONMENT)
        agents.kill(trajectory)
        at.forget()
        agents.resume(trajectory)
        assert at.asked() == [3]
        assert agents.files(trajectory) == {"greeting": "bye\n", "waited": "x\n"}

        at.forget()
        first = next(step for step in agents.steps(trajectory) if step["tool"]["name"] == "bash")
        agents.snap("rewind", trajectory, first["id"])
        assert agents.files(trajectory) == {"greeting": "hello\n"}
        agents.resume(trajectory)
        assert at.asked() == [1, 2, 3]
        assert agents.files(trajectory) == {"greeting": "bye\n", "waited": "x\n"}
    agents.snap("rm", "--force", trajectory)
