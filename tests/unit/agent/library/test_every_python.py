"""The library under every Python that an image may have: each feature once, live and in a replay."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from library_rig import run
from programs import MODELS, OUTCOMES, STEPS, STORE, TASKS

from tests.agent_daemon import FakeDaemon

PROGRAMS = {"outcomes": OUTCOMES, "steps": STEPS.replace("LAST", "3"), "models": MODELS, "tasks": TASKS, "store": STORE}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_the_same_outcomes_live_and_in_a_replay(program: str, python: Path, library: Path, socket_path: Path) -> None:
    file = socket_path.parent / "agent.py"
    file.write_text(textwrap.dedent(program))
    first = FakeDaemon()
    with first.serving(socket_path):
        run(python, library, socket_path, str(file))
    assert None not in [call["status"] for call in first.calls.values()]
    second = first.resumed()
    second.values = {}
    with second.serving(socket_path):
        run(python, library, socket_path, str(file))
    assert second.old_journal == []
    assert {request["call"] for request in second.sent("call_end")} <= set(second.calls)
    assert not [
        call for call in second.calls.values() if call["kind"] != "task"
    ]  # tasks that did not complete run; nothing else does


def test_the_command(python: Path, library: Path, socket_path: Path) -> None:
    daemon = FakeDaemon()
    agent = ("-m", "snapshotd.agent")
    with daemon.serving(socket_path):
        call = run(python, library, socket_path, *agent, "begin", "work", "--arguments", "[1]").strip()
        assert run(python, library, socket_path, *agent, "end", call, "--result", "2") == f"{1:032x}\n"
        said = run(
            python,
            library,
            socket_path,
            *agent,
            "run",
            "say",
            "--key",
            "k",
            "--",
            "sh",
            "-c",
            "echo --key; echo $SNAPSHOTD_KEY",
        )
        assert said == "--key\nk\n"
        run(python, library, socket_path, *agent, "state", "set", "a", "1")
    assert [(call["name"], call["status"]) for call in daemon.calls.values()] == [("work", "done"), ("say", "done")]
    assert daemon.state == {"a": 1}
