"""HTTP over the daemon's unix socket: requests, answers, streams, and their errors.

Every request has a connection of its own (about 0.05 ms on a unix socket), so a `Transport` may be used from any number
of threads. `aio/transport.py` is the same for asyncio.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from snapshotd.api.operations import Operation
from snapshotd.api.record import Json, Request, decode
from snapshotd.api.wire import BYTES, LINES, check_socket_path
from snapshotd.client.exchange import (
    AGAIN_S,
    DYING_TRIES,
    READ_BYTES,
    UPLOAD_BYTES,
    Again,
    DaemonAway,
    FrameSplitter,
    HttpAnswer,
    LineSplitter,
    Query,
    begin_bytes,
    check_answer,
    chunk_bytes,
    event_of,
    failure,
    line_bytes,
    lost,
    new_key,
    request_bytes,
    too_late,
    unreachable,
)
from snapshotd.client.local.arguments import check_seconds
from snapshotd.errors import DaemonUnavailable, NotFound

_UPLOAD_END_S = 1.0
A = TypeVar("A")


class UploadSource(Protocol):
    """The body of an upload."""

    in_memory: bool
    """Reading it never waits: it is not read from a file."""

    def read(self, count: int) -> bytes:
        """At most `count` bytes; nothing at the end."""


class Transport:
    """The way to one daemon. `start` is called once per failed connection to bring a daemon up; it raises the error
    that prevents that."""

    def __init__(
        self,
        socket_path: Path,
        start: Callable[[], None] | None = None,
        *,
        timeout_s: float | None = None,
        patience_s: float = AGAIN_S,
    ) -> None:
        """`timeout_s`: of each `request`; None: they take as long as they take. `patience_s`: where an answer was lost and
        may be asked for again, how long to look for a daemon. UsageError when the path is too long for a socket, or for
        a timeout that is none."""
        check_socket_path(socket_path)
        check_seconds("request_timeout", timeout_s)
        self.socket_path, self.start, self.timeout_s, self.patience_s = socket_path, start, timeout_s, patience_s

    def call(
        self, operation: Operation[A], *names: str, body: Request | Json | None = None, query: Query | None = None
    ) -> A:
        """One operation whose answer is a value of its type. Errors as `request`."""
        method, path = operation.at(*names)
        answer = self.request(method, path, body=body, query=query, once=operation.once)
        return cast(A, decode(operation.answer, answer))

    def request(
        self, method: str, path: str, *, body: Any = None, query: Query | None = None, once: bool = False
    ) -> Any:
        """One request with a JSON answer (None when it is empty). Raises the daemon's error; DaemonUnavailable when it
        is not there, or does not answer in time. `once`: it makes something. It gets a key, and is sent again when the
        answer is lost: the daemon makes it once."""
        deadline = None if self.timeout_s is None else time.monotonic() + self.timeout_s
        key = new_key() if once else None
        again = Again(key, self.patience_s)
        while True:
            try:
                with self._answer(method, path, body, query, deadline, key) as reply:
                    data = reply.read_all()
                return json.loads(data) if data else None
            except TimeoutError:
                raise too_late(self.timeout_s) from None
            except DaemonAway as exc:
                time.sleep(again.pause_s(exc))

    def recall(
        self, path: str, key: str, failed: DaemonAway, *, body: Any = None, query: Query | None = None
    ) -> list[dict[str, Any]]:
        """The whole answer to a POST under a key that was lost, as JSON objects, from what the request has made. Raises
        `failed`, the error that it was lost by, if nothing is recorded or nobody answers; and the request's own error."""
        again, latest = Again(key, self.patience_s), failed
        while True:
            time.sleep(again.pause_s(latest))
            data = request_bytes("POST", path, query, body, key=key, recall=True)
            try:
                with self._exchange(data, None) as reply:
                    return list(_events(reply))
            except NotFound:
                raise failed from None
            except DaemonAway as exc:
                latest = exc

    def lines(
        self, method: str, path: str, *, body: Any = None, query: Query | None = None
    ) -> Iterator[dict[str, Any]]:
        """One request whose answer is one JSON object per line. The request is sent at once; iterate over the answer,
        or close it.

        An `error` event is raised as the error it carries.
        """
        return _closing(reply := self._answer(method, path, body, query), _events(reply))

    def raw_lines(
        self, method: str, path: str, *, query: Query | None = None, deadline: float | None = None
    ) -> Iterator[bytes]:
        """The same with undecoded lines; `event_of` decodes one. TimeoutError at the `deadline` (of time.monotonic)."""
        return _closing(reply := self._answer(method, path, None, query, deadline), _lines(reply))

    def pieces(self, method: str, path: str, *, query: Query | None = None) -> Iterator[bytes]:
        """One request whose answer is raw bytes, in pieces."""
        return _closing(reply := self._answer(method, path, None, query), iter(reply.read_some, b""))

    def frames(self, method: str, path: str, *, query: Query | None = None) -> Iterator[bytes | dict[str, Any]]:
        """One request whose answer is raw bytes with events in between (`wire.FRAMES`). Ends after the `result` event
        and in no other way: an `error` event is raised as the error it carries, and DaemonUnavailable when the answer
        breaks off."""
        return _closing(reply := self._answer(method, path, None, query), _frames(reply))

    def upload(
        self, path: str, source: UploadSource, *, query: Query | None = None, key: str | None = None
    ) -> Generator[dict[str, Any], None, None]:
        """One POST whose body is what `source` gives, of any length. The answer is one JSON object per line and comes
        while a thread still reads and sends. Errors of reading are raised here, and the daemon takes the request for
        broken off.

        An `error` event is raised as the error it carries. Leaving the iteration early breaks the request off.
        """
        reply = self._begin(path, query, BYTES, key)
        return _uploading(reply, Sender(reply, source))

    def converse(self, path: str, first: Any, *, query: Query | None = None, key: str | None = None) -> Conversation:
        """One POST that goes on while it is answered: JSON objects, one per line, to both sides. `first` is sent at
        once."""
        data = line_bytes(first)
        conversation = Conversation(self._begin(path, query, LINES, key))
        conversation.say(data)
        return conversation

    def carry(self, path: str) -> Conversation:
        """One POST that goes on while it is answered: raw bytes to the daemon, and `wire.FRAMES` back."""
        return Conversation(self._begin(path, None, BYTES))

    def _begin(self, path: str, query: Query | None, content_type: str, key: str | None = None) -> DaemonReply:
        """Send the head of a POST whose body comes in chunks."""
        reply = self._connect()
        reply.send(begin_bytes(path, query, content_type, key))
        return reply

    def _answer(
        self,
        method: str,
        path: str,
        body: Any,
        query: Query | None,
        deadline: float | None = None,
        key: str | None = None,
    ) -> DaemonReply:
        """Send a request, and return its answer when its head is there. TimeoutError at the deadline."""
        data = request_bytes(method, path, query, body, key=key)
        for _ in range(DYING_TRIES if method == "GET" and self.start is not None else 0):
            # Nothing was asked to change: a daemon that was dying when it took the connection took the request with it.
            # Ask its successor.
            try:
                return self._exchange(data, deadline)
            except DaemonAway:
                continue
        return self._exchange(data, deadline)

    def _exchange(self, data: bytes, deadline: float | None) -> DaemonReply:
        reply = self._connect()
        reply.deadline = deadline
        try:
            reply.send(data)
            return reply.accepted()
        except BaseException:
            reply.close()
            raise

    def _connect(self) -> DaemonReply:
        try:
            return DaemonReply(self._open())
        except OSError as exc:
            error = unreachable(exc, self.socket_path)
            if self.start is None or not isinstance(error, DaemonUnavailable):
                raise error from exc
        self.start()
        try:
            return DaemonReply(self._open())
        except OSError as exc:
            raise unreachable(exc, self.socket_path) from exc

    def _open(self) -> socket.socket:
        """A new connection."""
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            opened.connect(str(self.socket_path))
        except BaseException:
            opened.close()
            raise
        return opened


