"""Work that has no asynchronous form, in a thread of its own: local files, and starting a daemon."""

from __future__ import annotations

import asyncio
import socket
import threading
import weakref
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from snapshotd.client.client import Snapshotd
from snapshotd.client.exchange import answer_lost
from snapshotd.client.links import ByteLink, ThreadLinks
from snapshotd.client.transport import Transport

Params = ParamSpec("Params")
Result = TypeVar("Result")


async def apart(work: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs) -> Result:
    """The result of a call in a daemon thread. Nothing waits for the thread when the caller is cancelled: it may be
    reading a terminal."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(set_it: Callable[[], object]) -> None:
        def settle_now() -> None:
            if not future.done():
                set_it()

        try:
            loop.call_soon_threadsafe(settle_now)
        except RuntimeError:
            pass  # the loop has been closed: nobody waits

    def run() -> None:
        try:
            result = work(*args, **kwargs)
        except BaseException as exc:  # noqa: BLE001 - raised again by whoever waits
            failed = exc
            settle(lambda: future.set_exception(failed))
        else:
            settle(lambda: future.set_result(result))

    threading.Thread(target=run, name="apart", daemon=True).start()
    return await future


async def in_thread(
    way: Transport, work: Callable[Concatenate[Snapshotd, Params], Result], *args: Params.args, **kwargs: Params.kwargs
) -> Result:
    """Work with a client for threads, in a thread. When the caller is cancelled, its requests are broken off, and it ends
    as it does when the daemon goes away."""
    links = _BreakableThreads()
    transport = Transport(way.way, way.start, links=links, timeout_s=way.timeout_s, patience_s=way.patience_s)
    try:
        return await apart(work, Snapshotd._over(transport), *args, **kwargs)
    except asyncio.CancelledError:
        links.break_off()
        raise


class _BreakableThreads(ThreadLinks):
    def __init__(self) -> None:
        self._broken = False
        self._connections = weakref.WeakSet[ByteLink]()
        self._lock = threading.Lock()

    async def connect(self, path: str) -> ByteLink:
        return self._keep(await super().connect(path))

    def adopt(self, connected: socket.socket) -> ByteLink:
        return self._keep(super().adopt(connected))

    def _keep(self, opened: ByteLink) -> ByteLink:
        with self._lock:
            self._connections.add(opened)
            broken = self._broken
        if broken:
            opened.close()
            raise answer_lost()
        return opened

    def break_off(self) -> None:
        """End all connections, and let no other one come."""
        with self._lock:
            self._broken = True
            connections = list(self._connections)
        for connection in connections:
            connection.break_off()
