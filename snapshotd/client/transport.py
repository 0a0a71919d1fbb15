"""HTTP over a way to the daemon (`ways.py`): requests, answers, streams, and their errors.

Every request has a connection of its own (about 0.05 ms on a unix socket; to another machine what its way takes), so a
`Transport` may be used from any number of threads, or tasks. Its methods are coroutines over `Links`, as verbs are
(`twofold.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar, cast

from snapshotd.api.operation import Operation
from snapshotd.api.record import Json, Request, decode
from snapshotd.api.wire import BYTES, LINES
from snapshotd.client.exchange import (
    AGAIN_S,
    DYING_TRIES,
    UPLOAD_BYTES,
    Again,
    AnswerLost,
    DaemonAway,
    FrameSplitter,
    HttpAnswer,
    LineSplitter,
    Query,
    answer_lost,
    answer_lost_in_plain,
    begin_bytes,
    check_answer,
    chunk_bytes,
    event_of,
    failure,
    line_bytes,
    members_of,
    new_key,
    request_bytes,
    too_late,
)
from snapshotd.client.links import ByteLink, Links, ThreadLinks
from snapshotd.client.local.arguments import check_seconds
from snapshotd.client.twofold import closing
from snapshotd.client.ways import SocketWay, Way
from snapshotd.errors import DaemonUnavailable, NotFound

_UPLOAD_END_S = 1.0
A = TypeVar("A")
Item = TypeVar("Item")


class UploadSource(Protocol):
    """The body of an upload."""

    in_memory: bool
    """Reading it never waits: it is not read from a file."""

    def read(self, count: int) -> bytes:
        """At most `count` bytes; nothing at the end."""


class Transport:
    """The way to one daemon. `start` is called once per failed connection to bring a daemon up; it raises the error
    that prevents that.

    A method that returns an iterator has sent its request; iterate over the answer, or close it."""

    def __init__(
        self,
        way: Way | Path,
        start: Callable[[], None] | None = None,
        *,
        links: Links | None = None,
        timeout_s: float | None = None,
        patience_s: float = AGAIN_S,
    ) -> None:
        """`way`: to the daemon; a path is that of its socket. `links`: None: they block. `timeout_s`: of each `request`;
        None: they take as long as they take. `patience_s`: where an answer was lost and may be asked for again, how long to
        look for a daemon. UsageError when the path is too long for a socket, or for a timeout that is none."""
        check_seconds("request_timeout", timeout_s)
        self.way = SocketWay(way) if isinstance(way, Path) else way
        self.start, self.timeout_s, self.patience_s = start, timeout_s, patience_s
        self.links = ThreadLinks() if links is None else links

    async def call(
        self,
        operation: Operation[A],
        *names: str,
        body: Request | Json | None = None,
        query: Request | Query | None = None,
    ) -> A:
        """One operation whose answer is a value of its type. Errors as `request`."""
        method, path = operation.at(*names)
        asked = members_of(query) if isinstance(query, Request) else query
        answer = await self.request(method, path, body=body, query=asked, once=operation.once)
        return cast(A, decode(operation.answer, answer))

    async def request(
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
                async with await self._answer(method, path, body, query, deadline, key) as reply:
                    data = await reply.read_all()
                return json.loads(data) if data else None
            except TimeoutError:
                raise too_late(self.timeout_s) from None
            except DaemonAway as exc:
                await self.links.pause(again.pause_s(exc))

    async def recall(
        self, path: str, key: str, failed: DaemonAway, *, body: Any = None, query: Query | None = None
    ) -> list[dict[str, Any]]:
        """The whole answer to a POST under a key that was lost, as JSON objects, from what the request has made. Raises
        `failed`, the error that it was lost by, if nothing is recorded or nobody answers; and the request's own error."""
        again, latest = Again(key, self.patience_s), failed
        while True:
            await self.links.pause(again.pause_s(latest))
            data = request_bytes("POST", path, query, body, key=key, recall=True)
            try:
                async with await self._exchange(data, None) as reply:
                    return [event async for event in reply.events()]
            except NotFound:
                raise failed from None
            except DaemonAway as exc:
                latest = exc

    async def lines(
        self, method: str, path: str, *, body: Any = None, query: Query | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """One request whose answer is one JSON object per line. An `error` event is raised as the error it carries."""
        reply = await self._answer(method, path, body, query)
        return _to_the_end(reply, reply.events())

    async def raw_lines(
        self, method: str, path: str, *, query: Query | None = None, deadline: float | None = None
    ) -> AsyncIterator[bytes]:
        """The same with undecoded lines; `event_of` decodes one. TimeoutError at the `deadline` (of time.monotonic)."""
        reply = await self._answer(method, path, None, query, deadline)
        return _to_the_end(reply, reply.lines())

    async def pieces(self, method: str, path: str, *, query: Query | None = None) -> AsyncIterator[bytes]:
        """One request whose answer is raw bytes, in pieces."""
        reply = await self._answer(method, path, None, query)
        return _to_the_end(reply, reply.pieces())

    async def frames(
        self, method: str, path: str, *, query: Query | None = None
    ) -> AsyncIterator[bytes | dict[str, Any]]:
        """One request whose answer is raw bytes with events in between (`wire.FRAMES`). Ends after the `result` event
        and in no other way: an `error` event is raised as the error it carries, and DaemonUnavailable when the answer
        breaks off."""
        reply = await self._answer(method, path, None, query)
        return _to_the_end(reply, reply.frames())

    async def upload(
        self, path: str, source: UploadSource, *, query: Query | None = None, key: str | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """One POST whose body is what `source` gives, of any length. The answer is one JSON object per line and comes
        while work at the side still reads and sends. Errors of reading are raised by the iteration, and the daemon takes
        the request for broken off.

        An `error` event is raised as the error it carries. Leaving the iteration early breaks the request off.
        """
        return self._uploading(await self._begin(path, query, BYTES, key), source)

    async def _uploading(self, reply: DaemonReply, source: UploadSource) -> AsyncIterator[dict[str, Any]]:
        sending = self.links.begin(lambda: self._send_all(reply, source), "upload", reply.break_off)
        try:
            await reply.wait_for_head()
            async for event in reply.events():
                yield event
        except DaemonUnavailable:
            if sending.failure is not None:
                raise sending.failure from None
            raise
        finally:
            reply.break_off()
            if await sending.end(_UPLOAD_END_S):  # else it is stuck in `read`, which nothing can end
                reply.close()

    async def _send_all(self, reply: DaemonReply, source: UploadSource) -> None:
        data = b"-"
        while data:
            data = source.read(UPLOAD_BYTES) if source.in_memory else await self.links.apart(source.read, UPLOAD_BYTES)
            if not await reply.send(chunk_bytes(data)):
                return

    async def converse(
        self, path: str, first: Any, *, query: Query | None = None, key: str | None = None
    ) -> Conversation:
        """One POST that goes on while it is answered: JSON objects, one per line, to both sides. `first` is sent at
        once."""
        data = line_bytes(first)
        conversation = Conversation(await self._begin(path, query, LINES, key))
        await conversation.say(data)
        return conversation

    async def carry(self, path: str) -> Conversation:
        """One POST that goes on while it is answered: raw bytes to the daemon, and `wire.FRAMES` back."""
        return Conversation(await self._begin(path, None, BYTES))

    async def _begin(self, path: str, query: Query | None, content_type: str, key: str | None = None) -> DaemonReply:
        """Send the head of a POST whose body comes in chunks."""
        reply = await self._connect()
        await reply.send(self.way.sign(begin_bytes(path, query, content_type, key)))
        return reply

    async def _answer(
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
                return await self._exchange(data, deadline)
            except DaemonAway:
                continue
        return await self._exchange(data, deadline)

    async def _exchange(self, data: bytes, deadline: float | None) -> DaemonReply:
        reply = await self._connect()
        reply.connection.deadline = deadline
        try:
            await reply.send(self.way.sign(data))
            return await reply.wait_for_head()
        except BaseException as exc:
            reply.close()
            if isinstance(exc, AnswerLost) and self.way.place.startswith("http://"):
                raise answer_lost_in_plain(self.way.place) from exc
            raise

    async def _connect(self) -> DaemonReply:
        try:
            return DaemonReply(await self.way.connect(self.links))
        except OSError as exc:
            error = self.way.connect_error(exc)
            if self.start is None or not isinstance(error, DaemonUnavailable):
                raise error from exc
        await self.links.apart(self.start)
        try:
            return DaemonReply(await self.way.connect(self.links))
        except OSError as exc:
            raise self.way.connect_error(exc) from exc


class DaemonReply:
    """A connection with one request and its answer. Used as a context manager, or closed."""

    def __init__(self, connection: ByteLink) -> None:
        self.connection = connection
        self._answer = HttpAnswer()
        self._body = b""
        """Bytes of the body that came with the head."""

    async def send(self, data: bytes) -> bool:
        """Send a part of the request. False when the daemon does not listen any more: its answer says why."""
        try:
            await self.connection.send(data)
        except TimeoutError:
            raise
        except OSError:
            return False
        return True

    async def wait_for_head(self) -> Self:
        """Wait for the answer's head, and return this. The answer's error is raised, if it is one or from a daemon of
        another version."""
        while not self._answer.status:
            self._body = await self._receive()
        if self._answer.status >= 400:
            raise failure(self._answer.status, await self.read_all())
        check_answer(self._answer)
        return self

    async def read_some(self) -> bytes:
        """The next bytes of the body; nothing at its end."""
        data, self._body = self._body, b""
        while not data and not self._answer.ended:
            data = await self._receive()
        return data

    async def read_all(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def pieces(self) -> AsyncIterator[bytes]:
        while data := await self.read_some():
            yield data

    async def lines(self) -> AsyncIterator[bytes]:
        lines = LineSplitter()
        while data := await self.read_some():
            for line in lines.feed(data):
                yield line
        if lines.rest:
            raise answer_lost()

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The answer, line by line. An `error` event is raised as the error it carries."""
        async with closing(self.lines()) as lines:
            async for line in lines:
                yield event_of(line)

    async def frames(self) -> AsyncIterator[bytes | dict[str, Any]]:
        frames = FrameSplitter()
        while not frames.ended:
            data = await self.read_some()
            if not data:
                raise answer_lost()
            for frame in frames.feed(data):
                yield frame

    async def _receive(self) -> bytes:
        try:
            data = await self.connection.receive()
        except ConnectionError as exc:
            raise answer_lost() from exc
        return self._answer.feed(data)

    def break_off(self) -> None:
        """End the connection for both sides; from any thread."""
        self.connection.break_off()

    def close(self) -> None:
        self.connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()  # an iterator over it was never begun


class Conversation:
    """One request that goes on while it is answered. Used as a context manager; `say` and `send` from any thread, or
    task."""

    def __init__(self, reply: DaemonReply) -> None:
        self._reply = reply

    async def say(self, line: bytes) -> None:
        """Send one line. Not an error when the daemon does not listen any more: its answer says why."""
        await self.send(line + b"\n")

    async def send(self, data: bytes) -> None:
        """Send some bytes, or none: the end. Not an error, as `say`."""
        await self._reply.send(chunk_bytes(data))

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The answer, line by line, when it begins. An `error` event is raised as the error it carries."""
        return (await self._reply.wait_for_head()).events()

    async def frames(self) -> AsyncIterator[bytes | dict[str, Any]]:
        """The answer, as `Transport.frames`, when it begins."""
        return (await self._reply.wait_for_head()).frames()

    def break_off(self) -> None:
        """End the connection for both sides; also while it is read."""
        self._reply.break_off()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.break_off()
        await self._reply.connection.finish()


async def _to_the_end(reply: DaemonReply, items: AsyncIterator[Item]) -> AsyncIterator[Item]:
    """The items of an answer, whose connection is closed behind them."""
    async with reply, closing(items) as answered:
        async for item in answered:
            yield item
