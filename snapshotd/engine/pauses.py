"""The pauses of sandboxes, counted: all since the daemon began, and those of the last hour by minutes. Memory does not grow."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

BOUNDS_NS = tuple(int(ms * 1e6) for ms in (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000))
"""Upper bounds of the classes; the last class has none."""
MINUTES = 60
_MINUTE_NS = 60 * 1_000_000_000


@dataclass(slots=True)
class PauseCounts:
    """Pauses by class, their sum and the longest."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_NS) + 1))
    sum_ns: int = 0
    longest_ns: int = 0

    def add(self, pause_ns: int) -> None:
        self.counts[bisect_left(BOUNDS_NS, pause_ns)] += 1
        self.sum_ns += pause_ns
        self.longest_ns = max(self.longest_ns, pause_ns)

    def copy(self) -> PauseCounts:
        return PauseCounts(list(self.counts), self.sum_ns, self.longest_ns)


class Pauses:
    """Thread-safe. `clock`: nanoseconds since the epoch."""

    def __init__(self, clock: Callable[[], int] = time.time_ns) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._all = PauseCounts()
        self._minutes: deque[tuple[int, PauseCounts]] = deque(maxlen=MINUTES)

    def add(self, pause_ns: int) -> None:
        """Count the pause of a step; 0 is none."""
        if pause_ns <= 0:
            return
        minute = self._clock() // _MINUTE_NS
        with self._lock:
            if not self._minutes or self._minutes[-1][0] != minute:
                self._minutes.append((minute, PauseCounts()))
            self._minutes[-1][1].add(pause_ns)
            self._all.add(pause_ns)

    def total(self) -> PauseCounts:
        """All since the daemon began."""
        with self._lock:
            return self._all.copy()

    def last_hour(self) -> list[tuple[int, PauseCounts]]:
        """The minutes with pauses: when each began, in nanoseconds since the epoch, and its pauses. Oldest first."""
        oldest = self._clock() // _MINUTE_NS - MINUTES
        with self._lock:
            return [(minute * _MINUTE_NS, one.copy()) for minute, one in self._minutes if minute > oldest]