class DaemonReply:
    """A connection with one request and its answer. Used as a context manager, or closed."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._answer = HttpAnswer()
        self._body = b""
        """Bytes of the body that came with the head."""
        self.deadline: float | None = None
        """Sending and receiving raise TimeoutError from then on."""

    def send(self, data: bytes) -> bool:
        """Send a part of the request. False when the daemon does not listen any more: its answer says why."""
        try:
            self._wait_until_deadline()
            self._connection.sendall(data)
        except TimeoutError:
            raise
        except OSError:
            return False
        return True

    def accepted(self) -> DaemonReply:
        """Wait for the answer's head, and return this. The answer's error is raised, if it is one or from a daemon of
        another version."""
        while not self._answer.status:
            self._body = self._receive()
        if self._answer.status >= 400:
            raise failure(self._answer.status, self.read_all())
        check_answer(self._answer)
        return self

    def read_some(self) -> bytes:
        """The next bytes of the body; nothing at its end."""
        data, self._body = self._body, b""
        while not data and not self._answer.ended:
            data = self._receive()
        return data

    def read_all(self) -> bytes:
        return b"".join(iter(self.read_some, b""))

    def _receive(self) -> bytes:
        self._wait_until_deadline()
        try:
            data = self._connection.recv(READ_BYTES)
        except ConnectionError as exc:
            raise lost() from exc
        return self._answer.feed(data)

    def _wait_until_deadline(self) -> None:
        if self.deadline is not None:
            self._connection.settimeout(max(self.deadline - time.monotonic(), 1e-3))

    def break_off(self) -> None:
        """End the connection for both sides; from any thread."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> DaemonReply:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()  # an iterator over it was never begun


