"""The daemon's end of the conversation with agents: one unix socket per container. The requests are in docs/agent-protocol.md.

Trust: everything that connects is an attacker who may send anything, in any order, on any number of connections. What one connection sends
never affects another, and costs the daemon one thread, one line of memory and what the handler allows. The socket is the identity: the
directory that holds it is only visible in the container, and `admit` is asked about each peer's process id besides.

Concurrency: one thread per connection (at most 64); the handler's methods are called from all of them, also at the same time.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import stat
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from snapshotd.engine import agent_wire as wire
from snapshotd.engine.agent_wire import Disconnected, Malformed, Request, Wire
from snapshotd.errors import Conflict, InternalError, LimitExceeded, NotFound, NotPermitted, SnapshotdError, UsageError, VersionMismatch
from snapshotd.types import CallStatus, Message

VERSION = 1
CONNECTION_LIMIT = 64
OPEN_CALL_LIMIT = 256
"""Calls of one connection that have begun and not ended."""
BODY_LIMIT_BYTES = 1 << 30
MESSAGE_LIMIT_BYTES = 8 << 20
PAGE_MESSAGES = 16
"""Messages read at once; with their size limit it bounds the memory of an answer."""
PAGE_BYTES = 4 << 20
ERROR_LIMIT_CHARS = 64 << 10
_CLOSE_S = 10.0
_LOG = logging.getLogger(__name__)


class BodyWriter(Protocol):
    """Takes a result while it arrives. `repo.BlobWriter` is one."""

    def write(self, data: bytes) -> object: ...

    def discard(self) -> None:
        """Drop it. Called in any case in the end; must do nothing after the handler saved it."""


class AgentHandler(Protocol):
    """What the requests of one container mean. Any method may raise a SnapshotdError, which the agent is told in one sentence.

    `pid` is the peer's process id in the daemon's pid namespace. `call_id` is the agent's choice, 32 hexadecimal characters, unique among
    the connection's open calls only: refuse one that the trajectory has seen (Conflict).
    """

    def hello(self, pid: int) -> dict[str, Any]:
        """Facts for the agent: `trajectory` and `snapshot`, both text."""

    def call_begin(self, pid: int, call_id: str, name: str, arguments: Any) -> None:
        """A tool call is about to run: record the intent. `arguments` is any JSON value."""

    def body_writer(self) -> BodyWriter:
        """Where a large result goes."""

    def call_end(self, pid: int, call_id: str, status: CallStatus, result: bytes | BodyWriter | None, error: str | None,
                 exit_code: int | None) -> str:
        """A call that this connection began is over: take the snapshot and return its id. `status` is DONE or FAILED.

        `result` is JSON (bytes; checked), or what `body_writer` returned, complete but not checked to be JSON.
        """

    def message(self, role: str, content: Any) -> None:
        """Append to the conversation."""

    def messages(self, offset: int, limit: int) -> list[Message]:
        """At most `limit` messages of the conversation, from number `offset` (0 is the oldest inherited one)."""

    def checkpoint(self, pid: int, name: str) -> str:
        """Take a snapshot without a call and return its id."""


class AgentServer:
    """Serves one container's agents from construction until `close`. Raises OSError when the socket cannot be bound.

    `socket_path`: its directory exists and is a host directory; a socket left there by an earlier daemon is replaced.
    `admit(pid)`: whether this process may talk to us (is in the container). Called from the connection's thread.
    `lost(pid, call_ids)`: called when a connection ended with calls that began and did not end; nobody will end them.
    """

    def __init__(self, socket_path: Path, handler: AgentHandler, admit: Callable[[int], bool], *,
                 body_limit_bytes: int = BODY_LIMIT_BYTES, lost: Callable[[int, tuple[str, ...]], None] | None = None) -> None:
        self.handler = handler
        self.body_limit_bytes = body_limit_bytes
        self.messages_lock = threading.Lock()
        """One page of messages at a time: bounds the memory."""
        self._admit = admit
        self._lost = lost
        self._lock = threading.Lock()
        self._connections: set[_Connection] = set()
        self._threads: list[threading.Thread] = []
        """Every thread that may still run, for `close`; those that have ended are dropped when the next one starts."""
        self._parked: Counter[int] = Counter()
        self._closing = threading.Event()
        self._name = socket_path.name
        self._directory = os.open(socket_path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._listener = _bind(self._directory, self._name)
        except BaseException:
            os.close(self._directory)
            raise
        self._acceptor = threading.Thread(target=self._accept, name="agent-accept", daemon=True)
        self._acceptor.start()

    def parked_pids(self) -> set[int]:
        """Processes that have let go of the root and wait for the answer to a call_end or checkpoint (host process ids)."""
        with self._lock:
            return set(self._parked)

    def close(self) -> None:
        """Refuse new connections, end all, remove the socket. Idempotent.

        Waits for the connections' threads, except the calling one, for at most 10 s: one may be inside the handler, which is not
        interrupted.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept() with EINVAL
        self._acceptor.join(_CLOSE_S)
        self._listener.close()
        try:
            os.unlink(self._name, dir_fd=self._directory)
        except OSError:
            pass  # the container may have removed it or put something else there; its run directory is removed with everything in it
        os.close(self._directory)
        with self._lock:
            for connection in self._connections:
                connection.wire.interrupt()
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> AgentServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def parking(self, pid: int, parked: bool, reason: str | None = None) -> Iterator[None]:
        """Count `pid` as parked inside the block, if it says that it is; else `reason` is what it says about that."""
        if not parked:
            _LOG.debug("process %d is not parked: %r", pid, (reason or "no reason given")[:200])
            yield
            return
        with self._lock:
            self._parked[pid] += 1
        try:
            yield
        finally:
            with self._lock:
                self._parked[pid] -= 1
                if not self._parked[pid]:
                    del self._parked[pid]

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connected, _ = self._listener.accept()
            except OSError as exc:
                if self._closing.is_set():
                    return
                _LOG.warning("cannot accept an agent's connection: %s", exc)
                self._closing.wait(0.1)  # out of descriptors or memory: others may give some back
                continue
            self._start(connected)

    def _start(self, connected: socket.socket) -> None:
        try:
            connection = _Connection(self, connected)
        except OSError:
            connected.close()
            return
        with self._lock:
            if len(self._connections) < CONNECTION_LIMIT and not self._closing.is_set():
                thread = threading.Thread(target=self._serve, args=(connection,), name=f"agent-{connection.pid}", daemon=True)
                self._connections.add(connection)
                self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]
                try:
                    thread.start()
                    return
                except RuntimeError as exc:  # no more threads
                    _LOG.warning("cannot serve an agent's connection: %s", exc)
                    self._connections.discard(connection)
                    self._threads.remove(thread)
        connected.setblocking(False)
        try:
            connected.send(_refusal(LimitExceeded(f"This sandbox has {CONNECTION_LIMIT} connections already; close some and try again.")))
        except OSError:
            pass  # it is being turned away; whether it hears why is its own affair
        connected.close()

    def _serve(self, connection: _Connection) -> None:
        try:
            if not self._admit(connection.pid):
                connection.fail(NotPermitted(f"Process {connection.pid} does not belong to this sandbox; connect from inside of it."))
                return
            connection.run()
        except Disconnected:
            pass  # how every connection of a killed process ends
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.wire.close()
            if self._lost is not None and connection.open_calls:
                self._lost(connection.pid, tuple(sorted(connection.open_calls)))


