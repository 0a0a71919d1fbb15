"""Events of all trajectories, for whoever listens. Each consumer that is a thread has a bounded queue, so a slow one holds up
neither the daemon nor the others."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

Event = dict[str, Any]
Listener = Callable[[Event], object]
MAX_WAITING = 1000
"""Events kept for one consumer; beyond, the oldest are lost, and it is told how many."""
_LOOK_S = 1.0


class _Subscription:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.events: deque[Event] = deque()
        self.lost = 0

    def put(self, event: Event) -> None:
        with self.changed:
            if len(self.events) >= MAX_WAITING:
                self.events.popleft()
                self.lost += 1
            self.events.append(event)
            self.changed.notify_all()


class Watch:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: tuple[Listener, ...] = ()
        self._closed = threading.Event()

    def publish(self, event: Event) -> None:
        """Hand an event to every listener. Never blocks."""
        for told in self._listeners:
            told(event)

    def listen(self, told: Listener) -> Callable[[], None]:
        """Call `told` with each event from now on, in the thread in which it happens, which may be an agent's: it must return
        at once, and not raise. Returns what ends that."""
        with self._lock:
            self._listeners = (*self._listeners, told)

        def end() -> None:
            with self._lock:
                self._listeners = tuple(one for one in self._listeners if one is not told)

        return end

    def follow(self) -> Iterator[Event]:
        """Events from this call on, until the daemon ends, for a thread of the consumer's own."""
        subscription = _Subscription()
        return self._events(subscription, self.listen(subscription.put))

    def close(self) -> None:
        """End every `follow`. Idempotent."""
        self._closed.set()

    def _events(self, subscription: _Subscription, end: Callable[[], None]) -> Iterator[Event]:
        try:
            while True:
                with subscription.changed:
                    while not subscription.events and not self._closed.is_set():
                        subscription.changed.wait(_LOOK_S)
                    if not subscription.events:
                        return
                    lost, subscription.lost = subscription.lost, 0
                    event = {"event": "lost", "count": lost} if lost else subscription.events.popleft()
                yield event
        finally:
            end()
