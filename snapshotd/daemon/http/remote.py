"""Connections from other machines: taken one by one within bounds, so that no flood of them reaches the event loop, and
read within bounds of size and time. The gate asks each request for its token.

    accept (paced) -> the address's share -> handshake (10 s) -> head (10 s, 32 KiB) -> token -> body (60 s)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from snapshotd.daemon.access.limits import (
    ACCEPTS_PER_S,
    ADDRESS_BURST,
    ADDRESS_MAX,
    ADDRESS_PER_S,
    CONNECTIONS_MAX,
    HANDSHAKE_S,
    HEAD_MAX_BYTES,
    HEAD_S,
    SILENCE_S,
    Pace,
    Shares,
    share_of,
)
from snapshotd.daemon.http.peer import PEER_PID, PEER_TRANSPORT
from snapshotd.errors import LimitExceeded

log = logging.getLogger("snapshotd.daemon")
_FULL_S = 0.1
"""Pause where the process has no descriptor or memory left for a connection."""


class RemoteProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol for a connection whose other end nobody knows yet. `on_lost` is called at its end."""

    def __init__(self, *args: Any, on_lost: Callable[[], object], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._on_lost = on_lost
        self._head_bytes = 0
        self._in_head = True
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.app_state = {**self.app_state, PEER_PID: 0, PEER_TRANSPORT: transport}
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)
        self._on_lost()

    def data_received(self, data: bytes) -> None:
        while data and self._in_head and not self.transport.is_closing():
            if self._head_timer is None:
                self._begin_head()
            room = HEAD_MAX_BYTES - self._head_bytes
            piece, data = data[:room], data[room:]
            self._head_bytes += len(piece)
            super().data_received(piece)
            if self._in_head and self._head_bytes >= HEAD_MAX_BYTES:
                failure = LimitExceeded(f"the head of the request is larger than {HEAD_MAX_BYTES >> 10} KiB")
                self._refuse(b"431 Request Header Fields Too Large", failure)
        if data and not self.transport.is_closing():
            super().data_received(data)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._end_head()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head, self._head_bytes = True, 0

    def _begin_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self._give_up)

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        """No head has come in time."""
        self.transport.abort()

    def _refuse(self, status: bytes, failure: LimitExceeded) -> None:
        body = json.dumps(failure.as_json()).encode()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(b"HTTP/1.1 " + status + b"\r\n" + head + body)
        self.transport.close()


class RemoteListener:
    """Takes connections from a listening socket, in the event loop. `make` gets the callback for the connection's end."""

    def __init__(
        self,
        listener: socket.socket,
        tls: ssl.SSLContext | None,
        make: Callable[[Callable[[], object]], RemoteProtocol],
    ) -> None:
        self._listener, self._tls, self._make = listener, tls, make
        self._pace = Pace(ACCEPTS_PER_S, ACCEPTS_PER_S)
        self._shares = Shares(ADDRESS_MAX, ADDRESS_PER_S, ADDRESS_BURST)
        self._open = 0
        self._handshakes: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Take no more connections. All that are open stay."""
        self._listener.close()
        tasks = [self._task, *self._handshakes]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self._listener)
            except OSError as exc:
                log.warning("a connection cannot be taken: %s", exc)
                await asyncio.sleep(_FULL_S)
                continue
            self._take(connection, share_of(address[0]))
            await asyncio.sleep(self._pace.take())

    def _take(self, connection: socket.socket, share: str) -> None:
        if self._open >= CONNECTIONS_MAX or not self._shares.enter(share):
            connection.close()
            return
        self._open += 1
        ended = False

        def end() -> None:
            nonlocal ended
            if not ended:
                ended = True
                self._open -= 1
                self._shares.leave(share)

        task = asyncio.create_task(self._begin(connection, end))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _begin(self, connection: socket.socket, end: Callable[[], object]) -> None:
        try:
            _watch_over(connection)
            options: dict[str, Any] = {} if self._tls is None else {"ssl_handshake_timeout": HANDSHAKE_S}
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._make(end), connection, ssl=self._tls, **options
            )
        except (OSError, asyncio.CancelledError) as exc:  # no TLS, or not in time: nothing that a log should keep
            connection.close()
            end()
            if isinstance(exc, asyncio.CancelledError):
                raise
        except BaseException:
            end()
            raise


def _watch_over(connection: socket.socket) -> None:
    """Have the kernel notice that the other end is gone, or takes nothing."""
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENCE_S * 1000))
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
