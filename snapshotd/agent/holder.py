"""A call that is begun by one process and ended by another: `snapshotd-agent begin` and `end`.

A call is ended on the connection that began it. A small background process, the holder, keeps that open; `end` and
`output` speak to it over an abstract unix socket named after the call. It needs nothing of the root: its working
directory is /, it has no files open, and an abstract socket is no file. It ends with its call, or when the daemon is
gone and does not come back.

A holder is one more live process, so while a call is held no other process can be parked, and snapshots take the slower
way.

Processes of the same user in the same pid namespace may speak to it. Both sides check that, since in a sandbox with the
host's network abstract sockets are shared with the host.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import struct
from typing import Any, Dict, List, Optional, Tuple

from snapshotd.agent.calls import put
from snapshotd.agent.session import session
from snapshotd.agent.wire.connection import Denied, SnapshotdError, SnapshotdUnavailable
from snapshotd.agent.wire.link import Link
from snapshotd.agent.wire.values import encode

_FORWARDED = ("call_end", "output")
_STALL_S = 60.0
_RECEIVE_BYTES = 1 << 20


def start(fields: Dict[str, Any], body: Optional[bytes]) -> Dict[str, Any]:
    """Begin a call in a holder of its own. Returns the daemon's answer to `call_begin`. Raises as `Session.request`."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            os.setsid()
            if os.fork() == 0:
                _hold(fields, body, writing)
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(
        reading, "rb"
    ) as pipe:  # if we are gone before the answer, the holder cannot deliver it and gives the call up
        said = pipe.read()
    if not said:
        raise SnapshotdUnavailable("The process that holds the call ended before it began; try again.")
    return _unpack(json.loads(said.decode("utf-8")))


def forward(call: str, op: str, fields: Dict[str, Any], result: Any = None) -> Dict[str, Any]:
    """Have the holder of a call make a request on its connection. SnapshotdError (`NotFound`) if no holder has it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connected:
        try:
            connected.connect(_address(call))
        except OSError:
            raise SnapshotdError(
                "No call {} is open in this sandbox: begin it first, and end it once.".format(call), "NotFound"
            ) from None
        if not _is_trusted(connected):
            raise SnapshotdError("Another user holds the call {}; end it as that one.".format(call), "NotPermitted")
        connected.sendall(encode({"op": op, "fields": fields, "result": result}))
        connected.shutdown(socket.SHUT_WR)
        said = _read(connected, None)
    if not said:
        raise SnapshotdUnavailable("The process that holds the call {} ended; its outcome is not known.".format(call))
    return _unpack(json.loads(said.decode("utf-8")))


def _address(call: str) -> str:
    return "\0snapshotd-call-" + call


def _unpack(said: Dict[str, Any]) -> Dict[str, Any]:
    if "error" in said:
        if said["error"]["code"] == "Denied":
            raise Denied(said["error"]["message"])
        if said["error"]["code"] == "DaemonUnavailable":
            raise SnapshotdUnavailable(said["error"]["message"])
        raise SnapshotdError(said["error"]["message"], said["error"]["code"])
    return dict(said["answer"])


# -- the holder --------------------------------------------------------------------------------------------------------


def _hold(fields: Dict[str, Any], body: Optional[bytes], writing: int) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(_address(fields["call"]))
    listener.listen(8)
    _let_go([writing, listener.fileno()])
    said, connection = _begin(fields, body)
    try:
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(encode(said))
    except BrokenPipeError:
        return
    if "answer" in said and "replayed" not in said["answer"]:
        _serve(listener, fields["call"], connection)


def _begin(fields: Dict[str, Any], body: Optional[bytes]) -> Tuple[Dict[str, Any], Optional[Link]]:
    """Begin the call. Returns the daemon's answer for the caller, and the call's own connection, if it has one."""
    try:
        waiting = session.begin_call(fields, body)
        return {"answer": waiting.answer()}, waiting.connection
    except SnapshotdError as exc:
        return {"error": {"code": exc.code, "message": str(exc)}}, None


def _let_go(kept: List[int]) -> None:
    """Let go of everything inherited from the parent process: its folder, files, terminal and signals."""
    os.chdir("/")
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:
                pass  # the descriptor that listdir had
    null = os.open("/dev/null", os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    os.close(null)


def _serve(listener: socket.socket, call: str, connection: Optional[Link]) -> None:
    while session.fileno(connection) >= 0:
        with (
            selectors.DefaultSelector()
        ) as selector:  # anew each time: a request may have changed the daemon's descriptor
            selector.register(listener, selectors.EVENT_READ)
            daemon = selector.register(session.fileno(connection), selectors.EVENT_READ)
            ready = [key for key, _ in selector.select()]
        if daemon in ready:  # between requests the daemon says nothing: it has gone
            try:
                session.reconnect(connection)
            except SnapshotdError:
                return
        elif _answer(listener, call, connection):
            return


def _answer(listener: socket.socket, call: str, connection: Optional[Link]) -> bool:
    """Serve one request. True when the call has ended."""
    client, _ = listener.accept()
    with client:
        try:
            client.settimeout(_STALL_S)
            if not _is_trusted(client):
                return False
            request = json.loads(_read(client, session.body_limit_bytes).decode("utf-8"))
            if request["op"] not in _FORWARDED:
                return False
            fields = dict(request["fields"], call=call)
        except (OSError, ValueError, KeyError, TypeError):
            return False  # not one of our own; others may come
        ending: bool = request["op"] == "call_end"
        try:
            body = put(fields, "result", request["result"]) if ending else None
            said: Dict[str, Any] = {
                "answer": session.request(request["op"], fields, body, park=ending, connection=connection)
            }
        except SnapshotdError as exc:
            said = {"error": {"code": exc.code, "message": str(exc)}}
        try:
            client.sendall(encode(said))
        except OSError:
            pass  # it did not wait for the answer
        return ending


def _is_trusted(connected: socket.socket) -> bool:
    pid, uid, _ = struct.unpack(
        "3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return pid != 0 and uid in (0, os.geteuid())  # a process of another pid namespace has the id 0 here


def _read(connected: socket.socket, limit_bytes: Optional[int]) -> bytes:
    """Everything up to the end. ValueError if it is more than the limit, with room for the request around a result."""
    pieces: List[bytes] = []
    size = 0
    while True:
        data = connected.recv(_RECEIVE_BYTES)
        if not data:
            return b"".join(pieces)
        size += len(data)
        if limit_bytes is not None and size > limit_bytes + _RECEIVE_BYTES:
            raise ValueError("too much")
        pieces.append(data)
