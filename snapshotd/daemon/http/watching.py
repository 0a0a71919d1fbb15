"""The events of `GET /watch`. The engine calls from the thread in which something happens; that wakes the event loop, which
writes the event once and puts it into the queue of each client. So a client costs no thread, and an agent's step no more with
five hundred clients than with one.

A client that does not keep up loses the oldest and is told their number: it reads anew what it shows. The daemon notices
within `ALIVE_S` that a client is gone, because it writes a line that often even without events.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable

import anyio

from snapshotd.daemon.http.encoding import json_bytes, run_event
from snapshotd.engine.base import Event
from snapshotd.engine.engine import Engine
from snapshotd.errors import LimitExceeded
from snapshotd.types import TrajectoryID

log = logging.getLogger("snapshotd.daemon")

ALIVE_S = 5.0
KEPT_MAX = 1000
"""Events that wait for one client ..."""
KEPT_BYTES = 4 << 20
"""... and their bytes, but for the newest one."""
WATCHERS_MAX = 2048


class _Watcher:
    """One client's queue. In the event loop alone."""

    def __init__(self, tenant: str | None) -> None:
        """`tenant`: the client hears of its trajectories; None: of all."""
        self.tenant = tenant
        self.arrived = asyncio.Event()
        self._lines: deque[bytes] = deque()
        self._bytes = self._lost = 0

    def put(self, line: bytes) -> None:
        self._lines.append(line)
        self._bytes += len(line)
        while len(self._lines) > KEPT_MAX or (self._bytes > KEPT_BYTES and len(self._lines) > 1):
            self._bytes -= len(self._lines.popleft())
            self._lost += 1
        self.arrived.set()

    def take(self) -> bytes:
        """All that waits; first, how many are missing before it."""
        lost = _line({"event": "lost", "count": self._lost}) if self._lost else b""
        ready = lost + b"".join(self._lines)
        self._lines.clear()
        self._bytes = self._lost = 0
        self.arrived.clear()
        return ready


class Watchers:
    """The clients that watch one engine. All but `close` in the event loop."""

    def __init__(self) -> None:
        self._watchers: set[_Watcher] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: Callable[[], None] = lambda: None
        self._closed = False
        self._owners: _Owners | None = None

    def count(self) -> int:
        """Number of clients."""
        return len(self._watchers)

    async def watch(self, engine: Engine, tenant: str | None = None) -> AsyncIterator[bytes]:
        """Lines of events from now on, of a tenant's trajectories (None: of all): `watching` first, `alive` when nothing
        happened for a while, `lost` (with `count`) where some are missing. Ends when the daemon does. LimitExceeded."""
        if len(self._watchers) >= WATCHERS_MAX:
            raise LimitExceeded(f"{WATCHERS_MAX} clients watch already; end one and try again")
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._owners = owners = _Owners(engine)
            self._end = engine.life.listen(lambda event: self._tell(owners, event))
        if tenant is not None:
            assert self._owners is not None
            await anyio.to_thread.run_sync(self._owners.learn, tenant)
        watcher = _Watcher(tenant)
        self._watchers.add(watcher)
        return self._lines(watcher)

    def close(self) -> None:
        """Nothing more will come. From any thread; idempotent."""
        self._end()
        self._closed = True
        self._wake(self._wake_all)

    async def _lines(self, watcher: _Watcher) -> AsyncIterator[bytes]:
        try:
            yield _line({"event": "watching"})
            while True:
                try:
                    async with asyncio.timeout(ALIVE_S):
                        if not self._closed:
                            await watcher.arrived.wait()
                except TimeoutError:
                    yield _line({"event": "alive"})
                    continue
                ready = watcher.take()
                if not ready and self._closed:
                    return
                yield ready
        finally:
            self._watchers.discard(watcher)

    def _tell(self, owners: _Owners, event: Event) -> None:
        """In the thread in which it happened."""
        if self._watchers:
            owner = owners.owner(event)
            self._wake(lambda: self._put(event, owner))

    def _wake(self, action: Callable[[], object]) -> None:
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(action)
        except RuntimeError:
            pass  # the loop is closed: no client reads any more

    def _put(self, event: Event, owner: str | None) -> None:
        try:
            line = _line(run_event(event))
        except Exception:
            log.exception("an event cannot be written")
            return
        for watcher in self._watchers:
            if watcher.tenant in (None, owner):
                watcher.put(line)

    def _wake_all(self) -> None:
        for watcher in self._watchers:
            watcher.arrived.set()


class _Owners:
    """The tenants of trajectories, those that were removed since somebody watched among them. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._owners: dict[str, str | None] = {}
        self._tenants: frozenset[str] = frozenset()

    def learn(self, tenant: str) -> None:
        """Know the trajectories of a tenant, from now on."""
        self._tenants |= {tenant}
        self._owners.update(dict.fromkeys(self._engine.snapshots.of_tenant(tenant), tenant))

    def owner(self, event: Event) -> str | None:
        """The tenant whose trajectory an event is about, if somebody of it has ever watched."""
        trajectory = str(event.get("trajectory", ""))
        if not self._tenants:
            return None
        if trajectory not in self._owners:
            known = TrajectoryID(trajectory)
            found = (tenant for tenant in self._tenants if self._engine.snapshots.of_tenant(tenant, known))
            self._owners[trajectory] = next(found, None)
        return self._owners[trajectory]


def _line(event: Event) -> bytes:
    return json_bytes(event) + b"\n"
