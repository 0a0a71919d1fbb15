"""An engine in this process, over the real runtime, and an agent without a program: its calls come as its connection
would bring them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from snapshotd.api.commands import CommandFields
from snapshotd.api.trajectories import CreateRequest, RemoveQuery
from snapshotd.config import read
from snapshotd.daemon.host import AS_ROOT, Footing, become_able, footing_of
from snapshotd.daemon.wiring import open_engine
from snapshotd.engine.engine import Engine
from snapshotd.engine.journal.calls import AgentCalls
from snapshotd.engine.protocol.agent_handler import Intent, Outcome
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.types import CallStatus, EntryKind, Message, SideEffect, Snapshot, SnapshotID, new_id
from tests import forked, way
from tests.leftovers import nothing_left

DONE, FAILED = CallStatus.DONE, CallStatus.FAILED


class Agent:
    """What an agent does in one trajectory."""

    def __init__(self, engine: Engine, trajectory: str) -> None:
        self.engine, self.id = engine, trajectory

    @property
    def sandbox(self) -> Sandbox:
        sessions = self.engine.life._sessions
        return sessions.ensure_running(self.engine.snapshots.trajectory(self.id))

    @property
    def calls(self) -> AgentCalls:
        handler = self.sandbox.server.handler()
        assert isinstance(handler, AgentCalls)
        return handler

    @property
    def head(self) -> Snapshot:
        return self.engine.snapshots.get(self.id)

    def sh(self, script: str) -> str:
        """Change files, or look at them, without a step."""
        said: list[bytes] = []
        result = self.engine.life._sessions.commands.exec(
            self.sandbox,
            CommandFields(("sh", "-c", script), cwd="/workspace"),
            sink=lambda _, data: said.append(data),
            record=False,
        )
        assert result.exit_code == 0, b"".join(said)
        return b"".join(said).decode()

    def begin(
        self, name: str, arguments: Any, *, cancelled: threading.Event | None = None, **more: Any
    ) -> tuple[str, dict[str, Any]]:
        call = new_id()
        return call, self.calls.call_begin(
            os.getpid(), Intent(call, name, arguments, **more), cancelled or threading.Event()
        )

    def tool(
        self,
        name: str,
        arguments: Any,
        script: str = "true",
        *,
        status: CallStatus = DONE,
        result: Any = None,
        **more: Any,
    ) -> Snapshot:
        """A tool call that runs `script`."""
        call, answer = self.begin(name, arguments, **more)
        assert "replayed" not in answer
        self.sh(script)
        return self.end(call, status=status, result=result)

    def end(self, call: str, *, status: CallStatus = DONE, result: Any = None) -> Snapshot:
        taken = self.calls.call_end(os.getpid(), call, Outcome(status, json.dumps(result).encode()))
        return self.engine.life._catalog.snapshots.get(SnapshotID(taken))

    def send(self, name: str, key: str, **more: Any) -> Snapshot:
        """An irreversible call, with a compensation that writes down what it was called with."""
        undo = ("sh", "-c", 'printf "%s\\n" "$SNAPSHOTD_CALL" >> /workspace/undone')
        return self.tool(
            name, {"key": key}, side_effect=SideEffect.IRREVERSIBLE, compensate=more.pop("compensate", undo), **more
        )

    @contextlib.contextmanager
    def task(self, name: str, *depends: str, status: str = "completed") -> Iterator[None]:
        """A subtask as the library records one."""
        self.calls.task(name, "in-progress", depends, None)
        call, answer = self.begin(name, {}, kind=EntryKind.TASK)
        yield
        self.calls.task(name, status, (), None)
        if "replayed" not in answer:
            self.end(call, status=DONE if status == "completed" else FAILED, result={"of": name})

    def say(self, text: str) -> None:
        self.calls.message("user", text, None)

    def files(self) -> dict[str, str]:
        """What /workspace holds."""
        names = self.sh("cd /workspace; ls -A").split()
        return {name: self.sh(f"cat /workspace/{name}") for name in names}

    def said(self) -> list[Any]:
        return [message.content for message in self.engine.journal.conversation(self.id)]


@contextlib.contextmanager
def engine(root: Path) -> Iterator[Engine]:
    """With the tree `root` as its image "default"; nothing is left behind. An ordinary user's process is in a user namespace
    from then on."""
    state_dir = Path(tempfile.mkdtemp(prefix="snapshotd-mind-", dir="/var/tmp"))
    try:
        with contextlib.nullcontext() if way.WAY else forked.children():  # which were forked outside of its namespace
            footing = become_able(footing_of(read(), None), state_dir) if way.WAY else AS_ROOT
            opened = reopened(state_dir, footing)
            try:
                opened.images.import_(str(root), "default", lambda _: None)
                yield opened
            finally:
                opened.life.close()
        nothing_left(state_dir, running=False)
    finally:
        shutil.rmtree(state_dir)


def clear(opened: Engine) -> None:
    """Remove all trajectories, forks before what they were forked from, for the next test with the same engine."""
    opened.storage.flush()  # what is not stored keeps what it was made from
    for trajectory in sorted(opened.snapshots.trajectories(), key=lambda one: one.created_at_ns, reverse=True):
        opened.runs.remove(trajectory.id, RemoveQuery(force=True))


def reopened(state_dir: Path, footing: Footing = AS_ROOT) -> Engine:
    found = open_engine(replace(read(), state_dir=str(state_dir)), footing)
    assert isinstance(found, Engine)
    return found


def agent(opened: Engine, runtime: str = "runc") -> Agent:
    """An agent in a sandbox of its own."""
    return Agent(opened, opened.runs.create(CreateRequest(runtime=runtime))[0].id)


def message(text: str) -> Message:
    return Message("user", text)
