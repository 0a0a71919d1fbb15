"""A real AgentServer with a handler that records, the library copied as the engine deploys it, and agents as
subprocesses."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import snapshotd
from snapshotd.engine.protocol.agent_handler import BodyWriter, Intent, Outcome, Question
from snapshotd.engine.protocol.agent_protocol import AgentServer
from snapshotd.errors import Conflict
from snapshotd.types import Message

PYTHON = os.environ.get("SNAPSHOTD_TEST_AGENT_PYTHON", sys.executable)
"""The interpreter inside the sandbox: set it to a Python 3.8 to run the library's tests with that."""


class Body:
    """A body writer that keeps what it gets."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.discarded = False

    def write(self, data: bytes) -> None:
        self.pieces.append(data)

    def discard(self) -> None:
        self.discarded = True


class Recorder:
    """A handler that writes everything down. `refuse[op]` makes a request fail; `at_end` runs inside call_end."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.events: list[tuple[Any, ...]] = []
        self.conversation: list[Message] = []
        self.calls: dict[str, dict[str, Any]] = {}
        self.bodies: list[Body] = []
        self.values: dict[str, Any] = {}
        self.subtasks: list[dict[str, Any]] = []
        self.pids: list[int] = []
        self.lost: list[tuple[int, tuple[str, ...]]] = []
        self.refuse: dict[str, Exception] = {}
        self.at_end: Callable[[int], None] = lambda pid: None
        self._snapshots = 0

    def _check(self, op: str) -> None:
        if op in self.refuse:
            raise self.refuse[op]

    def _snapshot(self) -> str:
        with self.lock:
            self._snapshots += 1
            return f"{self._snapshots:032x}"

    def hello(self, pid: int) -> dict[str, Any]:
        self._check("hello")
        self.pids.append(pid)
        return {"trajectory": "t" * 32, "snapshot": "0" * 32, "replaying": False}

    def claim(self, pid: int, call_ids: tuple[str, ...]) -> set[str]:
        with self.lock:
            return {call_id for call_id in call_ids if "status" not in self.calls.get(call_id, {"status": None})}

    def find_end(self, call_id: str) -> str | None:
        with self.lock:
            return "e" * 32 if "status" in self.calls.get(call_id, {}) else None

    def call_begin(self, pid: int, intent: Intent, cancelled: threading.Event, *, again: bool) -> dict[str, Any]:
        self._check("call_begin")
        with self.lock:
            if intent.call_id in self.calls:
                raise Conflict(f"The call {intent.call_id} was recorded before; make a new id for each call.")
            self.calls[intent.call_id] = {"name": intent.name, "arguments": intent.arguments, "pid": pid}
            self.events.append(("begin", intent.name))
        return {"key": intent.key or intent.call_id}

    def body_writer(self, call_id: str) -> BodyWriter:
        self._check("body_writer")
        self.bodies.append(Body())
        return self.bodies[-1]

    def call_end(self, pid: int, call_id: str, outcome: Outcome) -> str:
        self._check("call_end")
        self.at_end(pid)
        result = outcome.result
        data = b"".join(result.pieces) if isinstance(result, Body) else result
        assert data is None or isinstance(data, bytes)
        with self.lock:
            call = self.calls[call_id]
            value = None if data is None else json.loads(data)
            call.update(status=outcome.status, error=outcome.error, exit_code=outcome.exit_code, result=value)
            self.events.append(("end", call["name"], str(outcome.status)))
        return self._snapshot()

    def message(self, role: str, content: Any, within: str | None, rid: str | None) -> None:
        self._check("message")
        with self.lock:
            self.conversation.append(Message(role, content))

    def messages(self, offset: int, limit: int) -> list[Message]:
        return self.conversation[offset : offset + limit]

    def checkpoint(self, pid: int, call_id: str, name: str, within: str | None, *, again: bool) -> dict[str, Any]:
        self._check("checkpoint")
        self.events.append(("checkpoint", name))
        return {"snapshot": self._snapshot()}

    def output(self, call_id: str, stream: str, data: bytes, rid: str | None) -> None:
        self.events.append(("output", stream, data))

    def fact(self, kind: str, value: Any, rid: str | None) -> Any:
        return value

    def state(self) -> dict[str, Any]:
        return dict(self.values)

    def state_set(self, key: str, value: tuple[Any] | None, within: str | None = None) -> None:
        self.values.pop(key, None)
        if value is not None:
            self.values[key] = value[0]

    def task(self, name: str, status: str, depends: tuple[str, ...], note: str | None) -> dict[str, Any]:
        self.subtasks.append({"name": name, "status": status, "depends": list(depends), "note": note})
        return {"status": status}

    def tasks(self) -> list[dict[str, Any]]:
        return self.subtasks

    def approve(self, pid: int, question: Question, cancelled: threading.Event, *, again: bool) -> dict[str, Any]:
        return {"approved": question.details == "yes"}

    def store(self, op: str, fields: dict[str, Any], within: str | None, rid: str | None) -> dict[str, Any]:
        self.events.append(("store", op, fields))
        return {"body": b"[]"} if op == "search" else {"version": 1}

    def named(self, name: str) -> list[dict[str, Any]]:
        return [call for call in self.calls.values() if call["name"] == name]

    def on_lost(self, pid: int, call_ids: tuple[str, ...]) -> None:
        self.lost.append((pid, call_ids))


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "agent.sock"


