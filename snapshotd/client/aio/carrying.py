"""Local addresses that reach servers inside sandboxes, for asyncio. `snapshotd/client/ports.py` is the same for
threads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from types import TracebackType
from typing import Self

from snapshotd.api.wire import PORT_CONNECTIONS_MAX
from snapshotd.client.aio.transport import AsyncConversation, AsyncTransport
from snapshotd.client.ports import AGAIN_S, PIECE_BYTES, RESET, OnFailure
from snapshotd.errors import DaemonUnavailable, LimitExceeded, SnapshotdError


class AsyncPort:
    """An open local address. Used as a context manager, or `close`; connections to it are cut then.

    `address` is 127.0.0.1:NUMBER or the path of a unix socket; `number` is None with that.
    """

    def __init__(self, transport: AsyncTransport, path: str, listener: socket.socket, on_failure: OnFailure) -> None:
        self._transport, self._path, self._listener, self._on_failure = transport, path, listener, on_failure
        self._open = set[asyncio.Task[None]]()
        listener.setblocking(False)
        name = listener.getsockname()
        self.number: int | None = None if isinstance(name, str) else name[1]
        self.address: str = name if isinstance(name, str) else f"{name[0]}:{name[1]}"
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Cut every connection and take the address away. Idempotent."""
        if self._accepting.cancelled():
            return
        if self.number is None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address)
        tasks = [self._accepting, *self._open]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                local, _ = await loop.sock_accept(self._listener)
            except OSError:
                # The peer has gone before it was accepted, or this process has no descriptor left: others wait.
                await asyncio.sleep(AGAIN_S)
                continue
            if len(self._open) >= PORT_CONNECTIONS_MAX:
                local.close()
                self._on_failure(
                    LimitExceeded(f"{PORT_CONNECTIONS_MAX} connections to {self.address} are open already; close some")
                )
                continue
            task = asyncio.create_task(self._carry(local))
            self._open.add(task)
            task.add_done_callback(self._open.discard)

    async def _carry(self, local: socket.socket) -> None:
        """One connection, until it ends on either side."""
        loop = asyncio.get_running_loop()
        with local:
            try:
                async with await self._transport.carry(self._path) as talk:
                    await self._exchange(loop, local, talk)
            except SnapshotdError as exc:
                self._on_failure(exc)

    async def _exchange(self, loop: asyncio.AbstractEventLoop, local: socket.socket, talk: AsyncConversation) -> None:
        await talk.accepted()
        sender = asyncio.create_task(_send(loop, local, talk))
        try:
            async for frame in talk.frames():
                if isinstance(frame, bytes):
                    await loop.sock_sendall(local, frame)
                elif frame["event"] == "end":
                    local.shutdown(socket.SHUT_WR)
        except (OSError, DaemonUnavailable, asyncio.CancelledError) as exc:
            # Cut in the sandbox or here: not an end that could be taken for that of the data.
            with contextlib.suppress(OSError):
                local.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            if isinstance(exc, asyncio.CancelledError):
                raise
        finally:
            sender.cancel()
            await asyncio.wait([sender])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def _send(loop: asyncio.AbstractEventLoop, local: socket.socket, talk: AsyncConversation) -> None:
    try:
        while data := await loop.sock_recv(local, PIECE_BYTES):
            await talk.send(data)
        await talk.send(b"")
    except OSError:
        talk.break_off()  # the peer reset its connection: so does the daemon
