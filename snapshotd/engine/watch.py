"""Events of all trajectories for outside tools. Each watcher has a bounded queue, so a slow one holds up neither the
daemon nor other watchers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

Event = dict[str, Any]
MAX_WAITING = 1000
"""Events kept for one consumer; beyond, the oldest are lost, and it is told how many."""
_LOOK_S = 1.0


class _Subscription:
    __slots__ = ("events", "lost")

    def __init__(self) -> None:
        self.events: deque[Event] = deque()
        self.lost = 0


class Watch:
    """Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._subscriptions: list[_Subscription] = []
        self._closed = False

    def publish(self, event: Event) -> None:
        """Hand an event to every watcher. Never blocks."""
        with self._changed:
            for subscription in self._subscriptions:
                if len(subscription.events) >= MAX_WAITING:
                    subscription.events.popleft()
                    subscription.lost += 1
                subscription.events.append(event)
            self._changed.notify_all()

    def follow(self) -> Iterator[Event]:
        """Events from this call on, until the daemon ends."""
        subscription = _Subscription()
        with self._changed:
            self._subscriptions.append(subscription)
        return self._events(subscription)

    def close(self) -> None:
        """End every `follow`. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _events(self, subscription: _Subscription) -> Iterator[Event]:
        try:
            while True:
                with self._changed:
                    while not subscription.events and not self._closed:
                        self._changed.wait(_LOOK_S)
                    if not subscription.events:
                        return
                    lost, subscription.lost = subscription.lost, 0
                    event = {"event": "lost", "count": lost} if lost else subscription.events.popleft()
                yield event
        finally:
            with self._changed:
                self._subscriptions.remove(subscription)
