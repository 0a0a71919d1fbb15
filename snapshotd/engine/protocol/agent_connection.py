"""One agent's connection: its requests, one after the other, checked and handed to the handler. Its state belongs to
its thread."""

from __future__ import annotations

import json
import logging
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

from snapshotd.engine.protocol.agent_handler import (
    ERROR_LIMIT_CHARS,
    MESSAGE_LIMIT_BYTES,
    OPEN_CALL_LIMIT,
    PAGE_BYTES,
    PAGE_MESSAGES,
    VALUE_LIMIT_BYTES,
    VERSION,
    AgentHandler,
    Answer,
    BodyWriter,
    Outcome,
)
from snapshotd.engine.protocol.agent_request import AgentRequest, parse_call_id, parse_request
from snapshotd.engine.protocol.agent_wire import Disconnected, Malformed, Wire, parse_json
from snapshotd.errors import (
    Conflict,
    InternalError,
    LimitExceeded,
    NotFound,
    NotPermitted,
    SnapshotdError,
    VersionMismatch,
)
from snapshotd.kernel import turns
from snapshotd.types import CallStatus

_LOG = logging.getLogger(__name__)
_BODY_LIMITS = {
    "message": MESSAGE_LIMIT_BYTES,
    "call_begin": MESSAGE_LIMIT_BYTES,
    "state_set": VALUE_LIMIT_BYTES,
    "store_put": VALUE_LIMIT_BYTES,
}
"""Request to the size limit of its JSON body, which the daemon takes into memory."""


class Server(Protocol):
    """The interface that a connection needs of its server."""

    handler: Callable[[], AgentHandler]
    body_limit_bytes: int
    messages_lock: threading.Lock
    closing: threading.Event
    admit: Callable[[int], bool]
    lost: Callable[[int, tuple[str, ...]], None] | None

    def park(self, pid: int, parked: bool, reason: str | None = None) -> AbstractContextManager[None]: ...


