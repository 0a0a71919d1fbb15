"""Answers that come piece by piece: a thread of its own produces them, the event loop sends them.

Such a producer may block for hours in the engine (a long command, a followed run), so it never takes a thread of the pool that
serves ordinary requests. At most `QUEUE_BYTES` wait between the two; a slow client slows the producer down.
When the client goes away `Sender.send` says so: an exec goes on without it (never half a call), everything else stops.
"""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse

from snapshotd.daemon.failures import error_json, failure_of
from snapshotd.errors import LimitExceeded, SnapshotdError

QUEUE_BYTES = 1 << 20
STREAMS_MAX = 1024
"""Open streams at once. Each is a thread; 256 commands and as many followers with room to spare."""
NDJSON = "application/x-ndjson"
BYTES = "application/octet-stream"


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

    # -- the producer's side -----------------------------------------------------------------------------------------------

    def send(self, data: bytes) -> bool:
        """Queue `data`; blocks while the queue is full. False when the client is gone (the data is dropped)."""
        with self._changed:
            while self._bytes >= QUEUE_BYTES and not self._gone:
                self._changed.wait()
            if self._gone:
                return False
            self._items.append(data)
            self._bytes += len(data)
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
            pass  # the loop is closed: the daemon has ended, and nobody reads any more

    # -- the event loop's side ---------------------------------------------------------------------------------------------

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
    """Counts open streams."""

    def __init__(self, most: int = STREAMS_MAX) -> None:
        self._slots = threading.BoundedSemaphore(most)
        self._most = most

    def start(self, body: Callable[[], None]) -> None:
        """Run `body` in a thread. LimitExceeded when too many run."""
        if not self._slots.acquire(blocking=False):
            raise LimitExceeded(f"{self._most} streams (commands and followers) are open already; end one and try again")
        try:
            threading.Thread(target=self._run, args=(body,), name="stream", daemon=True).start()
        except RuntimeError as exc:
            self._slots.release()
            raise LimitExceeded(f"no more threads can be started ({exc}); raise the daemon's task limit or try again later") from exc

    def _run(self, body: Callable[[], None]) -> None:
        try:
            body()
        finally:
            self._slots.release()


Emit = Callable[[dict[str, Any]], bool]
"""Sends one JSON object; False when the client is gone."""


async def ndjson(limit: StreamLimit, produce: Callable[[Emit], None]) -> Response:
    """Answer with one JSON object per line. A failure before the first is an ordinary error answer; later, an `error` event."""
    channel = Channel()

    def emit(event: dict[str, Any]) -> bool:
        return channel.send(json.dumps(event, separators=(",", ":")).encode() + b"\n")

    def body() -> None:
        channel.end(_failure_of_producer(lambda: produce(emit)))

    limit.start(body)
    failure = await _first(channel)
    if failure is not None:
        return _error_response(failure)

    async def lines() -> AsyncIterator[bytes]:
        try:
            async for data in channel.pieces():
                yield data
        except SnapshotdError as exc:
            yield json.dumps({"event": "error", **error_json(exc)}).encode() + b"\n"
        finally:
            channel.close()

    return StreamingResponse(lines(), media_type=NDJSON)


async def octets(limit: StreamLimit, produce: Callable[[], Iterable[bytes]]) -> Response:
    """Answer with raw bytes. A failure before the first byte is an ordinary error answer; later, the answer breaks off
    without its end mark, which every HTTP client reports, and the log says why."""
    channel = Channel()

    def push() -> None:
        for piece in produce():
            if piece and not channel.send(piece):
                raise ClientGone

    def body() -> None:
        channel.end(_failure_of_producer(push))

    limit.start(body)
    failure = await _first(channel)
    if failure is not None:
        return _error_response(failure)

    async def data() -> AsyncIterator[bytes]:
        try:
            async for piece in channel.pieces():
                yield piece
        finally:
            channel.close()

    return StreamingResponse(data(), media_type=BYTES)


async def _first(channel: Channel) -> SnapshotdError | None:
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


def _error_response(failure: SnapshotdError) -> Response:
    return JSONResponse(error_json(failure), status_code=failure.http_status)


def output_event(stream: str, data: bytes) -> dict[str, Any]:
    return {"event": "output", "stream": stream, "data_b64": base64.b64encode(data).decode()}


def require(sent: bool) -> None:
    """For producers that are pointless without their client."""
    if not sent:
        raise ClientGone


def each(emit: Emit, items: Iterator[dict[str, Any]]) -> None:
    """Send every item; stop when the client is gone."""
    for item in items:
        require(emit(item))
