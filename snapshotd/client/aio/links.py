"""Connections, pauses and work at the side, for asyncio. `snapshotd/client/links.py` is the same for threads.

Every request has a connection of its own, and no thread. A request whose task is cancelled is broken off.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, ParamSpec, TypeVar

from snapshotd.client.aio.apart import apart
from snapshotd.client.exchange import READ_BYTES
from snapshotd.client.links import ByteLink, Room, SideTask, check_listener

P = ParamSpec("P")
R = TypeVar("R")


class TaskLink:
    """A connection whose methods wait on the loop."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._sending = asyncio.Lock()
        self.deadline: float | None = None
        connected.setblocking(False)

    async def send(self, data: bytes) -> None:
        async with self._sending, asyncio.timeout_at(self.deadline):
            await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def receive(self) -> bytes:
        async with asyncio.timeout_at(self.deadline):  # time.monotonic is the loop's clock
            return await asyncio.get_running_loop().sock_recv(self._socket, READ_BYTES)

    def break_off(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    async def finish(self) -> None:
        async with self._sending:
            self.close()


class _Task:
    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]], on_failure: Callable[[], object]) -> None:
        self.failure: BaseException | None = None
        self._task = asyncio.create_task(self._run(work, on_failure))

    async def _run(self, work: Callable[[], Coroutine[Any, Any, None]], on_failure: Callable[[], object]) -> None:
        try:
            await work()
        except Exception as exc:  # noqa: BLE001 - raised again by whoever began the work
            self.failure = exc
            on_failure()

    async def end(self, wait_s: float | None) -> bool:
        """`wait_s`: a task needs none, since it can be cancelled."""
        self._task.cancel()
        await asyncio.wait([self._task])
        return True


class _Room:
    def __init__(self, count: int) -> None:
        self._count = count
        self._changed = asyncio.Condition()

    async def add(self, count: int) -> None:
        async with self._changed:
            self._count += count
            self._changed.notify()

    async def take(self, count: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._count >= count)
            self._count -= count


class TaskLinks:
    """Everything waits on the running loop, and work at the side is a task."""

    async def connect(self, path: str) -> ByteLink:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connected, path)
            check_listener(connected, path)
        except BaseException:
            connected.close()
            raise
        return TaskLink(connected)

    def adopt(self, connected: socket.socket) -> ByteLink:
        return TaskLink(connected)

    async def accept(self, listener: socket.socket) -> socket.socket:
        listener.setblocking(False)
        return (await asyncio.get_running_loop().sock_accept(listener))[0]

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def apart(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await apart(work, *args, **kwargs)

    def begin(
        self, work: Callable[[], Coroutine[Any, Any, None]], name: str, on_failure: Callable[[], object]
    ) -> SideTask:
        return _Task(work, on_failure)

    def room(self, count: int) -> Room:
        return _Room(count)

    def mutex(self) -> AbstractAsyncContextManager[object]:
        return asyncio.Lock()
