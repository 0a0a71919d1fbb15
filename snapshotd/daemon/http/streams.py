"""Answers that come piece by piece: a thread of its own produces them, the event loop sends them.

Such a producer may block for hours in the engine (a long command, a followed run), so it never takes a thread of the
pool that serves ordinary requests. At most `QUEUE_BYTES` wait between the two; a slow client slows the producer down.
When the client goes away `Channel.send` says so: an exec in a trajectory goes on without it (never half a call),
everything else stops.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from snapshotd.api.wire import BYTES, FRAME_DATA, FRAME_EVENT, FRAME_HEADER, FRAME_MAX_BYTES, FRAMES, LINES
from snapshotd.daemon.http.encoding import json_bytes
from snapshotd.daemon.http.failures import failure_of
from snapshotd.errors import LimitExceeded, SnapshotdError
from snapshotd.kernel import turns

QUEUE_BYTES = 1 << 20
STREAMS_MAX = 1024
"""Open streams at once. Each is a thread; 256 commands and as many followers with room to spare."""
IDLE_MAX = 16
"""Threads that wait for the next stream."""
JSON = "application/json"


class ClientGone(Exception):  # noqa: N818 - not a failure: nobody is left to be told
    """Raised in a producer whose client went away."""


class Channel:
    """A bounded queue of byte strings from one thread to the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._arrived = asyncio.Event()
        self._items: deque[bytes] = deque()
        self._bytes = 0
        self._ended = False
        self._failure: SnapshotdError | None = None
        self._gone = False

    # -- the producer's side -------------------------------------------------------------------------------------------

    def send(self, data: bytes) -> bool:
        """Queue `data`; blocks while the queue is full. False when the client is gone (the data is dropped)."""
        with self._changed:
            while self._bytes >= QUEUE_BYTES and not self._gone:
                self._changed.wait()
            if self._gone:
                return False
            first = not self._items  # else the loop has been told, and takes all that there is
            self._items.append(data)
            self._bytes += len(data)
        if first:
            self._wake()
        return True

    def end(self, failure: SnapshotdError | None = None) -> None:
        """Nothing more will come; with `failure`, because of it."""
        with self._changed:
            self._ended, self._failure = True, failure
        self._wake()

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._arrived.set)
        except RuntimeError:
            pass  # the loop is closed: the daemon has ended, and no client reads any more

    @property
    def gone(self) -> bool:
        """True once the client is."""
        return self._gone

    # -- the event loop's side -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """The client is gone, or has everything."""
        with self._changed:
            self._gone = True
            self._items.clear()
            self._bytes = 0
            self._changed.notify_all()

    async def first(self) -> SnapshotdError | None:
        """Wait for the first data or the end; the failure if it came before any data."""
        while True:
            with self._changed:
                if self._items or self._ended:
                    return None if self._items else self._failure
                self._arrived.clear()
            await self._arrived.wait()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Everything until the end. Raises the failure, if that is how it ended."""
        while True:
            with self._changed:
                data = b"".join(self._items)
                self._items.clear()
                self._bytes = 0
                ended = self._ended
                if not data and not ended:
                    self._arrived.clear()
                self._changed.notify_all()
            if data:
                yield data
            elif ended:
                break
            else:
                await self._arrived.wait()
        if self._failure is not None:
            raise self._failure


class StreamLimit:
    """Runs streams, each in a thread, and counts them. A few threads stay for the next ones: a new thread takes half a
    millisecond of a command's answer."""

    def __init__(self, most: int = STREAMS_MAX) -> None:
        self._slots = threading.BoundedSemaphore(most)
        self._most = most
        self._idle: deque[queue.SimpleQueue[Callable[[], None]]] = deque()
        """Where the threads that have nothing to do wait."""

    def start(self, body: Callable[[], None]) -> None:
        """Run `body` in a thread. LimitExceeded when too many run."""
        if not self._slots.acquire(blocking=False):
            raise LimitExceeded(
                f"{self._most} streams (commands and followers) are open already; end one and try again"
            )
        try:
            self._idle.pop().put(body)
        except IndexError:
            self._start_thread(body)

    def _start_thread(self, body: Callable[[], None]) -> None:
        try:
            threading.Thread(target=self._run, args=(body,), name="stream", daemon=True).start()
        except RuntimeError as exc:
            self._slots.release()
            raise LimitExceeded(
                f"no more threads can be started ({exc}); raise the daemon's task limit or try again later"
            ) from exc

    def _run(self, body: Callable[[], None]) -> None:
        bodies: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        while True:
            try:
                body()
            finally:
                self._slots.release()
            del body  # it holds a client's answer
            if len(self._idle) >= IDLE_MAX:
                return
            self._idle.append(bodies)
            body = bodies.get()


