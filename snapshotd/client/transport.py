"""HTTP over the daemon's unix socket: requests, answers, streams, and their errors. Standard library only.

Every request has a connection of its own (about 0.05 ms on a unix socket), so a `Transport` may be used from any number
of threads.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from snapshotd.daemon.http.wire import (
    API_PREFIX,
    API_VERSION,
    BODY_MAX_BYTES,
    FRAME_DATA,
    FRAME_EVENT,
    FRAME_HEADER,
    FRAME_MAX_BYTES,
    VERSION_HEADER,
    check_socket_path,
)
from snapshotd.errors import (
    BY_CODE,
    DaemonUnavailable,
    InternalError,
    LimitExceeded,
    NotPermitted,
    SnapshotdError,
    VersionMismatch,
)

_READ_BYTES = 1 << 16
_LINE_MAX_BYTES = 64 << 20
"""One NDJSON line: a megabyte of output in base64 is the usual most; this bounds a broken peer."""

_UPLOAD_BYTES = 1 << 18
_UPLOAD_END_S = 1.0
_DYING_TRIES = 3
_LOST = (
    "the daemon went away in the middle of the answer; everything it had captured is safe: run `snapshotd log` or the next command, "
    "which starts it again, and look at its daemon.log for the reason"
)


class DaemonAway(DaemonUnavailable):
    """No daemon answered, or the connection ended before the answer did. A successor may be there soon."""

    @property
    def code(self) -> str:
        return DaemonUnavailable.__name__


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("snapshotd")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.connect(str(self._path))
        except OSError:
            self.sock.close()
            raise


class Transport:
    """The way to one daemon. `start` is called once per failed connection to bring a daemon up; it raises the error
    that prevents that."""

    def __init__(self, socket_path: Path, start: Callable[[], None] | None = None) -> None:
        """UsageError when the path is too long for a socket."""
        check_socket_path(socket_path)
        self.socket_path = socket_path
        self._start = start

    def request(self, method: str, path: str, *, body: Any = None, query: dict[str, str | None] | None = None) -> Any:
        """One request with a JSON answer (None when it is empty). Raises the daemon's error; DaemonUnavailable when it
        is not there."""
        answer = self._answer(method, path, body, query)
        with _lost_means_unavailable():
            data = answer.read()
        return json.loads(data) if data else None

    def lines(
        self, method: str, path: str, *, body: Any = None, query: dict[str, str | None] | None = None
    ) -> Iterator[dict[str, Any]]:
        """One request whose answer is one JSON object per line. The request is sent at once; iterate over the answer,
        or close it.

        An `error` event is raised as the error it carries.
        """
        return _events(self._answer(method, path, body, query))

    def raw_lines(self, method: str, path: str, *, query: dict[str, str | None] | None = None) -> Iterator[bytes]:
        """The same with undecoded lines; `event_of` decodes one."""
        return _lines(self._answer(method, path, None, query))

    def pieces(self, method: str, path: str, *, query: dict[str, str | None] | None = None) -> Iterator[bytes]:
        """One request whose answer is raw bytes, in pieces."""
        return _pieces(self._answer(method, path, None, query))

    def frames(
        self, method: str, path: str, *, query: dict[str, str | None] | None = None
    ) -> Iterator[bytes | dict[str, Any]]:
        """One request whose answer is raw bytes with events in between (`wire.FRAMES`). Ends after the `result` event
        and in no other way: an `error` event is raised as the error it carries, and DaemonUnavailable when the answer
        breaks off."""
        return _frames(self._answer(method, path, None, query))

    def upload(
        self, path: str, read: Callable[[int], bytes], *, query: dict[str, str | None] | None = None
    ) -> Iterator[dict[str, Any]]:
        """One POST whose body is the bytes that `read(count)` returns, of any length, until it returns none. The answer
        is one JSON object per line and comes while a thread still reads and sends. Errors of `read` are raised here,
        and the daemon takes the request for broken off.

        An `error` event is raised as the error it carries. Leaving the iteration early breaks the request off.
        """
        connection = self._begin(path, query, "application/octet-stream")
        return _uploading(connection, Sender(connection.sock.dup(), read))

    def converse(self, path: str, first: Any, *, query: dict[str, str | None] | None = None) -> Conversation:
        """One POST that goes on while it is answered: JSON objects, one per line, to both sides. `first` is sent at
        once."""
        data = json.dumps(first).encode()
        if len(data) > BODY_MAX_BYTES:
            raise _too_large(data)
        conversation = Conversation(self._begin(path, query, "application/x-ndjson"))
        conversation.say(data)
        return conversation

    def carry(self, path: str) -> Conversation:
        """One POST that goes on while it is answered: raw bytes to the daemon, and `wire.FRAMES` back."""
        return Conversation(self._begin(path, None, "application/octet-stream"))

    def _begin(self, path: str, query: dict[str, str | None] | None, content_type: str) -> _Connection:
        """Send the head of a POST whose body comes in chunks."""
        connection = self._connect()
        try:
            connection.putrequest("POST", _target(path, query))
            for key, value in {**_headers(), "Content-Type": content_type, "Transfer-Encoding": "chunked"}.items():
                connection.putheader(key, value)
            with _lost_means_unavailable():
                connection.endheaders()
        except BaseException:
            connection.close()
            raise
        return connection

    def _answer(
        self, method: str, path: str, body: Any, query: dict[str, str | None] | None
    ) -> http.client.HTTPResponse:
        target = _target(path, query)
        headers = _headers()
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            if len(data) > BODY_MAX_BYTES:
                raise _too_large(data)
            headers["Content-Type"] = "application/json"
        for _ in range(_DYING_TRIES if method == "GET" and self._start is not None else 0):
            # Nothing was asked to change: a daemon that was dying when it took the connection took the request with it.
            # Ask its successor.
            try:
                return self._exchange(method, target, None, headers)
            except DaemonAway:
                continue
        return self._exchange(method, target, data, headers)

    def _exchange(
        self, method: str, target: str, data: bytes | None, headers: dict[str, str]
    ) -> http.client.HTTPResponse:
        connection = self._connect()
        try:
            with _lost_means_unavailable():
                try:
                    connection.request(method, target, body=data, headers=headers)
                except BrokenPipeError:
                    pass  # refused before it had read everything; its answer says why
                answer = connection.getresponse()
        except BaseException:
            connection.close()
            raise
        return _accepted(answer)

    def _connect(self) -> _Connection:
        connection = _Connection(self.socket_path)
        try:
            connection.connect()
            return connection
        except OSError as exc:
            failure = self._unreachable(exc)
            if self._start is None or not isinstance(failure, DaemonUnavailable):
                raise failure from exc
        self._start()
        try:
            connection.connect()
        except OSError as exc:
            raise self._unreachable(exc) from exc
        return connection

    def _unreachable(self, exc: OSError) -> SnapshotdError:
        if exc.errno in (errno.EACCES, errno.EPERM):
            return NotPermitted(
                f"user {os.geteuid()} may not use the daemon's socket {self.socket_path}, which serves root only; run the command with sudo"
            )
        return DaemonAway(
            f"no daemon answers on {self.socket_path} ({exc.strerror}); start it with `sudo snapshotd daemon`, or name the right place "
            f"with --state-dir or --socket"
        )


class Conversation:
    """One request that goes on while it is answered. Used as a context manager; `say` and `send` from any thread."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self._socket = connection.sock.dup()  # the connection gives its own to the answer
        self._saying = threading.Lock()

    def say(self, line: bytes) -> None:
        """Send one line. Not an error when the daemon does not listen any more: its answer says why."""
        self.send(line + b"\n")

    def send(self, data: bytes) -> None:
        """Send some bytes, or none: the end. Not an error, as `say`."""
        with self._saying, contextlib.suppress(OSError):
            self._socket.sendall(b"%x\r\n%b\r\n" % (len(data), data))

    def events(self) -> Iterator[dict[str, Any]]:
        """The answer, line by line. An `error` event is raised as the error it carries."""
        return _events(self._answer())

    def frames(self) -> Iterator[bytes | dict[str, Any]]:
        """The answer, as `Transport.frames`. Returns when it begins; its error, if it is one, is raised here."""
        return _frames(self._answer())

    def _answer(self) -> http.client.HTTPResponse:
        with _lost_means_unavailable():
            answer = self._connection.getresponse()
        return _accepted(answer)

    def break_off(self) -> None:
        """End the connection for both sides; called from another thread than the reading one."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        self.break_off()
        with self._saying:
            self._socket.close()
        self._connection.close()


class Sender:
    """Sends a request's body in chunks (RFC 9112, 7.1) from a thread of its own. `failure` is the error of reading the
    body."""

    def __init__(self, connection: socket.socket, read: Callable[[int], bytes]) -> None:
        self._connection = connection
        self._read = read
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                data = self._read(_UPLOAD_BYTES)
            except BaseException as exc:  # noqa: BLE001 - raised again by whoever waits for the answer
                self.failure = exc
                self.stop()
                return
            try:
                self._connection.sendall(b"%x\r\n%b\r\n" % (len(data), data))  # without data, this is the end
            except OSError:
                return  # the daemon does not want more; its answer says why
            if not data:
                return

    def stop(self) -> None:
        """Send no more. Where the body has not ended, the daemon takes the request for broken off."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is closed on the other side

    def close(self) -> None:
        """Stop, and end the thread unless it is stuck in `read`, which nothing can end."""
        self.stop()
        self._thread.join(_UPLOAD_END_S)
        if not self._thread.is_alive():
            self._connection.close()


