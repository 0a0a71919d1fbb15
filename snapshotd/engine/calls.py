"""The daemon's side of the in-sandbox library: what an agent's calls mean. One `AgentCalls` serves one container."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import dataclass
from typing import Any

from snapshotd.engine.agent_protocol import BodyWriter
from snapshotd.engine.context import Context
from snapshotd.engine.sandbox import Sandbox
from snapshotd.engine.step import StepListener, commit_step
from snapshotd.errors import Conflict, LimitExceeded, NotFound
from snapshotd.repo.base import BlobWriter
from snapshotd.types import BlobID, CallID, CallStatus, Message, ToolCall, new_id

MAX_OPEN_CALLS = 1024
MAX_PENDING_BYTES = 64 << 20
"""Of messages since the last snapshot, as JSON: what the daemon holds in memory for one sandbox."""


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A call that has begun: the intent."""

    name: str
    arguments: Any
    started_at_ns: int
    clock_ns: int


class AgentCalls:
    """Implements `agent_protocol.AgentHandler`. Before `bind` a container has no trajectory and every call is refused."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._sandbox: Sandbox | None = None
        self._listener: StepListener | None = None
        self._open: dict[str, OpenCall] = {}

    def bind(self, sandbox: Sandbox, listener: StepListener | None) -> None:
        """From now on calls are recorded for this sandbox's trajectory. Without a listener (a throw-away sandbox) they are answered, so
        that programs run there as anywhere, and nothing is recorded."""
        self._sandbox, self._listener = sandbox, listener

    def _bound(self) -> Sandbox:
        if self._sandbox is None or self._sandbox.closed:
            raise Conflict("this sandbox belongs to no trajectory (yet, or any more); nothing was recorded")
        return self._sandbox

    def hello(self, pid: int) -> dict[str, Any]:
        sandbox = self._bound()
        return {"trajectory": sandbox.trajectory.id, "snapshot": sandbox.head}

    def call_begin(self, pid: int, call_id: str, name: str, arguments: Any) -> None:
        self._bound()
        if len(self._open) >= MAX_OPEN_CALLS:
            raise LimitExceeded(f"{MAX_OPEN_CALLS} tool calls are open at once; end some before beginning another")
        if call_id in self._open:
            raise Conflict(f"tool call {call_id[:40]!r} has begun already")
        self._open[call_id] = OpenCall(name, arguments, time.time_ns(), time.perf_counter_ns())

    def lost(self, pid: int, call_ids: tuple[str, ...]) -> None:
        """A connection ended with calls open. Nobody will end them: their files belong to whatever snapshot comes next."""
        for call_id in call_ids:
            self._open.pop(call_id, None)

    def body_writer(self) -> BlobWriter:
        return self._context.spool.writer()

    def call_end(
        self, pid: int, call_id: str, status: CallStatus, result: bytes | BodyWriter | None, error: str | None, exit_code: int | None
    ) -> str:
        sandbox = self._bound()
        intent = self._open.pop(call_id, None)
        if intent is None:
            raise NotFound(f"no open tool call {call_id[:40]!r}: it never began, or it has ended already")
        call = ToolCall(
            id=CallID(new_id()), name=intent.name, arguments=intent.arguments, status=status, started_at_ns=intent.started_at_ns,
            duration_ns=time.perf_counter_ns() - intent.clock_ns, exit_code=exit_code, error=error, output=self._save(result),
        )  # fmt: skip
        return self._step(sandbox, call)

    def checkpoint(self, pid: int, name: str) -> str:
        return self._step(self._bound(), marker("checkpoint", {"name": name}))

    def message(self, role: str, content: Any) -> None:
        sandbox = self._bound()
        if self._listener is None:
            return
        with sandbox.lock:
            size = len(role) + len(json.dumps(content))
            if sandbox.pending_bytes + size > MAX_PENDING_BYTES:
                raise LimitExceeded(
                    f"the messages since the last snapshot exceed {MAX_PENDING_BYTES} bytes; take one with a tool call or `checkpoint`"
                )
            sandbox.pending_bytes += size
            sandbox.pending.append(Message(role, content))

    def messages(self, offset: int, limit: int) -> list[Message]:
        sandbox = self._bound()
        if self._listener is None:
            return []
        with sandbox.lock:
            recorded = itertools.chain(self._context.catalog.conversation(sandbox.head), tuple(sandbox.pending))
            return list(itertools.islice(recorded, offset, offset + limit))

    def _save(self, result: bytes | BodyWriter | None) -> BlobID | None:
        if isinstance(result, BlobWriter):
            return result.save()
        assert result is None or isinstance(result, bytes)  # `body_writer` makes no other kind
        return self._context.spool.save_blob(result) if result is not None else None

    def _step(self, sandbox: Sandbox, call: ToolCall) -> str:
        if self._listener is None:
            return sandbox.head
        return commit_step(self._context.catalog, sandbox, call, self._listener).id


def marker(
    name: str, arguments: Any, *, status: CallStatus = CallStatus.DONE, exit_code: int | None = None,
    stdout: BlobID | None = None, stderr: BlobID | None = None, started_at_ns: int | None = None,
) -> ToolCall:  # fmt: skip
    """A call record for something the daemon itself did (start, exit, stop, checkpoint, exec)."""
    now = time.time_ns()
    began = started_at_ns or now
    return ToolCall(CallID(new_id()), name, arguments, status, began, now - began, exit_code, None, None, stdout, stderr)