Emit = Callable[[Any], bool]
"""Sends one JSON object, given as such or as a value that has a record; False when the client is gone."""


Write = Callable[[bytes], None]
"""Sends raw bytes; raises ClientGone when the client is gone."""


class Emitter:
    """Sends one JSON object, as `Emit`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def __call__(self, event: Any) -> bool:
        return self._channel.send(_line(event))

    def is_heard(self) -> bool:
        """False once the client is gone."""
        return not self._channel.gone


async def ndjson(
    limit: StreamLimit,
    produce: Callable[[Emitter], None],
    *,
    uploading: bool = False,
    attend: Coroutine[None, None, None] | None = None,
) -> Response:
    """Answer with one JSON object per line. A failure before the first is an ordinary error answer; later, an `error`
    event.

    With `uploading`, the producer reads the request's body (`Upload`) while it answers. `attend` receives the client's
    lines at the same time, and ends when the client is gone.
    """
    channel = Channel()
    emit = Emitter(channel)
    beside = None if attend is None else asyncio.ensure_future(_until_gone(attend, channel))
    try:
        failure = await _begin(limit, channel, lambda: produce(emit))
    except BaseException:
        _end(beside)
        raise
    if failure is not None:
        _end(beside)
        return error_response(failure)
    answer = _Uploading if uploading or attend is not None else StreamingResponse
    return answer(_with_error_event(channel, _line, beside), media_type=LINES)


async def _until_gone(attend: Coroutine[None, None, None], channel: Channel) -> None:
    await attend
    channel.close()


def _end(beside: asyncio.Future[None] | None) -> None:
    if beside is not None:
        beside.cancel()


async def frames(limit: StreamLimit, produce: Callable[[Emit, Write], None]) -> Response:
    """Answer with raw bytes and events between them (`wire.FRAMES`). A failure before the first frame is an ordinary
    error answer; later, an `error` event."""
    channel = Channel()

    def emit(event: Any) -> bool:
        return channel.send(event_frame(event))

    def write(data: bytes) -> None:
        view = memoryview(data).cast("B")
        for at in range(0, len(view), FRAME_MAX_BYTES):
            piece = view[at : at + FRAME_MAX_BYTES]
            require(channel.send(FRAME_HEADER.pack(FRAME_DATA, len(piece)) + piece))

    failure = await _begin(limit, channel, lambda: produce(emit, write))
    if failure is not None:
        return error_response(failure)
    return StreamingResponse(_with_error_event(channel, event_frame), media_type=FRAMES)


def answer_list(items: Iterable[object]) -> Response:
    """Answer with a JSON list that may be long: item by item, since all of them at once as values of Python take five
    times the text."""
    found = []
    for item in items:
        turns.give_way()
        found.append(json_bytes(item))
    return Response(b"[" + b",".join(found) + b"]", media_type=JSON)


async def octets(limit: StreamLimit, produce: Callable[[], Iterable[bytes]]) -> Response:
    """Answer with raw bytes. A failure before the first byte is an ordinary error answer; later, the answer breaks off
    without its end mark, which every HTTP client reports, and the log says why."""
    channel = Channel()

    def push() -> None:
        for piece in produce():
            if piece and not channel.send(piece):
                raise ClientGone

    failure = await _begin(limit, channel, push)
    if failure is not None:
        return error_response(failure)

    async def data() -> AsyncIterator[bytes]:
        try:
            async for piece in channel.pieces():
                yield piece
        finally:
            channel.close()

    return StreamingResponse(data(), media_type=BYTES)


def cut(pieces: Iterable[bytes], start: int, count: int | None) -> Iterator[bytes]:
    """`count` bytes of a long text from byte `start` on; all the rest if None."""
    end = None if count is None else start + count
    at = 0
    for piece in pieces:
        yield piece[max(0, start - at) : None if end is None else max(0, end - at)]
        at += len(piece)
        if end is not None and at >= end:
            return


class Upload:
    """A request's body, read by a thread while the event loop receives it. At most a few of the server's buffers wait
    in between."""

    def __init__(self, request: Request) -> None:
        self._loop = asyncio.get_running_loop()
        self._stream = request.stream()
        self._rest = b""
        self._ended = False

    def read(self, count: int) -> bytes:
        """The next `count` bytes; fewer only at the end. From one thread. ClientGone when the client went away before
        the end."""
        parts, missing = [self._rest[:count]], count - len(self._rest[:count])
        self._rest = self._rest[count:]
        while missing and not self._ended:
            piece = self._next()
            parts.append(piece[:missing])
            self._rest = piece[missing:]
            missing -= len(parts[-1])
        return b"".join(parts)

    def _next(self) -> bytes:
        try:
            return asyncio.run_coroutine_threadsafe(self._receive(), self._loop).result()
        except (
            ClientDisconnect,
            concurrent.futures.CancelledError,
            RuntimeError,
        ) as exc:  # RuntimeError: the loop is closed
            raise ClientGone from exc

    async def _receive(self) -> bytes:
        async for piece in self._stream:
            if piece:
                return piece
        self._ended = True
        return b""


class _Uploading(StreamingResponse):
    """An answer that leaves the request's body to its reader. Starlette's own answer would read the body to notice that
    the client is gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.stream_response(send)