class _Connection:
    """One peer. Its state belongs to its thread."""

    def __init__(self, server: AgentServer, connected: socket.socket) -> None:
        credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.pid: int = struct.unpack("3i", credentials)[0]
        self.wire = Wire(connected)
        self.open_calls: set[str] = set()
        self._server = server
        self._handler = server.handler
        self._greeted = False

    def fail(self, error: SnapshotdError) -> None:
        """Send an error that belongs to no request; the connection ends after it."""
        self.wire.send({"id": None, "error": {"code": error.code, "message": error.message}})

    def run(self) -> None:
        """Answer requests until the peer closes, sends something malformed, or the server closes."""
        try:
            while (request := self.wire.read_request()) is not None:
                self._answer(request)
        except Malformed as malformed:
            self.fail(malformed.error)

    def _answer(self, request: Request) -> None:
        action = _ACTIONS.get(request.op)
        if action is None:
            raise Malformed(UsageError("A request's op is not the name of a request; see the table in docs/agent-protocol.md."))
        if not self._greeted and request.op != "hello":
            raise Malformed(UsageError("The first request is not hello; say hello first."))
        limit = {"call_end": self._server.body_limit_bytes, "message": MESSAGE_LIMIT_BYTES}.get(request.op, 0)
        if (request.body_bytes or 0) > limit:
            raise Malformed(LimitExceeded(f"A body of {request.body_bytes} bytes is over {request.op}'s limit of {limit}; send less."))
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

    def _hello(self, request: Request) -> dict[str, Any]:
        version = request.fields.get("version")
        if version != VERSION or isinstance(version, bool):
            raise Malformed(VersionMismatch(f"The agent does not speak protocol version {VERSION}; use the library the daemon mounts."))
        facts = self._handler.hello(self.pid)
        self._greeted = True
        return {**facts, "version": VERSION, "body_limit_bytes": self._server.body_limit_bytes}

    def _call_begin(self, request: Request) -> dict[str, Any]:
        call_id = wire.call_id(request.fields)
        name = wire.label(request.fields, "name", 200)
        if call_id in self.open_calls:
            raise Conflict(f"The call {call_id} has begun already; make a new id for each call.")
        if len(self.open_calls) >= OPEN_CALL_LIMIT:
            raise LimitExceeded(f"This process has {OPEN_CALL_LIMIT} calls open; end some before beginning more.")
        self._handler.call_begin(self.pid, call_id, name, request.fields.get("arguments"))
        self.open_calls.add(call_id)
        return {}

    def _call_end(self, request: Request) -> dict[str, Any]:
        fields = request.fields
        call_id = wire.call_id(fields)
        status = fields.get("status")
        if status not in ("done", "failed"):
            raise Malformed(UsageError("The field status is neither done nor failed; correct the request."))
        error = wire.optional_text(fields, "error")
        error = error[:ERROR_LIMIT_CHARS] if error else error
        exit_code = None if fields.get("exit_code") is None else wire.integer(fields, "exit_code", 0, 255)
        parking = self._server.parking(self.pid, wire.boolean(fields, "parked"), wire.optional_text(fields, "unparked_because"))
        if call_id not in self.open_calls:
            raise NotFound(f"This connection has no open call {call_id}; begin it first and end it once.")
        result: bytes | BodyWriter | None = _encode(fields["result"]) if "result" in fields else None
        if request.body_bytes is None:
            return self._end(call_id, CallStatus(status), result, error, exit_code, parking)
        writer = self._handler.body_writer()
        try:
            for piece in self.wire.body():
                writer.write(piece)
            return self._end(call_id, CallStatus(status), writer, error, exit_code, parking)
        finally:
            writer.discard()

    def _end(self, call_id: str, status: CallStatus, result: bytes | BodyWriter | None, error: str | None, exit_code: int | None,
             parking: AbstractContextManager[None]) -> dict[str, Any]:
        self.open_calls.discard(call_id)  # whatever the handler makes of it, it is over
        with parking:
            return {"snapshot": self._handler.call_end(self.pid, call_id, status, result, error, exit_code)}

    def _message(self, request: Request) -> dict[str, Any]:
        role = wire.label(request.fields, "role", 64)
        if request.body_bytes is not None:
            content = wire.parse_json(b"".join(self.wire.body()))
        elif "content" in request.fields:
            content = request.fields["content"]
        else:
            raise Malformed(UsageError("A message has neither content nor a body; send one of them."))
        self._handler.message(role, content)
        return {}

    def _messages(self, request: Request) -> dict[str, Any]:
        offset = wire.integer(request.fields, "offset", 0, 1 << 53, default=0)
        with self._server.messages_lock:
            found = self._handler.messages(offset, PAGE_MESSAGES)
            encoded: list[bytes] = []
            for message in found[:PAGE_MESSAGES]:
                encoded.append(_encode({"role": message.role, "content": message.content}))
                if sum(map(len, encoded)) > PAGE_BYTES:
                    break
            answer: dict[str, Any] = {"body": b"[" + b",".join(encoded) + b"]"}
        if len(encoded) < len(found) or len(found) >= PAGE_MESSAGES:
            answer["next"] = offset + len(encoded)
        return answer

    def _checkpoint(self, request: Request) -> dict[str, Any]:
        name = wire.label(request.fields, "name", 200)
        fields = request.fields
        with self._server.parking(self.pid, wire.boolean(fields, "parked"), wire.optional_text(fields, "unparked_because")):
            return {"snapshot": self._handler.checkpoint(self.pid, name)}


_ACTIONS: dict[str, Callable[[_Connection, Request], dict[str, Any]]] = {
    "hello": _Connection._hello,
    "call_begin": _Connection._call_begin,
    "call_end": _Connection._call_end,
    "message": _Connection._message,
    "messages": _Connection._messages,
    "checkpoint": _Connection._checkpoint,
}


def _encode(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _refusal(error: SnapshotdError) -> bytes:
    return _encode({"id": None, "error": {"code": error.code, "message": error.message}}) + b"\n"


def _bind(directory: int, name: str) -> socket.socket:
    """A listening socket `name` in the directory, open to everyone who can reach it.

    The address goes through the directory's descriptor: paths of any length fit, and nobody can swap the directory. The mode is set
    through a descriptor of the socket itself, since the container may replace the name by a link to anything at any moment.
    """
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        pass  # the usual case: no earlier daemon left one
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"/proc/self/fd/{directory}/{name}")
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                raise OSError(errno.EEXIST, "somebody replaced the agent socket while it was made", name)
            os.chmod(f"/proc/self/fd/{fd}", 0o666)
        finally:
            os.close(fd)
        listener.listen(CONNECTION_LIMIT)
    except BaseException:
        listener.close()
        raise
    return listener
