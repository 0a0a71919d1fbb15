"""The ground that both clients stand on: connections, pauses and work at the side. `ThreadLinks` blocks the thread that
calls it; `aio/links.py` is the same for asyncio."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, ParamSpec, Protocol, TypeVar

from snapshotd.client.exchange import READ_BYTES
from snapshotd.client.twofold import run
from snapshotd.errors import NotPermitted

P = ParamSpec("P")
R = TypeVar("R")
_PEER = struct.Struct("=iII")
"""struct ucred: process, user and group (unix(7))."""


class ByteLink(Protocol):
    """A connected socket. One may send while another receives."""

    deadline: float | None
    """Sending and receiving raise TimeoutError from then on (of time.monotonic)."""

    async def send(self, data: bytes) -> None:
        """Send all of it; pieces of several senders do not mix. OSError."""

    async def receive(self) -> bytes:
        """The next bytes; nothing at the end. OSError."""

    def break_off(self) -> None:
        """End it for both sides; from any thread."""

    def close(self) -> None:
        """Give it up, where no other thread uses it."""

    async def finish(self) -> None:
        """Close it when nobody sends any more."""


class SideTask(Protocol):
    """Work at the side."""

    failure: BaseException | None
    """The error that it ended with."""

    async def end(self, wait_s: float | None) -> bool:
        """Make it end, where that is possible; else wait until it has, for `wait_s` seconds at most. True if it has ended."""


class Room(Protocol):
    """The number of bytes that may still be sent."""

    async def add(self, count: int) -> None: ...

    async def take(self, count: int) -> None:
        """Wait until `count` bytes may be sent, and count them as sent."""


class Links(Protocol):
    """The ways of one client."""

    async def connect(self, path: str) -> ByteLink:
        """To a unix socket. OSError."""

    def adopt(self, connected: socket.socket) -> ByteLink:
        """A connection over a socket that is connected."""

    async def accept(self, listener: socket.socket) -> socket.socket:
        """The next connection to a listening socket. OSError."""

    async def pause(self, seconds: float) -> None: ...

    async def apart(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The result of work that blocks."""

    def begin(
        self, work: Callable[[], Coroutine[Any, Any, None]], name: str, on_failure: Callable[[], object]
    ) -> SideTask:
        """Begin work at the side. `on_failure` is called once it has failed, and its `failure` is there."""

    def room(self, count: int) -> Room: ...

    def mutex(self) -> AbstractAsyncContextManager[object]:
        """A lock."""


class ThreadLink:
    """A connection whose methods block."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._sending = threading.Lock()
        self.deadline: float | None = None

    async def send(self, data: bytes) -> None:
        with self._sending:
            self._limit()
            self._socket.sendall(data)

    async def receive(self) -> bytes:
        self._limit()
        return self._socket.recv(READ_BYTES)

    def _limit(self) -> None:
        if self.deadline is not None:
            self._socket.settimeout(max(self.deadline - time.monotonic(), 1e-3))

    def break_off(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    async def finish(self) -> None:
        with self._sending:
            self.close()


class _Thread:
    def __init__(
        self, work: Callable[[], Coroutine[Any, Any, None]], name: str, on_failure: Callable[[], object]
    ) -> None:
        self.failure: BaseException | None = None
        self._work, self._on_failure = work, on_failure
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            run(self._work())
        except BaseException as exc:  # noqa: BLE001 - raised again by whoever began the work
            self.failure = exc
            self._on_failure()

    async def end(self, wait_s: float | None) -> bool:
        self._thread.join(wait_s)
        return not self._thread.is_alive()


class _ThreadRoom:
    def __init__(self, count: int) -> None:
        self._count = count
        self._changed = threading.Condition()

    async def add(self, count: int) -> None:
        with self._changed:
            self._count += count
            self._changed.notify()

    async def take(self, count: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._count >= count)
            self._count -= count


class _ThreadMutex:
    def __init__(self) -> None:
        self._lock = threading.Lock()

    async def __aenter__(self) -> None:
        self._lock.acquire()

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()


def check_listener(connected: socket.socket, path: str) -> None:
    """Before anything is sent: NotPermitted if a program of another user listens at a socket, who may have been first at a
    place that every user can write to. Root's daemon may; and root, whose own places are closed to others, has named any
    other itself."""
    _, owner, _ = _PEER.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    user = os.geteuid()
    if user != 0 and owner not in (0, user):
        raise NotPermitted(
            f"a program of user {owner} listens at {path}, so user {user} was not connected, and nothing was sent: name the socket of "
            "a daemon of your own, or set XDG_RUNTIME_DIR to a directory of this user's own"
        )


class ThreadLinks:
    """Everything blocks the thread that calls it, and work at the side has a thread of its own."""

    async def connect(self, path: str) -> ByteLink:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.connect(path)
            check_listener(connected, path)
        except BaseException:
            connected.close()
            raise
        return ThreadLink(connected)

    def adopt(self, connected: socket.socket) -> ByteLink:
        return ThreadLink(connected)

    async def accept(self, listener: socket.socket) -> socket.socket:
        return listener.accept()[0]

    async def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    async def apart(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return work(*args, **kwargs)

    def begin(
        self, work: Callable[[], Coroutine[Any, Any, None]], name: str, on_failure: Callable[[], object]
    ) -> SideTask:
        return _Thread(work, name, on_failure)

    def room(self, count: int) -> Room:
        return _ThreadRoom(count)

    def mutex(self) -> AbstractAsyncContextManager[object]:
        return _ThreadMutex()
