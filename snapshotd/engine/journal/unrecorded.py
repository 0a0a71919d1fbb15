"""The agents of a throw-away sandbox: they are answered, so that programs run there as anywhere, and nothing is
recorded."""

from __future__ import annotations

import threading
from typing import Any

from snapshotd.engine.protocol.agent_handler import (
    AgentHandler,
    Answer,
    BodyWriter,
    Intent,
    Outcome,
    Question,
    StoreOperation,
    StreamName,
)
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.errors import Denied, UsageError
from snapshotd.types import Message


class _Dropped:
    """A result that is not kept."""

    def write(self, data: bytes) -> None:
        pass

    def discard(self) -> None:
        pass


class UnrecordedCalls(AgentHandler):
    """The null handler. Thread-safe."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    @property
    def closed(self) -> bool:
        return self._sandbox.closed

    def hello(self, pid: int) -> Answer:
        return {"trajectory": self._sandbox.trajectory.id, "snapshot": self._sandbox.head, "replaying": False}

    def claim(self, pid: int, call_ids: tuple[str, ...]) -> set[str]:
        return set(call_ids)

    def find_end(self, call_id: str) -> str | None:
        return None

    def lose(self, pid: int, call_ids: tuple[str, ...]) -> None:
        pass

    def call_begin(self, pid: int, intent: Intent, cancelled: threading.Event, *, again: bool = False) -> Answer:
        return {"key": intent.key or intent.call_id}

    def body_writer(self, call_id: str) -> BodyWriter:
        return _Dropped()

    def call_end(self, pid: int, call_id: str, outcome: Outcome) -> str:
        return self._sandbox.head

    def output(self, call_id: str, stream: StreamName, data: bytes, rid: str | None = None) -> None:
        pass

    def fact(self, kind: str, value: Any, rid: str | None = None) -> Any:
        return value

    def message(self, role: str, content: Any, within: str | None, rid: str | None = None) -> None:
        pass

    def messages(self, offset: int, limit: int) -> list[Message]:
        return []

    def state(self) -> dict[str, Any]:
        return {}

    def state_set(self, key: str, value: tuple[Any] | None, within: str | None = None) -> None:
        pass

    def task(self, name: str, status: str, depends: tuple[str, ...], note: str | None) -> Answer:
        return {"status": status}

    def tasks(self) -> list[dict[str, Any]]:
        return list(self._sandbox.mind.state.get("tasks", ()))

    def checkpoint(self, pid: int, call_id: str, name: str, within: str | None, *, again: bool = False) -> Answer:
        return {"snapshot": self._sandbox.head}

    def approve(self, pid: int, question: Question, cancelled: threading.Event, *, again: bool = False) -> Answer:
        raise Denied("nobody can be asked in a throw-away sandbox; run the agent in a trajectory of its own")

    def store(self, op: StoreOperation, fields: dict[str, Any], within: str | None, rid: str | None = None) -> Answer:
        raise UsageError(
            "the store cannot be reached from a throw-away sandbox; run the agent in a trajectory of its own"
        )