def _uploading(connection: _Connection, sender: Sender) -> Iterator[dict[str, Any]]:
    try:
        with _lost_means_unavailable():
            answer = connection.getresponse()
        yield from _events(_accepted(answer))
    except DaemonUnavailable:
        if sender.failure is not None:
            raise sender.failure from None
        raise
    finally:
        sender.close()
        connection.close()


def _too_large(data: bytes) -> LimitExceeded:
    return LimitExceeded(
        f"the request has {len(data)} bytes, but {BODY_MAX_BYTES} are the most; put large input into files"
    )


def _target(path: str, query: dict[str, str | None] | None) -> str:
    given = {key: value for key, value in (query or {}).items() if value is not None}
    return API_PREFIX + path + ("?" + urlencode(given) if given else "")


def _headers() -> dict[str, str]:
    return {VERSION_HEADER: API_VERSION, "Connection": "close"}


def _accepted(answer: http.client.HTTPResponse) -> http.client.HTTPResponse:
    """The answer, if it is no error and from a daemon of our version; else its error is raised."""
    if answer.status >= 400:
        with answer, _lost_means_unavailable():
            text = answer.read()
        raise _failure(answer.status, text)
    _check_version(answer)
    return answer


def _frames(answer: http.client.HTTPResponse) -> Iterator[bytes | dict[str, Any]]:
    with answer:
        while True:
            kind, length = FRAME_HEADER.unpack(_exactly(answer, FRAME_HEADER.size))
            if length > {FRAME_DATA: FRAME_MAX_BYTES, FRAME_EVENT: _LINE_MAX_BYTES}.get(kind, -1):
                raise InternalError(
                    f"the daemon sent a frame of kind {kind} with {length} bytes, which is no part of its API"
                )
            content = _exactly(answer, length)
            if kind == FRAME_DATA:
                yield content
                continue
            event: dict[str, Any] = json.loads(content)
            if event.get("event") == "error":
                raise error_of(event)
            yield event
            if event.get("event") == "result":
                return


