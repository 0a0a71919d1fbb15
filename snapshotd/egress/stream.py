"""One end of a connection, with deadlines; and the copying between two."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Coroutine

from snapshotd.egress.base import (
    CHUNK_BYTES,
    CONNECT_DEADLINE_S,
    HEAD_DEADLINE_S,
    IDLE_DEADLINE_S,
    MOST_PIECES,
    NotAllowed,
)
from snapshotd.egress.buffers import Buffers
from snapshotd.network import Address

_NO_LINGER = struct.pack("ii", 1, 0)
_PLAIN_CHUNK_BYTES = 65_536


class Stream:
    """A connected socket that belongs to one connection. Every method may raise OSError; TimeoutError is one."""

    def __init__(self, sock: socket.socket, buffers: Buffers) -> None:
        """`buffers`: has what was received last, until something is received again."""
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # it has ended already
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock, self._loop = sock, asyncio.get_running_loop()
        self._buffers, self._held = buffers, 0
        size = buffers.open()
        if size is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)

    async def receive(self, most: int = _PLAIN_CHUNK_BYTES, deadline_s: float = IDLE_DEADLINE_S) -> bytes:
        """Some bytes; none: the other side says no more. The caller has used up what it received before."""
        self._let_go()
        async with asyncio.timeout(deadline_s):
            data = await self._loop.sock_recv(self._sock, self._buffers.share(most))
        self._hold(len(data))
        return data

    def head(self) -> HeadReader:
        """Collects the first words of the other side, from now on."""
        self._let_go()
        return HeadReader(self)

    def _hold(self, count: int) -> None:
        self._held += count
        self._buffers.hold(count)

    def _let_go(self) -> None:
        self._hold(-self._held)

    async def send(self, data: bytes | memoryview) -> None:
        """Send all of the data."""
        async with asyncio.timeout(IDLE_DEADLINE_S):
            await self._loop.sock_sendall(self._sock, data)

    async def spoke(self) -> None:
        """Return when something can be received, or the other side says no more; nothing is taken."""
        while True:
            with contextlib.suppress(BlockingIOError):
                self._sock.recv(1, socket.MSG_PEEK)
                return
            readable = self._loop.create_future()
            self._loop.add_reader(self._sock, _resolve, readable)
            try:
                await readable
            finally:
                self._loop.remove_reader(self._sock)

    async def copy_to(self, other: Stream) -> None:
        """Copy everything that comes to `other`, until this side says no more; then tell `other` so."""
        while data := await self.receive(CHUNK_BYTES):
            await other.send(data)
        with contextlib.suppress(OSError):  # it has ended already
            other._sock.shutdown(socket.SHUT_WR)

    def close(self, *, abruptly: bool = False) -> None:
        """End the connection, if it has not ended; abruptly, so that the other side sees a reset and no end."""
        if self._sock.fileno() < 0:
            return
        self._buffers.close()
        if abruptly:
            with contextlib.suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self._sock.close()
        self._let_go()


class HeadReader:
    """Collects first words, such as the head of a request. NotAllowed: they come in too many pieces, or there is no memory for
    more of them. TimeoutError: they take too long."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._left = stream, MOST_PIECES
        self._until = asyncio.get_running_loop().time() + HEAD_DEADLINE_S

    async def receive(self) -> bytes:
        """As `Stream.receive`, and what was received before is still held."""
        self._left -= 1
        if self._left < 0:
            raise NotAllowed("its first words come in too many pieces")
        stream = self._stream
        stream._buffers.check()
        async with asyncio.timeout_at(self._until):
            data = await stream._loop.sock_recv(stream._sock, stream._buffers.share(_PLAIN_CHUNK_BYTES))
        stream._hold(len(data))
        return data


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def connect(address: Address, port: int, buffers: Buffers) -> Stream:
    """A connection of this machine to an address. OSError."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    stream = Stream(sock, buffers)
    try:
        async with asyncio.timeout(CONNECT_DEADLINE_S):
            await asyncio.get_running_loop().sock_connect(sock, (str(address), port))
        return stream
    except BaseException:
        stream.close()
        raise


async def copy_both(one: Stream, other: Stream) -> None:
    """Copy in both directions, until both sides say no more. OSError: one has ended before."""
    await together(one.copy_to(other), other.copy_to(one))


async def together(*works: Coroutine[object, object, None]) -> None:
    """Run several coroutines at once. The first error ends the others, and is raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
