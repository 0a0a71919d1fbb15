"""One connected socket to the daemon: requests out, answers in. The table of messages is in docs/agent-protocol.md.

Not thread-safe: session.py holds its lock around every request. link.py makes another when one is lost.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from typing import Any, Dict, Optional, Tuple

from snapshotd.agent.wire.values import encode

SOCKET_VARIABLE = "SNAPSHOTD_AGENT_SOCKET"
DEFAULT_SOCKET = "/run/snapshotd/agent.sock"
VERSION = 2
"""Version of the protocol."""
LIBRARY = "0.1.0"
"""Version of this library, told to the daemon. The same as `snapshotd.__version__`, which does not exist inside a
sandbox."""
LINE_LIMIT_BYTES = 1 << 20
INLINE_LIMIT_BYTES = 32 << 10
"""Longer JSON values travel as a body behind the request's line, so that the daemon can stream them."""
_RECEIVE_BYTES = 64 << 10
_PATH_LIMIT_BYTES = 100
"""A unix socket's address holds 108 bytes; longer paths go through the folder's descriptor."""


class SnapshotdError(RuntimeError):
    """The daemon refused a request. `code` is the error's stable name (`OutOfSpace`, `LimitExceeded`, ...)."""

    def __init__(self, message: str, code: str = "InternalError") -> None:
        super().__init__(message)
        self.code = code


class SnapshotdUnavailable(SnapshotdError):  # noqa: N818 - the name users catch; reads as what happened
    """The daemon cannot be reached, or went away during a request and did not come back. The request may or may not
    have been recorded."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "DaemonUnavailable")


class Denied(SnapshotdError):  # noqa: N818 - the name users catch; reads as what happened
    """A person or the policy said no: the tool did not run."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "Denied")


class Connection:
    """A connected socket. Any error but the daemon's own answers leaves it unusable: close it and connect again."""

    def __init__(self, path: str) -> None:
        self._socket = _connect(path)
        self._identity = _identity(self._socket.fileno())
        self._buffer = bytearray()
        self._last_id = 0

    def fileno(self) -> int:
        """The socket's descriptor, to wait for an answer in an event loop; -1 when it is closed."""
        return self._socket.fileno()

    def alive(self) -> bool:
        """False when the program closed our descriptor behind our back (os.closerange, as daemons do) or reused its
        number."""
        try:
            return _identity(self._socket.fileno()) == self._identity
        except OSError:
            return False

    def close(self) -> None:
        """Close the socket, unless its number belongs to something else by now. Idempotent."""
        if self._socket.fileno() < 0:
            return
        if self.alive():
            self._socket.close()
        else:
            self._socket.detach()

    def request(self, op: str, fields: Dict[str, Any], body: Optional[bytes] = None) -> Dict[str, Any]:
        """Send one request and return its answer. Raises SnapshotdError (refused; Unavailable for nonsense) or OSError
        (lost)."""
        self.send(op, fields, body)
        return self.answer()

    def send(self, op: str, fields: Dict[str, Any], body: Optional[bytes] = None) -> None:
        """The first half of `request`; `answer` has to follow."""
        self._last_id += 1
        head: Dict[str, Any] = {"id": self._last_id, "op": op}
        head.update(fields)
        if body is not None:
            head["body_bytes"] = len(body)
        line = encode(head) + b"\n"
        if len(line) > LINE_LIMIT_BYTES:
            raise SnapshotdError(
                "The request {} has {} bytes, over the limit of {}; pass less.".format(op, len(line), LINE_LIMIT_BYTES),
                "LimitExceeded",
            )
        try:
            self._socket.sendall(line)
            if body is not None:
                self._socket.sendall(body)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the daemon may have refused and closed before it read everything; its reason is in the answer

    def answer(self) -> Dict[str, Any]:
        """The second half of `request`: wait for the answer. A body comes as the JSON value it holds, under "body"."""
        line = self._line()
        try:
            answer = json.loads(line.decode("utf-8"))
            if "body_bytes" in answer:
                answer["body"] = json.loads(self._exactly(answer["body_bytes"]).decode("utf-8"))
        except ValueError as exc:
            raise self._nonsense("not JSON: {}".format(exc)) from exc
        error = answer.get("error")
        if error is not None:
            if answer.get("id") is None:
                self._socket.close()  # the daemon closes too after an error that belongs to no request
            if error["code"] == "Denied":
                raise Denied(error["message"])
            raise SnapshotdError(error["message"], error["code"])
        if answer.get("id") != self._last_id:
            raise self._nonsense("an answer to {} instead of {}".format(answer.get("id"), self._last_id))
        return answer  # type: ignore[no-any-return]

    def _nonsense(self, what: str) -> SnapshotdUnavailable:
        self.close()  # the next bytes could mean anything
        return SnapshotdUnavailable(
            "The snapshotd daemon sent an answer that this library does not understand ({}), so the request may or may not be recorded; "
            "look at `snapshotd log` on the host and start the agent again.".format(what)
        )

    def _line(self) -> bytes:
        start = 0
        while True:
            end = self._buffer.find(b"\n", start)
            if end >= 0:
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                return line
            start = len(self._buffer)
            self._receive()

    def _exactly(self, count: int) -> bytes:
        while len(self._buffer) < count:
            self._receive()
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data

    def _receive(self) -> None:
        data = self._socket.recv(_RECEIVE_BYTES)
        if not data:
            raise ConnectionResetError("closed by the daemon")
        self._buffer += data


def socket_path() -> str:
    """The daemon's socket: `SNAPSHOTD_AGENT_SOCKET`, or the place it has in every sandbox."""
    return os.environ.get(SOCKET_VARIABLE) or DEFAULT_SOCKET


def _identity(fd: int) -> Tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _connect(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if sock.fileno() <= 2:  # the program closed a standard stream: its output must not become protocol
            high = socket.socket(fileno=fcntl.fcntl(sock.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))
            sock.close()
            sock = high
        sock.settimeout(None)  # overrides socket.setdefaulttimeout: a snapshot may take long
        if len(os.fsencode(path)) <= _PATH_LIMIT_BYTES:
            sock.connect(path)
        else:
            folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                sock.connect("/proc/self/fd/{}/{}".format(folder, os.path.basename(path)))
            finally:
                os.close(folder)
    except BaseException:
        sock.close()
        raise
    return sock