class AgentConnection:
    """One peer."""

    def __init__(self, server: Server, connected: socket.socket) -> None:
        credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.pid: int = struct.unpack("3i", credentials)[0]
        self.wire = Wire(connected)
        self.open_calls: set[str] = set()
        self._server = server
        self._greeted = False

    @property
    def name(self) -> str:
        return f"agent-{self.pid}"

    def run(self) -> None:
        """Answer requests until the peer closes, sends something malformed, or the server closes. A peer that the server
        does not admit is told so."""
        with suppress(Disconnected):  # as every connection of a killed process ends
            try:
                if not self._server.admit(self.pid):
                    self._fail(
                        NotPermitted(f"Process {self.pid} does not belong to this sandbox; connect from inside of it.")
                    )
                    return
                while (line := self.wire.read_line()) is not None:
                    self._carry_out(parse_request(line))
            except Malformed as malformed:
                self._fail(malformed.error)

    def _fail(self, error: SnapshotdError) -> None:
        """Send an error that belongs to no request; the connection ends after it."""
        self.wire.send({"id": None, **error.as_json()})

    def interrupt(self) -> None:
        self.wire.interrupt()

    def close(self) -> None:
        self.wire.close()
        if self._server.lost is not None and self.open_calls:
            self._server.lost(self.pid, tuple(sorted(self.open_calls)))

    @property
    def _handler(self) -> AgentHandler:
        return self._server.handler()

    def _carry_out(self, request: AgentRequest) -> None:
        """Carry out one request, and send its answer."""
        self.wire.expect_body(request.body_bytes or 0)
        action = _ACTIONS.get(request.op)
        if action is None:
            raise Malformed("A request's op is not the name of a request; see the table in docs/agent-protocol.md.")
        if not self._greeted and request.op != "hello":
            raise Malformed("The first request is not hello; say hello first.")
        limit = self._server.body_limit_bytes if request.op == "call_end" else _BODY_LIMITS.get(request.op, 0)
        if (request.body_bytes or 0) > limit:
            too_long = f"A body of {request.body_bytes} bytes is over {request.op}'s limit of {limit}; send less."
            raise Malformed(too_long, LimitExceeded)
        body: bytes | None = None
        try:
            answer = action(self, request)
            body = answer.pop("body", None)
        except SnapshotdError as exc:
            answer = exc.as_json()
        except (Malformed, Disconnected):
            raise
        except Exception:  # noqa: BLE001 - the top of a request: a defect in one must not end the others
            _LOG.exception("request %s of process %d failed", request.op, self.pid)
            error = InternalError(f"The daemon failed in {request.op}; its log has the details, please report them.")
            answer = error.as_json()
        self.wire.skip_body()
        self.wire.send({"id": request.id, **answer}, body)

    def _park(self, request: AgentRequest) -> AbstractContextManager[None]:
        reason = request.optional_text("unparked_because")
        return self._server.park(self.pid, request.boolean("parked"), reason)

    def _value(self, request: AgentRequest, key: str) -> tuple[Any] | None:
        """The value of a field, or of the body; None where there is neither."""
        if request.body_bytes is not None:
            return (parse_json(b"".join(self.wire.body())),)
        return (request.fields[key],) if key in request.fields else None

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _hello(self, request: AgentRequest) -> Answer:
        version = request.fields.get("version")
        if version != VERSION or isinstance(version, bool):
            raise Malformed(
                f"The agent does not speak protocol version {VERSION}; use the library the daemon mounts.",
                VersionMismatch,
            )
        calls = request.fields.get("calls") or []
        if not isinstance(calls, list) or len(calls) > OPEN_CALL_LIMIT:
            raise Malformed(f"The field calls is not a list of at most {OPEN_CALL_LIMIT} ids; correct the request.")
        facts = self._handler.hello(self.pid)
        if calls:
            self.open_calls |= self._handler.claim(self.pid, tuple(map(parse_call_id, calls)))
        self._greeted = True
        return {**facts, "version": VERSION, "body_limit_bytes": self._server.body_limit_bytes}

    def _call_begin(self, request: AgentRequest) -> Answer:
        intent, again = request.intent(self._value(request, "arguments")), request.is_again()
        if intent.call_id in self.open_calls and not again:
            raise Conflict(f"The call {intent.call_id} has begun already; make a new id for each call.")
        if len(self.open_calls) >= OPEN_CALL_LIMIT:
            raise LimitExceeded(f"This process has {OPEN_CALL_LIMIT} calls open; end some before beginning more.")
        with self._park(request):
            answer = self._handler.call_begin(self.pid, intent, self._server.closing, again=again)
        if "replayed" not in answer and "later" not in answer:
            self.open_calls.add(intent.call_id)
        return answer

    def _call_end(self, request: AgentRequest) -> Answer:
        call_id = request.call_id()
        status = CallStatus(request.one_of("status", ["done", "failed"]))
        error = request.optional_text("error")
        exit_code = None if request.fields.get("exit_code") is None else request.integer("exit_code", 0, 255)
        usage, parking = request.usage(), self._park(request)
        if call_id not in self.open_calls:
            ended = self._handler.find_end(call_id) if request.is_again() else None
            if ended is None:
                raise NotFound(f"This connection has no open call {call_id}; begin it first and end it once.")
            return {"snapshot": ended}
        result: bytes | BodyWriter | None = _encode(request.fields["result"]) if "result" in request.fields else None
        writer: BodyWriter | None = None
        try:
            if request.body_bytes is not None:
                result = writer = self._handler.body_writer(call_id)
                for piece in self.wire.body():
                    writer.write(piece)
            outcome = Outcome(status, result, error[:ERROR_LIMIT_CHARS] if error else error, exit_code, usage)
            self.open_calls.discard(call_id)  # the call is over, even if the handler fails
            with parking, turns.first():
                return {"snapshot": self._handler.call_end(self.pid, call_id, outcome)}
        finally:
            if writer is not None:
                writer.discard()

    def _output(self, request: AgentRequest) -> Answer:
        call_id = request.call_id()
        stream, data = request.output()
        if call_id not in self.open_calls:
            raise NotFound(f"This connection has no open call {call_id}; its output belongs to none.")
        self._handler.output(call_id, stream, data, request.rid())
        return {}

    def _checkpoint(self, request: AgentRequest) -> Answer:
        name, call_id = request.label("name", 200), request.call_id()
        with self._park(request):
            return self._handler.checkpoint(self.pid, call_id, name, request.within(), again=request.is_again())

    def _approve(self, request: AgentRequest) -> Answer:
        question = request.question()
        with self._park(request):
            return self._handler.approve(self.pid, question, self._server.closing, again=request.is_again())

    # -- conversation and state ----------------------------------------------------------------------------------------

    def _fact(self, request: AgentRequest) -> Answer:
        return {"value": self._handler.fact(request.label("kind", 64), request.fields.get("value"), request.rid())}

    def _message(self, request: AgentRequest) -> Answer:
        role = request.label("role", 64)
        content = self._value(request, "content")
        if content is None:
            raise Malformed("A message has neither content nor a body; send one of them.")
        self._handler.message(role, content[0], request.within(), request.rid())
        return {}

    def _messages(self, request: AgentRequest) -> Answer:
        offset = request.offset()
        with self._server.messages_lock:
            found = self._handler.messages(offset, PAGE_MESSAGES)
            encoded: list[bytes] = []
            for message in found[:PAGE_MESSAGES]:
                encoded.append(_encode({"role": message.role, "content": message.content}))
                if sum(map(len, encoded)) > PAGE_BYTES:
                    break
            answer: Answer = {"body": b"[" + b",".join(encoded) + b"]"}
        if len(encoded) < len(found) or len(found) >= PAGE_MESSAGES:
            answer["next"] = offset + len(encoded)
        return answer

    def _state(self, _: AgentRequest) -> Answer:
        return {"body": _encode(self._handler.state())}

    def _state_set(self, request: AgentRequest) -> Answer:
        self._handler.state_set(request.label("key", 200), self._value(request, "value"), request.within())
        return {}

    def _task(self, request: AgentRequest) -> Answer:
        depends = request.depends()
        status = request.one_of("status", ["pending", "in-progress", "completed", "failed", "skipped"])
        note = request.optional_text("note")
        return self._handler.task(request.label("name", 200), status, depends, note[:1000] if note else note)

    def _tasks(self, _: AgentRequest) -> Answer:
        return {"body": _encode(self._handler.tasks())}

    # -- the store -----------------------------------------------------------------------------------------------------

    def _store_get(self, request: AgentRequest) -> Answer:
        fields = {**request.place(), "version": request.version("version")}
        return self._handler.store("get", fields, request.within(), request.rid())

    def _store_put(self, request: AgentRequest) -> Answer:
        value = self._value(request, "value")
        if value is None:
            raise Malformed("A store_put has neither value nor a body; send one of them.")
        fields = {"value": value[0], "ttl_s": request.seconds("ttl_s"), **self._versioned_place(request)}
        return self._handler.store("put", fields, request.within(), request.rid())

    def _store_delete(self, request: AgentRequest) -> Answer:
        return self._handler.store("delete", self._versioned_place(request), request.within(), request.rid())

    def _store_search(self, request: AgentRequest) -> Answer:
        return self._handler.store("search", request.search(), request.within(), request.rid())

    def _versioned_place(self, request: AgentRequest) -> dict[str, Any]:
        return {"expected_version": request.version("expected_version"), **request.place()}


def _encode(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(
        errors="backslashreplace"
    )  # lone surrogates, as JSON has it


_Action = Callable[[AgentConnection, AgentRequest], Answer]
_CALLS = ("hello", "call_begin", "call_end", "output", "checkpoint", "approve")
_MIND = ("fact", "message", "messages", "state", "state_set", "task", "tasks")
_STORE = ("store_get", "store_put", "store_delete", "store_search")
_ACTIONS: dict[str, _Action] = {op: getattr(AgentConnection, f"_{op}") for op in (*_CALLS, *_MIND, *_STORE)}
"""Request to the method that carries it out."""
