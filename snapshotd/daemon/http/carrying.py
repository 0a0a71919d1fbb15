"""Carries a client's connection to a server inside a sandbox: the request's body is what the client sends, the answer is
what the server sends, both as they come.

All of it runs in the event loop. Each way waits when its receiver does not take more, so a connection holds a few
buffers. A way that ends leaves the other one open. The connection is cut, and the server meets a reset, when the client
goes away before both ways have ended; the client's answer breaks off when the server resets it or the sandbox ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator

import anyio.to_thread
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from snapshotd.api.wire import FRAME_DATA, FRAME_HEADER, FRAMES, PORT_CONNECTIONS_MAX, PORT_CONNECTIONS_SHARE
from snapshotd.catalog.base import present_tenant
from snapshotd.daemon.http.peer import PEER_TRANSPORT
from snapshotd.daemon.http.streams import event_frame
from snapshotd.engine.base import Connection
from snapshotd.errors import LimitExceeded

_PIECE_BYTES = 64 << 10
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER for 0 s: close is a reset (socket(7))."""

Connect = Callable[[Callable[[], object]], Connection]
"""Connects, and calls its argument from any thread when the sandbox ends."""


class ConnectionLimit:
    """Counts the connections of all clients. A tenant has `PORT_CONNECTIONS_SHARE` of them at most; this
    machine's own callers, who are of none, have them all. In the event loop alone."""

    def __init__(self, most: int = PORT_CONNECTIONS_MAX, share: int = PORT_CONNECTIONS_SHARE) -> None:
        self._most, self._share = most, share
        self._open: Counter[str | None] = Counter()

    def take(self, tenant: str | None = None) -> Callable[[], None]:
        """Returns the function that gives the place back. LimitExceeded when all are taken."""
        most = self._most if tenant is None else self._share
        if self._open.total() >= self._most or self._open[tenant] >= most:
            raise LimitExceeded(
                f"{most} connections to ports in sandboxes are open already; close some and connect again"
            )
        self._open[tenant] += 1
        return lambda: self._give_back(tenant)

    def _give_back(self, tenant: str | None) -> None:
        self._open[tenant] -= 1
        self._open += Counter()  # forgets those that have none


class _Over(Exception):  # noqa: N818 - the end of a connection
    """The client is gone, or the sandbox."""


async def carry(request: Request, limit: ConnectionLimit, connect: Connect) -> Response:
    """Connect, and answer with what comes. Errors of `connect`; LimitExceeded."""
    give_back, over, loop = limit.take(present_tenant()), asyncio.Event(), asyncio.get_running_loop()

    def ended() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon has ended
            loop.call_soon_threadsafe(over.set)

    try:
        connection = await anyio.to_thread.run_sync(connect, ended)
    except BaseException:
        give_back()
        raise
    return _Carried(request, connection, over, give_back)


class _Carried(Response):
    def __init__(
        self, request: Request, connection: Connection, over: asyncio.Event, give_back: Callable[[], None]
    ) -> None:
        super().__init__(media_type=FRAMES)
        self._request, self._connection, self._over, self._give_back = request, connection, over, give_back

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        peer: asyncio.Transport = getattr(self._request.state, PEER_TRANSPORT)
        try:
            reader, writer = await asyncio.open_connection(sock=self._connection.socket)
            head = [(b"content-type", FRAMES.encode())]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            with _hang_up(peer, self._over):
                whole = await self._both_ways(reader, writer, send)
            if whole:
                writer.close()
                await send({"type": "http.response.body", "body": event_frame({"event": "result"})})
                return
            self._connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()
            peer.abort()
            while (await self._request.receive())["type"] != "http.disconnect":
                pass
        finally:
            self._connection.close()
            self._give_back()

    async def _both_ways(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, send: Send) -> bool:
        """False when the connection was cut before both ways had ended."""
        whole = False
        try:
            async with asyncio.TaskGroup() as tasks:
                cut = tasks.create_task(_raise_when(self._over))
                ways = [
                    tasks.create_task(_to_server(self._request, writer)),
                    tasks.create_task(_to_client(reader, send)),
                ]
                await asyncio.wait(ways)
                cut.cancel()
            whole = True
        except* (_Over, OSError, ClientDisconnect):
            pass
        return whole


async def _raise_when(over: asyncio.Event) -> None:
    await over.wait()
    raise _Over


async def _to_server(request: Request, writer: asyncio.StreamWriter) -> None:
    writer.transport.set_write_buffer_limits(0)  # so that `drain` returns when the kernel has everything
    async for piece in request.stream():
        writer.write(piece)
        await writer.drain()
    writer.write_eof()


async def _to_client(reader: asyncio.StreamReader, send: Send) -> None:
    async def say(frame: bytes) -> None:
        await send({"type": "http.response.body", "body": frame, "more_body": True})

    while data := await reader.read(_PIECE_BYTES):
        await say(FRAME_HEADER.pack(FRAME_DATA, len(data)) + data)
    await say(event_frame({"event": "end"}))


@contextlib.contextmanager
def _hang_up(peer: asyncio.Transport, over: asyncio.Event) -> Iterator[None]:
    """Inside, `over` is set when the client closes its connection. The server notices that only while it reads, and it
    does not read while the server in the sandbox does not."""
    loop = asyncio.get_running_loop()
    with select.epoll() as watch:
        try:
            connected = peer.get_extra_info("socket")
            # EPOLLHUP is always told. Over TCP it comes when both ways are closed, and no client closes one alone.
            watch.register(connected.fileno(), 0 if connected.family == socket.AF_UNIX else select.EPOLLRDHUP)
        except (OSError, ValueError):
            over.set()  # it is closed already
        loop.add_reader(watch.fileno(), over.set)
        try:
            yield
        finally:
            loop.remove_reader(watch.fileno())
