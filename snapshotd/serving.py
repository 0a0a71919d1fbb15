"""Servers on TCP share the socket that they listen on, the time that a request's head may take, the room for connections
without a request, and uvicorn's settings. The daemon's own socket is daemon/server.py's; it ends as these do."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from snapshotd.errors import Conflict
from snapshotd.kernel.processes import allow_files

LOOPBACK = "127.0.0.1"
HEAD_S = 10.0
"""Time for the head of a request, which anybody who can connect may send."""
IDLE_S = 360
"""Time for which a connection without a request stays open: longer than a client keeps one for its next request (E2B's:
300 s), since a request that crosses the server's end of the connection is lost."""
_ENDED_LOOK_S = 0.005
"""Time between two looks whether the last connection of a server that ends has ended."""
_BACKLOG = 1024
_OPEN_FILES = 16384
"""Open files that a server asks the system for. Its connections take half of what it gets, at most."""


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens at an address of this machine: 0.0.0.0 and :: are all, port 0 is any free one. OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def listen_on(port: int, host: str = LOOPBACK) -> socket.socket:
    """As `bind`. Conflict: the address cannot be had."""
    try:
        return bind(host, port)
    except OSError as exc:
        other = "port" if host == LOOPBACK else "address or port"
        raise Conflict(f"{host}:{port} cannot be listened on ({exc.strerror}); choose another {other}") from exc


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP protocol that bounds the head of a request (h11 its size, this its time) and the time between two.

    Anybody who can connect can keep connections open. So with three quarters of `limit_concurrency`, or of half the files that this
    process may have, a further connection ends those that have waited longest for a request: several, so that a flood costs
    little. Requests under way go on.
    """

    _deadline: asyncio.TimerHandle | None = None
    _since = 0.0
    """When the wait for a request began."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        self._begin_head()
        if len(self.connections) > self._most_open():
            waiting = [one for one in self.connections if isinstance(one, BoundedProtocol) and one._waits()]
            for one in sorted(waiting, key=lambda one: one._since)[: len(waiting) // 16 + 1]:
                one.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._waits():
            self._end_head()
        elif self._deadline is None:
            self._begin_head()

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        self.timeout_keep_alive = IDLE_S
        super().on_response_complete()

    def _waits(self) -> bool:
        """No request is under way: its head has not come, or its answer is complete, and perhaps some of its body has not come."""
        if self.transport.is_closing() or self.transport.get_protocol() is not self:  # it is a WebSocket's by now
            return False
        return self.conn.their_state is h11.IDLE or (self.cycle is not None and self.cycle.response_complete)

    def _most_open(self) -> int:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return min(self.limit_concurrency or files, files // 2) * 3 // 4

    def _begin_head(self) -> None:
        self._deadline = self.loop.call_later(HEAD_S, self.transport.abort)

    def _end_head(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class PromptServer(uvicorn.Server):
    """Ends when it is told to and the last answer is sent. uvicorn's own methods wake ten times a second to look whether
    they are told, and wait for a tenth of a second, twice, while they end."""

    _loop: asyncio.AbstractEventLoop | None = None
    _told: asyncio.Event

    def stop_soon(self) -> None:
        """End `run` soon. From any thread; idempotent."""
        self.should_exit = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._told.set)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self.stop_soon()

    async def main_loop(self) -> None:
        self._told = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        while not await self.on_tick(0):  # the date of answers is a second's
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self._told.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listening in (*self.servers, *(sockets or ())):
            listening.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while (self.server_state.connections or self.server_state.tasks) and not self.force_exit:
                    await asyncio.sleep(_ENDED_LOOK_S)
        except TimeoutError:
            for task in self.server_state.tasks:
                task.cancel()
        if not self.force_exit:
            await self.lifespan.shutdown()


class HttpServer(PromptServer):
    """Serves an application, and names neither itself nor what it was asked for."""

    def __init__(self, app: ASGIApp, *, on_stop: Callable[[], object] = bool, **settings: Any) -> None:
        """`on_stop` is called before connections end. `settings`: further ones of `uvicorn.Config`."""
        shared: dict[str, Any] = {
            "lifespan": "on",
            "log_level": "warning",
            "access_log": False,
            "server_header": False,
            "proxy_headers": False,
            "http": BoundedProtocol,
            "timeout_graceful_shutdown": 1,
        }
        super().__init__(uvicorn.Config(app, **shared | settings))
        allow_files(_OPEN_FILES)
        self._on_stop = on_stop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stop()
        await super().shutdown(sockets)
