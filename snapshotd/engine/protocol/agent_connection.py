"""One agent's connection: its requests, one after the other, checked and handed to the handler. Its state belongs to
its thread."""

from __future__ import annotations

import base64
import binascii
import json
import logging
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

from snapshotd.engine.protocol import agent_wire as wire
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
    Intent,
    Outcome,
)
from snapshotd.engine.protocol.agent_wire import AgentRequest, Disconnected, Malformed, Wire
from snapshotd.errors import (
    Conflict,
    InternalError,
    LimitExceeded,
    NotFound,
    NotPermitted,
    SnapshotdError,
    UsageError,
    VersionMismatch,
)
from snapshotd.kernel import turns
from snapshotd.types import CallStatus, EntryKind, SideEffect

_LOG = logging.getLogger(__name__)
_KINDS = (EntryKind.TOOL, EntryKind.MODEL, EntryKind.TASK)
_FACTS_LIMIT = 10_000
_ARGV_LIMIT = 64
_DEPENDS_LIMIT = 100
_EXPIRES_LIMIT_S = 10 * 365 * 86400
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

    def parking(self, pid: int, parked: bool, reason: str | None = None) -> AbstractContextManager[None]: ...


class AgentConnection:
    """One peer."""

    def __init__(self, server: Server, connected: socket.socket) -> None:
        credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.pid: int = struct.unpack("3i", credentials)[0]
        self.wire = Wire(connected)
        self.open_calls: set[str] = set()
        self._server = server
        self._greeted = False

    def fail(self, error: SnapshotdError) -> None:
        """Send an error that belongs to no request; the connection ends after it."""
        self.wire.send({"id": None, "error": {"code": error.code, "message": error.message}})

    @property
    def name(self) -> str:
        return f"agent-{self.pid}"

    def run(self) -> None:
        """Answer requests until the peer closes, sends something malformed, or the server closes. A peer that the server
        does not admit is told so."""
        with suppress(Disconnected):  # as every connection of a killed process ends
            try:
                if not self._server.admit(self.pid):
                    self.fail(
                        NotPermitted(f"Process {self.pid} does not belong to this sandbox; connect from inside of it.")
                    )
                    return
                while (request := self.wire.read_request()) is not None:
                    self._answer(request)
            except Malformed as malformed:
                self.fail(malformed.error)

    @property
    def _handler(self) -> AgentHandler:
        return self._server.handler()

    def interrupt(self) -> None:
        self.wire.interrupt()

    def close(self) -> None:
        self.wire.close()
        if self._server.lost is not None and self.open_calls:
            self._server.lost(self.pid, tuple(sorted(self.open_calls)))

    def _answer(self, request: AgentRequest) -> None:
        action = _ACTIONS.get(request.op)
        if action is None:
            raise Malformed(
                UsageError("A request's op is not the name of a request; see the table in docs/agent-protocol.md.")
            )
        if not self._greeted and request.op != "hello":
            raise Malformed(UsageError("The first request is not hello; say hello first."))
        limit = self._server.body_limit_bytes if request.op == "call_end" else _BODY_LIMITS.get(request.op, 0)
        if (request.body_bytes or 0) > limit:
            raise Malformed(
                LimitExceeded(
                    f"A body of {request.body_bytes} bytes is over {request.op}'s limit of {limit}; send less."
                )
            )
        body: bytes | None = None
        try:
            answer = action(self, request)
            body = answer.pop("body", None)
        except SnapshotdError as exc:
            answer = {"error": {"code": exc.code, "message": exc.message}}
        except (Malformed, Disconnected):
            raise
        except Exception:  # noqa: BLE001 - the top of a request: a defect in one must not end the others
            _LOG.exception("request %s of process %d failed", request.op, self.pid)
            error = InternalError(f"The daemon failed in {request.op}; its log has the details, please report them.")
            answer = {"error": {"code": error.code, "message": error.message}}
        self.wire.skip_body()
        self.wire.send({"id": request.id, **answer}, body)

    def _parked(self, request: AgentRequest) -> AbstractContextManager[None]:
        fields = request.fields
        return self._server.parking(
            self.pid, wire.boolean(fields, "parked"), wire.optional_text(fields, "unparked_because")
        )

    def _value(self, request: AgentRequest, key: str) -> tuple[Any] | None:
        """The value of a field, or of the body; None where there is neither."""
        if request.body_bytes is not None:
            return (wire.parse_json(b"".join(self.wire.body())),)
        return (request.fields[key],) if key in request.fields else None

    # -- requests ------------------------------------------------------------------------------------------------------

    def _hello(self, request: AgentRequest) -> Answer:
        version = request.fields.get("version")
        if version != VERSION or isinstance(version, bool):
            raise Malformed(
                VersionMismatch(
                    f"The agent does not speak protocol version {VERSION}; use the library the daemon mounts."
                )
            )
        calls = request.fields.get("calls") or []
        if not isinstance(calls, list) or len(calls) > OPEN_CALL_LIMIT:
            raise Malformed(
                UsageError(f"The field calls is not a list of at most {OPEN_CALL_LIMIT} ids; correct the request.")
            )
        facts = self._handler.hello(self.pid)
        if calls:
            self.open_calls |= self._handler.claim(self.pid, tuple(wire.call_id({"call": call}) for call in calls))
        self._greeted = True
        return {**facts, "version": VERSION, "body_limit_bytes": self._server.body_limit_bytes}

    def _call_begin(self, request: AgentRequest) -> Answer:
        intent = self._intent(request)
        again = wire.boolean(request.fields, "again")
        if intent.call_id in self.open_calls and not again:
            raise Conflict(f"The call {intent.call_id} has begun already; make a new id for each call.")
        if len(self.open_calls) >= OPEN_CALL_LIMIT:
            raise LimitExceeded(f"This process has {OPEN_CALL_LIMIT} calls open; end some before beginning more.")
        with self._parked(request):
            answer = self._handler.call_begin(self.pid, intent, self._server.closing, again=again)
        if "replayed" not in answer and "later" not in answer:
            self.open_calls.add(intent.call_id)
        return answer

    def _intent(self, request: AgentRequest) -> Intent:
        fields = request.fields
        kind = wire.one_of(fields, "kind", [str(kind) for kind in _KINDS], default="tool")
        side_effect = wire.one_of(fields, "side_effect", [str(effect) for effect in SideEffect], default="local")
        approve = fields.get("approve", False)
        if not isinstance(approve, bool):
            approve = wire.label(fields, "approve", 1000)
        arguments = self._value(request, "arguments")
        return Intent(
            wire.call_id(fields),
            wire.label(fields, "name", 200),
            arguments[0] if arguments else None,
            EntryKind(kind),
            SideEffect(side_effect),
            wire.optional_label(fields, "key", 200),
            approve,
            _compensation(fields),
            wire.optional_label(fields, "task", 200),
            _facts(fields),
            wire.boolean(fields, "skippable"),
            wire.boolean(fields, "reuse", default=True),
            wire.optional_label(fields, "code", 64),
            wire.boolean(fields, "waits"),
        )

    def _call_end(self, request: AgentRequest) -> Answer:
        fields = request.fields
        call_id = wire.call_id(fields)
        status = CallStatus(wire.one_of(fields, "status", ["done", "failed"]))
        error = wire.optional_text(fields, "error")
        exit_code = None if fields.get("exit_code") is None else wire.integer(fields, "exit_code", 0, 255)
        usage = fields.get("usage")
        if usage is not None and not isinstance(usage, dict):
            raise Malformed(UsageError("The field usage is not an object; correct the request or leave it out."))
        parking = self._parked(request)
        if call_id not in self.open_calls:
            ended = self._handler.ended(call_id) if wire.boolean(fields, "again") else None
            if ended is None:
                raise NotFound(f"This connection has no open call {call_id}; begin it first and end it once.")
            return {"snapshot": ended}
        result: bytes | BodyWriter | None = _encode(fields["result"]) if "result" in fields else None
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
        fields = request.fields
        call_id = wire.call_id(fields)
        stream = wire.one_of(fields, "stream", ["stdout", "stderr"])
        try:
            data = base64.b64decode(fields.get("data_b64", ""), validate=True)
        except (TypeError, ValueError, binascii.Error):
            raise Malformed(UsageError("The field data_b64 is not base64; correct the request.")) from None
        if call_id not in self.open_calls:
            raise NotFound(f"This connection has no open call {call_id}; its output belongs to none.")
        self._handler.output(call_id, "stdout" if stream == "stdout" else "stderr", data, _rid(request))
        return {}

    def _fact(self, request: AgentRequest) -> Answer:
        return {
            "value": self._handler.fact(
                wire.label(request.fields, "kind", 64), request.fields.get("value"), _rid(request)
            )
        }

    def _message(self, request: AgentRequest) -> Answer:
        role = wire.label(request.fields, "role", 64)
        content = self._value(request, "content")
        if content is None:
            raise Malformed(UsageError("A message has neither content nor a body; send one of them."))
        self._handler.message(role, content[0], _within(request), _rid(request))
        return {}

    def _messages(self, request: AgentRequest) -> Answer:
        offset = wire.integer(request.fields, "offset", 0, 1 << 53, default=0)
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
        key = wire.label(request.fields, "key", 200)
        self._handler.state_set(key, self._value(request, "value"), _within(request))
        return {}

    def _task(self, request: AgentRequest) -> Answer:
        fields = request.fields
        depends = fields.get("depends") or []
        if not isinstance(depends, list) or len(depends) > _DEPENDS_LIMIT:
            raise Malformed(
                UsageError(f"The field depends is not a list of at most {_DEPENDS_LIMIT} names; correct the request.")
            )
        names = tuple(wire.label({"depends": name}, "depends", 200) for name in depends)
        status = wire.one_of(fields, "status", ["pending", "in-progress", "completed", "failed", "skipped"])
        note = wire.optional_text(fields, "note")
        return self._handler.task(wire.label(fields, "name", 200), status, names, note[:1000] if note else note)

    def _tasks(self, _: AgentRequest) -> Answer:
        return {"body": _encode(self._handler.tasks())}

    def _checkpoint(self, request: AgentRequest) -> Answer:
        name = wire.label(request.fields, "name", 200)
        call_id = wire.call_id(request.fields)
        with self._parked(request):
            return self._handler.checkpoint(
                self.pid, call_id, name, _within(request), again=wire.boolean(request.fields, "again")
            )

    def _approve(self, request: AgentRequest) -> Answer:
        fields = request.fields
        expires = fields.get("expires_s")
        if expires is not None and (type(expires) not in (int, float) or not 0 < expires <= _EXPIRES_LIMIT_S):
            raise Malformed(
                UsageError("The field expires_s is not a number of seconds; correct the request or leave it out.")
            )
        call_id, question = wire.call_id(fields), wire.label(fields, "question", 1000)
        with self._parked(request):
            return self._handler.approve(
                self.pid,
                call_id,
                question,
                fields.get("details"),
                expires,
                _within(request),
                self._server.closing,
                again=wire.boolean(fields, "again"),
            )

    def _store_get(self, request: AgentRequest) -> Answer:
        fields = {**_place(request), "version": _version(request.fields, "version")}
        return self._handler.store("get", fields, _within(request), _rid(request))

    def _store_put(self, request: AgentRequest) -> Answer:
        value = self._value(request, "value")
        if value is None:
            raise Malformed(UsageError("A store_put has neither value nor a body; send one of them."))
        ttl = request.fields.get("ttl_s")
        if ttl is not None and (type(ttl) not in (int, float) or not 0 < ttl <= _EXPIRES_LIMIT_S):
            raise Malformed(
                UsageError("The field ttl_s is not a number of seconds; correct the request or leave it out.")
            )
        expected = _version(request.fields, "expected_version")
        fields = {**_place(request), "value": value[0], "ttl_s": ttl, "expected_version": expected}
        return self._handler.store("put", fields, _within(request), _rid(request))

    def _store_delete(self, request: AgentRequest) -> Answer:
        fields = {**_place(request), "expected_version": _version(request.fields, "expected_version")}
        return self._handler.store("delete", fields, _within(request), _rid(request))

    def _store_search(self, request: AgentRequest) -> Answer:
        fields = request.fields
        where = fields.get("where")
        if where is not None and not isinstance(where, dict):
            raise Malformed(UsageError("The field where is not an object; correct the request or leave it out."))
        return self._handler.store(
            "search",
            {
                "namespace": wire.label(fields, "namespace", 200),
                "prefix": wire.optional_text(fields, "prefix") or "",
                "where": where,
                "limit": wire.integer(fields, "limit", 1, 1000, default=100),
                "after": wire.optional_text(fields, "after") or "",
            },
            _within(request),
            _rid(request),
        )