def _exactly(answer: http.client.HTTPResponse, count: int) -> bytes:
    with _lost_means_unavailable():
        data = answer.read(count) if count else b""
    if len(data) < count:
        raise DaemonAway(_LOST)
    return data


def _pieces(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    with answer:
        while True:
            with _lost_means_unavailable():
                data = answer.read1(_READ_BYTES)
            if not data:
                return
            yield data


def _events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in _lines(answer):
        yield event_of(line)


def _lines(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    rest = b""
    for data in _pieces(answer):
        *whole, rest = (rest + data).split(b"\n")
        if len(rest) > _LINE_MAX_BYTES:
            raise InternalError(
                f"the daemon sent a line of more than {_LINE_MAX_BYTES >> 20} MiB, which is no part of its API"
            )
        yield from whole
    if rest:
        raise DaemonAway(_LOST)


def event_of(line: bytes) -> dict[str, Any]:
    """The event of an answer's line. An `error` event is raised as the error it carries."""
    event: dict[str, Any] = json.loads(line)
    if event.get("event") == "error":
        raise error_of(event)
    return event


class _lost_means_unavailable:  # noqa: N801 - reads as what it does in a `with`
    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        if isinstance(exc, http.client.HTTPException | ConnectionError):
            raise DaemonAway(_LOST) from exc


def _check_version(answer: http.client.HTTPResponse) -> None:
    theirs = answer.headers.get(VERSION_HEADER)
    if theirs != API_VERSION:
        answer.close()
        raise VersionMismatch(
            f"the daemon speaks API version {ascii(theirs or 'unknown')[1:40]}, but this client speaks {API_VERSION}; run "
            f"`snapshotd daemon --stop` and repeat the command, which starts a daemon of the client's version"
        )


def _failure(status: int, text: bytes) -> SnapshotdError:
    try:
        return error_of(json.loads(text))
    except (ValueError, KeyError, TypeError):
        return InternalError(
            f"the daemon answered with HTTP status {status} and no error that this client understands; see its daemon.log"
        )


def error_of(answer: dict[str, Any]) -> SnapshotdError:
    """The error that `{"error": {"code", "message"}}` stands for; InternalError for a code this client does not
    know."""
    detail = answer["error"]
    return BY_CODE.get(detail["code"], InternalError)(str(detail["message"]))


def segment(ref: str) -> str:
    """A ref as one segment of a URL path."""
    return quote(ref, safe="")
