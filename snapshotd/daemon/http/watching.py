"""The events of `GET /watch`: one thread takes them from the engine and hands them to every client that watches.

A client that does not keep up loses the oldest and is told their number. The daemon notices within `ALIVE_S` that a
client is gone, because it writes a line that often even without events.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Generator, Iterator

from snapshotd.engine.base import Event
from snapshotd.engine.engine import Engine

log = logging.getLogger("snapshotd.daemon")

ALIVE_S = 5.0
KEPT_MAX = 1000
"""Events that wait for one client."""


class _Watcher:
    def __init__(self) -> None:
        self.events: deque[Event] = deque()
        self.lost = 0


class Watchers:
    """The clients that watch one engine. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._watchers: set[_Watcher] = set()
        self._running = False
        self._closed = False

    def watch(self, engine: Engine) -> Generator[Event, None, None]:
        """Events from now on: `watching` first, `alive` when nothing happened for a while, `lost` (with `count`) where
        some are missing. Ends when the daemon does."""
        watcher = _Watcher()
        with self._changed:
            if not self._running:
                events = engine.life.watch()
                threading.Thread(target=self._run, args=(events,), name="watch", daemon=True).start()
                self._running = True
            self._watchers.add(watcher)
        try:
            yield {"event": "watching"}
            while (ready := self._next(watcher)) is not None:
                yield from ready or [{"event": "alive"}]
        finally:
            with self._changed:
                self._watchers.discard(watcher)

    def close(self) -> None:
        """Nothing more will come."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _next(self, watcher: _Watcher) -> list[Event] | None:
        """The events that wait for a watcher; empty when none came for a while, None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: watcher.events or self._closed, timeout=ALIVE_S)
            ready = list(watcher.events)
            watcher.events.clear()
            if watcher.lost:
                ready.insert(0, {"event": "lost", "count": watcher.lost})
                watcher.lost = 0
            return None if self._closed and not ready else ready

    def _run(self, events: Iterator[Event]) -> None:
        """This is the top of a thread: a defect ends all watches, and is logged."""
        try:
            for event in events:
                with self._changed:
                    for watcher in self._watchers:
                        if len(watcher.events) == KEPT_MAX:
                            watcher.events.popleft()
                            watcher.lost += 1
                        watcher.events.append(event)
                    self._changed.notify_all()
        except Exception:
            log.exception("watching the engine failed")
        self.close()
