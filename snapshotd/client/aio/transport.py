"""HTTP over the daemon's unix socket, for asyncio. `snapshotd/client/transport.py` is the same for threads; both read and
write what `exchange.py` says.

Every request has a connection of its own, and no thread. A request whose task is cancelled is broken off.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from snapshotd.api.operations import Operation
from snapshotd.api.record import Json, Request, decode
from snapshotd.api.wire import BYTES, LINES
from snapshotd.client.aio.apart import apart
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
from snapshotd.client.transport import Transport, UploadSource
from snapshotd.errors import DaemonUnavailable, NotFound

A = TypeVar("A")


class AsyncTransport:
    """The way to one daemon, as `Transport`. Requests of methods that return iterators are sent when the iteration
    begins."""

    def __init__(
        self,
        socket_path: Path,
        start: Callable[[], None] | None = None,
        *,
        timeout_s: float | None = None,
        patience_s: float = AGAIN_S,
    ) -> None:
        """As `Transport`."""
        plain = Transport(socket_path, start, timeout_s=timeout_s, patience_s=patience_s)
        self.socket_path, self.start, self.timeout_s = plain.socket_path, plain.start, plain.timeout_s
        self.patience_s = plain.patience_s

    async def call(
        self, operation: Operation[A], *names: str, body: Request | Json | None = None, query: Query | None = None
    ) -> A:
        """One operation, as `Transport.call`."""
        method, path = operation.at(*names)
        answer = await self.request(method, path, body=body, query=query, once=operation.once)
        return cast(A, decode(operation.answer, answer))

    async def request(
        self, method: str, path: str, *, body: Any = None, query: Query | None = None, once: bool = False
    ) -> Any:
        """One request with a JSON answer (None when it is empty), as `Transport.request`."""
        key = new_key() if once else None
        try:
            async with asyncio.timeout(self.timeout_s):
                data = await self._requested(method, path, body, query, key)
        except TimeoutError:
            raise too_late(self.timeout_s) from None
        return json.loads(data) if data else None

    async def _requested(self, method: str, path: str, body: Any, query: Query | None, key: str | None) -> bytes:
        again = Again(key, self.patience_s)
        while True:
            try:
                async with await self._answer(method, path, body, query, key) as reply:
                    return await reply.read_all()
            except DaemonAway as exc:
                await asyncio.sleep(again.pause_s(exc))

    async def recall(
        self, path: str, key: str, failed: DaemonAway, *, body: Any = None, query: Query | None = None
    ) -> list[dict[str, Any]]:
        """The whole answer to a POST under a key that was lost, as `Transport.recall`."""
        again, latest = Again(key, self.patience_s), failed
        while True:
            await asyncio.sleep(again.pause_s(latest))
            data = request_bytes("POST", path, query, body, key=key, recall=True)
            try:
                async with await self._exchange(data) as reply:
                    return [event_of(line) async for line in reply.lines()]
            except NotFound:
                raise failed from None
            except DaemonAway as exc:
                latest = exc

    async def lines(
        self, method: str, path: str, *, body: Any = None, query: Query | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """One request whose answer is one JSON object per line. An `error` event is raised as the error it carries."""
        async with await self._answer(method, path, body, query) as reply:
            async for line in reply.lines():
                yield event_of(line)

    async def raw_lines(
        self, method: str, path: str, *, query: Query | None = None, deadline: float | None = None
    ) -> AsyncIterator[bytes]:
        """The same with undecoded lines; `event_of` decodes one. TimeoutError at the `deadline` (of time.monotonic)."""
        async with await self._answer(method, path, None, query, deadline=deadline) as reply:
            async for line in reply.lines():
                yield line

    async def pieces(self, method: str, path: str, *, query: Query | None = None) -> AsyncIterator[bytes]:
        """One request whose answer is raw bytes, in pieces."""
        async with await self._answer(method, path, None, query) as reply:
            while data := await reply.read_some():
                yield data

    async def frames(
        self, method: str, path: str, *, query: Query | None = None
    ) -> AsyncIterator[bytes | dict[str, Any]]:
        """One request whose answer is raw bytes with events in between, as `Transport.frames`."""
        async with await self._answer(method, path, None, query) as reply:
            async for frame in reply.frames():
                yield frame

    async def upload(
        self, path: str, source: UploadSource, *, query: Query | None = None, key: str | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """One POST whose body is what `source` gives, as `Transport.upload`. A thread reads
        files."""
        async with await self._begin(path, query, BYTES, key) as reply:
            sending = asyncio.create_task(_send_all(reply, source))
            try:
                await reply.accepted()
                async for line in reply.lines():
                    yield event_of(line)
            except DaemonUnavailable:
                if sending.done() and not sending.cancelled() and (failed := sending.exception()) is not None:
                    raise failed from None
                raise
            finally:
                await _end(sending)

    async def converse(
        self, path: str, first: Any, *, query: Query | None = None, key: str | None = None
    ) -> AsyncConversation:
        """One POST that goes on while it is answered: JSON objects, one per line, to both sides. `first` is sent at
        once."""
        data = line_bytes(first)
        conversation = AsyncConversation(await self._begin(path, query, LINES, key))
        await conversation.say(data)
        return conversation

    async def carry(self, path: str) -> AsyncConversation:
        """One POST that goes on while it is answered: raw bytes to the daemon, and `wire.FRAMES` back."""
        return AsyncConversation(await self._begin(path, None, BYTES))

    async def _begin(
        self, path: str, query: Query | None, content_type: str, key: str | None = None
    ) -> AsyncDaemonReply:
        """Send the head of a POST whose body comes in chunks."""
        reply = await self._connect()
        await reply.send(begin_bytes(path, query, content_type, key))
        return reply

    async def _answer(
        self,
        method: str,
        path: str,
        body: Any,
        query: Query | None,
        key: str | None = None,
        deadline: float | None = None,
    ) -> AsyncDaemonReply:
        """Send a request, and return its answer when its head is there. TimeoutError at the deadline."""
        data = request_bytes(method, path, query, body, key=key)
        for _ in range(DYING_TRIES if method == "GET" and self.start is not None else 0):
            try:  # nothing was asked to change: ask the successor of a daemon that was dying
                return await self._exchange(data, deadline)
            except DaemonAway:
                continue
        return await self._exchange(data, deadline)

    async def _exchange(self, data: bytes, deadline: float | None = None) -> AsyncDaemonReply:
        reply = await self._connect()
        reply.deadline = deadline
        try:
            await reply.send(data)
            return await reply.accepted()
        except BaseException:
            reply.close()
            raise

    async def _connect(self) -> AsyncDaemonReply:
        try:
            return AsyncDaemonReply(await self._open())
        except OSError as exc:
            error = unreachable(exc, self.socket_path)
            if self.start is None or not isinstance(error, DaemonUnavailable):
                raise error from exc
        await apart(self.start)
        try:
            return AsyncDaemonReply(await self._open())
        except OSError as exc:
            raise unreachable(exc, self.socket_path) from exc

    async def _open(self) -> socket.socket:
        """A new connection."""
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        opened.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(opened, str(self.socket_path))
        except BaseException:
            opened.close()
            raise
        return opened


class AsyncDaemonReply:
    """A connection with one request and its answer. Used as a context manager, or closed when no task uses it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._answer = HttpAnswer()
        self._body = b""
        """Bytes of the body that came with the head."""
        self.deadline: float | None = None
        """Receiving raises TimeoutError from then on (time.monotonic, which is the loop's clock)."""

    async def send(self, data: bytes) -> bool:
        """Send a part of the request. False when the daemon does not listen any more: its answer says why."""
        try:
            await asyncio.get_running_loop().sock_sendall(self._connection, data)
        except OSError:
            return False
        return True

    async def accepted(self) -> Self:
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
        pieces = []
        while data := await self.read_some():
            pieces.append(data)
        return b"".join(pieces)

    async def lines(self) -> AsyncGenerator[bytes, None]:
        lines = LineSplitter()
        while data := await self.read_some():
            for line in lines.feed(data):
                yield line
        if lines.rest:
            raise lost()

    async def frames(self) -> AsyncGenerator[bytes | dict[str, Any], None]:
        frames = FrameSplitter()
        while not frames.ended:
            data = await self.read_some()
            if not data:
                raise lost()
            for frame in frames.feed(data):
                yield frame

    async def _receive(self) -> bytes:
        try:
            async with asyncio.timeout_at(self.deadline):
                data = await asyncio.get_running_loop().sock_recv(self._connection, READ_BYTES)
        except ConnectionError as exc:
            raise lost() from exc
        return self._answer.feed(data)

    def break_off(self) -> None:
        """End the connection for both sides."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class AsyncConversation:
    """One request that goes on while it is answered. Used as a context manager; `say` and `send` from any task."""

    def __init__(self, reply: AsyncDaemonReply) -> None:
        self._reply = reply
        self._saying = asyncio.Lock()

    async def say(self, line: bytes) -> None:
        """Send one line. Not an error when the daemon does not listen any more: its answer says why."""
        await self.send(line + b"\n")

    async def send(self, data: bytes) -> None:
        """Send some bytes, or none: the end. Not an error, as `say`."""
        async with self._saying:
            await self._reply.send(chunk_bytes(data))

    async def accepted(self) -> None:
        """Wait for the answer's beginning. Its error is raised, if it is one."""
        await self._reply.accepted()

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The answer, line by line. An `error` event is raised as the error it carries."""
        await self._reply.accepted()
        async for line in self._reply.lines():
            yield event_of(line)

    async def frames(self) -> AsyncIterator[bytes | dict[str, Any]]:
        """The answer, as `AsyncTransport.frames`."""
        await self._reply.accepted()
        async for frame in self._reply.frames():
            yield frame

    def break_off(self) -> None:
        """End the connection for both sides."""
        self._reply.break_off()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.break_off()
        async with self._saying:
            self._reply.close()


async def _send_all(reply: AsyncDaemonReply, source: UploadSource) -> None:
    data = b"-"
    while data:
        try:
            data = source.read(UPLOAD_BYTES) if source.in_memory else await apart(source.read, UPLOAD_BYTES)
        except Exception:
            reply.break_off()
            raise
        if not await reply.send(chunk_bytes(data)):
            return


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait until it has ended, however it ends."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()  # taken: asyncio reports one that nobody has looked at