class Conversation:
    """One request that goes on while it is answered. Used as a context manager; `say` and `send` from any thread."""

    def __init__(self, reply: DaemonReply) -> None:
        self._reply = reply
        self._saying = threading.Lock()

    def say(self, line: bytes) -> None:
        """Send one line. Not an error when the daemon does not listen any more: its answer says why."""
        self.send(line + b"\n")

    def send(self, data: bytes) -> None:
        """Send some bytes, or none: the end. Not an error, as `say`."""
        with self._saying:
            self._reply.send(chunk_bytes(data))

    def events(self) -> Iterator[dict[str, Any]]:
        """The answer, line by line. An `error` event is raised as the error it carries."""
        return _events(self._reply.accepted())

    def frames(self) -> Iterator[bytes | dict[str, Any]]:
        """The answer, as `Transport.frames`. Returns when it begins; its error, if it is one, is raised here."""
        return _frames(self._reply.accepted())

    def break_off(self) -> None:
        """End the connection for both sides; called from another thread than the reading one."""
        self._reply.break_off()

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        self.break_off()
        with self._saying:
            self._reply.close()


class Sender:
    """Sends a request's body in chunks from a thread of its own. `failure` is the error of reading the body."""

    def __init__(self, reply: DaemonReply, source: UploadSource) -> None:
        self._reply, self._source = reply, source
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        data = b"-"
        while data:
            try:
                data = self._source.read(UPLOAD_BYTES)
            except BaseException as exc:  # noqa: BLE001 - raised again by whoever waits for the answer
                self.failure = exc
                self._reply.break_off()
                return
            if not self._reply.send(chunk_bytes(data)):
                return

    def close(self) -> None:
        """Send no more, and end the thread unless it is stuck in `read`, which nothing can end. Where the body has not
        ended, the daemon takes the request for broken off."""
        self._reply.break_off()
        self._thread.join(_UPLOAD_END_S)
        if not self._thread.is_alive():
            self._reply.close()


def _uploading(reply: DaemonReply, sender: Sender) -> Generator[dict[str, Any], None, None]:
    try:
        yield from _events(reply.accepted())
    except DaemonUnavailable:
        if sender.failure is not None:
            raise sender.failure from None
        raise
    finally:
        sender.close()


Item = TypeVar("Item")


def _closing(reply: DaemonReply, items: Iterator[Item]) -> Iterator[Item]:
    with reply:
        yield from items


def _events(reply: DaemonReply) -> Iterator[dict[str, Any]]:
    for line in _lines(reply):
        yield event_of(line)


def _lines(reply: DaemonReply) -> Iterator[bytes]:
    lines = LineSplitter()
    while data := reply.read_some():
        yield from lines.feed(data)
    if lines.rest:
        raise lost()


def _frames(reply: DaemonReply) -> Iterator[bytes | dict[str, Any]]:
    frames = FrameSplitter()
    while not frames.ended:
        data = reply.read_some()
        if not data:
            raise lost()
        yield from frames.feed(data)