def _line(event: Any) -> bytes:
    return json_bytes(event) + b"\n"


def event_frame(event: Any) -> bytes:
    """An event as one of `wire.FRAMES`."""
    content = json_bytes(event)
    return FRAME_HEADER.pack(FRAME_EVENT, len(content)) + content


async def _with_error_event(
    channel: Channel, encode: Callable[[Any], bytes], beside: asyncio.Future[None] | None = None
) -> AsyncIterator[bytes]:
    try:
        async for data in channel.pieces():
            yield data
    except SnapshotdError as exc:
        yield encode({"event": "error", **exc.as_json()})
    finally:
        _end(beside)
        channel.close()


async def _begin(limit: StreamLimit, channel: Channel, produce: Callable[[], None]) -> SnapshotdError | None:
    """Start a producer and wait for its first data; the failure if that came before."""
    caller = contextvars.copy_context()  # with the tenant that it sees
    limit.start(lambda: channel.end(caller.run(_failure_of_producer, produce)))
    try:
        return await channel.first()
    except asyncio.CancelledError:
        channel.close()
        raise


def _failure_of_producer(produce: Callable[[], None]) -> SnapshotdError | None:
    """Run a producer to its end. This is the top of a request's thread: every exception becomes an answer here."""
    try:
        produce()
    except ClientGone:
        return None
    except Exception as exc:  # noqa: BLE001 - the top of a request
        return failure_of(exc)
    return None


def error_response(failure: SnapshotdError, status: int | None = None) -> Response:
    """`status`: another one than the error's own."""
    return Response(json_bytes(failure.as_json()), status or failure.http_status, media_type=JSON)


def require(sent: bool) -> None:
    """For producers that are pointless without their client."""
    if not sent:
        raise ClientGone


def each(emit: Emit, items: Iterable[Any]) -> None:
    """Send every item; stop when the client is gone."""
    for item in items:
        require(emit(item))


def listing(emit: Emit, items: Iterable[Any]) -> None:
    """The same for a list whose end is told."""
    each(emit, items)
    emit({"event": "end"})


def result(emit: Emit, name: str, value: object) -> None:
    """Send the last event of long work."""
    emit({"event": "result", name: value})


def progress_lines(emit: Emit) -> Callable[[str], None]:
    """A sink for lines of progress. That the client is gone does not end the work."""

    def progress(message: str) -> None:
        emit({"event": "progress", "message": message})

    return progress
