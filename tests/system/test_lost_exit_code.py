"""A program has ended and nobody can tell how: everything else is recorded all the same, it is said, and `resume` finds
out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from snapshotd.api.commands import ExecRequest
from snapshotd.api.trajectories import RunAgentRequest
from snapshotd.engine.engine import Engine
from snapshotd.runtime.keeper import KeptCommand
from snapshotd.types import CallStatus, Trajectory, TrajectoryStatus
from tests import mind_rig
from tests.e2e.support import wait_until
from tests.mind_rig import Agent

pytestmark = pytest.mark.runc
WAIT_S = 60.0


@pytest.fixture
def engine(small_root: Path) -> Iterator[Engine]:
    with mind_rig.engine(small_root) as opened:
        yield opened


def run(engine: Engine, script: str) -> Agent:
    """A program that ends when it is let go."""
    waits = "while [ ! -e go ]; do sleep 0.05; done; "
    return Agent(engine, engine.runs.run(RunAgentRequest(runtime="runc", command=("sh", "-c", waits + script))).id)


def let_go(agent: Agent) -> None:
    agent.engine.runs.exec(agent.id, ExecRequest(("touch", "go"), cwd="/workspace"), sink=lambda *_: None)


def finished(agent: Agent) -> list[dict[str, Any]]:
    return [
        event for event in agent.engine.runs.events(agent.id, follow=True) if event["event"] in ("warning", "finished")
    ]


def test_all_but_the_exit_code_is_recorded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(command: KeptCommand) -> None:
        """As the kernel of a machine where another process has reaped it, and that is older than 6.15."""
        return

    with monkeypatch.context() as patch:
        patch.setattr(KeptCommand, "ask_exit_code", lose)
        agent = run(engine, "echo said; echo wrote > file; exit 3")
        let_go(agent)
        warning, end = finished(agent)
    assert "its exit code is lost" in warning["message"]
    assert warning["code"] == "SandboxFailed"
    assert (end["status"], end["exit_code"]) == (TrajectoryStatus.INTERRUPTED, None)
    call = agent.head.call
    assert (call.name, call.status, call.exit_code) == ("exit", CallStatus.UNKNOWN, None)
    assert b"".join(engine.snapshots.output(agent.head.id, "stdout")) == b"said\n"
    assert b"".join(engine.snapshots.cat(agent.head.id, b"workspace/file")) == b"wrote\n"
    engine.runs.resume(agent.id)  # it finds the newest files, and so is let go already
    (end,) = finished(agent)
    assert (end["status"], end["exit_code"]) == (TrajectoryStatus.FAILED, 3)


def test_a_program_whose_sandbox_is_gone_is_not_running(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its run is still being wound up: `resume` waits for that."""
    wait, stop = engine.life._background.wait, engine.life._sessions.stop
    resumed: list[Future[Trajectory]] = []
    waits = threading.Event()

    def stopping(*args: Any, **more: Any) -> None:
        waits.set()
        stop(*args, **more)

    def winding_up() -> None:
        if not resumed:
            assert engine.runs.sandboxes() == []
            resumed.append(pool.submit(engine.runs.resume, agent.id))
            wait_until(lambda: resumed[0].done() or waits.is_set(), "it has been refused, or waits")
        wait()

    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patch:
        patch.setattr(engine.life._background, "wait", winding_up)
        patch.setattr(engine.life._sessions, "stop", stopping)
        agent = run(engine, "exit 3")
        let_go(agent)
        wait_until(lambda: bool(resumed), "it ends")
        assert resumed[0].result(WAIT_S).status is TrajectoryStatus.RUNNING
    engine.runs.stop(agent.id)