@pytest.fixture
def server(recorder: Recorder, socket_path: Path) -> Iterator[AgentServer]:
    before = threading.active_count()
    with AgentServer(
        socket_path, lambda: recorder, lambda pid: True, body_limit_bytes=64 << 20, lost=recorder.on_lost
    ) as running:
        yield running
    assert not socket_path.exists()
    assert threading.active_count() <= before, threading.enumerate()


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that is on PYTHONPATH in a sandbox: the agent package below an empty parent, and nothing else of
    ours."""
    target = tmp_path_factory.mktemp("lib") / "snapshotd"
    target.mkdir()
    (target / "__init__.py").write_text('"""snapshotd, inside a sandbox: only the agent library."""\n')
    source = Path(snapshotd.__file__).parent / "agent"
    shutil.copytree(source, target / "agent", ignore=shutil.ignore_patterns("__pycache__"))
    return target.parent


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_agent(library: Path, socket_path: Path, tmp_path: Path) -> Run:
    """Run a program as an agent: `run_agent(source, check=True, **environment)`. Fails the test when the agent does."""

    def run(source: str, *, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        program = tmp_path / "agent.py"
        program.write_text(textwrap.dedent(source))
        env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(library),
            "SNAPSHOTD_AGENT_SOCKET": str(socket_path),
            **environment,
        }
        done = subprocess.run(
            [PYTHON, str(program)], env=env, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False
        )
        if check:
            assert done.returncode == 0, done.stderr
        return done

    return run


class Client:
    """A peer that speaks the protocol byte by byte."""

    def __init__(self, path: Path, *, hello: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(60)
        self.socket.connect(str(path))
        self.file = self.socket.makefile("rb")
        self.last = 0
        if hello:
            assert self.ask("hello", version=2, pid=1, library="test")["version"] == 2

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read(self) -> Any:
        """The next answer, or None at the end."""
        line = self.file.readline()
        if not line:
            return None
        answer = json.loads(line)
        if "body_bytes" in answer:
            answer["body"] = json.loads(self.file.read(answer["body_bytes"]))
        return answer

    def ask(self, op: str, body: bytes | None = None, **fields: Any) -> Any:
        self.last += 1
        request = {"id": self.last, "op": op, **fields}
        if body is not None:
            request["body_bytes"] = len(body)
        self.send(json.dumps(request).encode() + b"\n" + (body or b""))
        return self.read()

    def close(self) -> None:
        self.file.close()
        self.socket.close()


@pytest.fixture
def connect(socket_path: Path, server: AgentServer) -> Iterator[Callable[..., Client]]:
    opened: list[Client] = []

    def make(**options: Any) -> Client:
        opened.append(Client(socket_path, **options))
        return opened[-1]

    yield make
    for client in opened:
        client.close()