def _within(request: AgentRequest) -> str | None:
    """The running call in whose body a request was made: its effects belong to that call, and a replay does not repeat
    them."""
    return wire.call_id({"call": request.fields["within"]}) if request.fields.get("within") is not None else None


def _rid(request: AgentRequest) -> str | None:
    """The request's own name: the same when the agent sends it again."""
    return wire.request_name(request.fields)


def _place(request: AgentRequest) -> dict[str, Any]:
    return {"namespace": wire.label(request.fields, "namespace", 200), "key": wire.label(request.fields, "key", 200)}


def _version(fields: dict[str, Any], key: str) -> int | None:
    return None if fields.get(key) is None else wire.integer(fields, key, 0, 1 << 53)


def _facts(fields: dict[str, Any]) -> tuple[Any, ...]:
    facts = fields.get("facts") or []
    known = (
        isinstance(facts, list)
        and len(facts) <= _FACTS_LIMIT
        and all(isinstance(fact, dict) and "kind" in fact for fact in facts)
    )
    if not known:
        raise Malformed(
            UsageError(f"The field facts is not a list of at most {_FACTS_LIMIT} facts; correct the request.")
        )
    return tuple({"kind": fact["kind"], "value": fact.get("value")} for fact in facts)


def _compensation(fields: dict[str, Any]) -> tuple[str, ...] | None:
    value = fields.get("compensate")
    if value is None:
        return None
    argv = value.get("argv") if isinstance(value, dict) else None
    if (
        not isinstance(argv, list)
        or not 1 <= len(argv) <= _ARGV_LIMIT
        or not all(isinstance(arg, str) and "\0" not in arg for arg in argv)
    ):
        raise Malformed(
            UsageError(
                f'The field compensate is not {{"argv": [...]}} of 1 to {_ARGV_LIMIT} texts; correct the request.'
            )
        )
    return tuple(argv)


def _encode(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(
        errors="backslashreplace"
    )  # lone surrogates, as JSON has it


_Action = Callable[[AgentConnection, AgentRequest], Answer]
_ACTIONS: dict[str, _Action] = {
    "hello": AgentConnection._hello,
    "call_begin": AgentConnection._call_begin,
    "call_end": AgentConnection._call_end,
    "output": AgentConnection._output,
    "fact": AgentConnection._fact,
    "message": AgentConnection._message,
    "messages": AgentConnection._messages,
    "state": AgentConnection._state,
    "state_set": AgentConnection._state_set,
    "task": AgentConnection._task,
    "tasks": AgentConnection._tasks,
    "checkpoint": AgentConnection._checkpoint,
    "approve": AgentConnection._approve,
    "store_get": AgentConnection._store_get,
    "store_put": AgentConnection._store_put,
    "store_delete": AgentConnection._store_delete,
    "store_search": AgentConnection._store_search,
}
