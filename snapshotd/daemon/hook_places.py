"""The shares of users in what all hooks use together: connections, and time at work.

A user who takes too much of it takes it from no other: neither by connections that send nothing, nor by folders that are
slow to look at.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

from snapshotd.errors import LimitExceeded

MOST, MOST_OF_ONE = 256, 64
KEPT, MOST_OF_ONE_THERE = 64, 4
"""The last places are for users who have few. Root has its own."""
AT_ONCE, AT_ONCE_OF_ONE = 4, 2
"""Python runs one thread at a time, and each that is busy adds 5 ms to the wait of all others."""
_WAIT_FOR_OTHERS_S, _WAIT_S = 1.0, 30.0


class HookPlaces:
    """Connections. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: Counter[int] = Counter()

    def take(self, uid: int) -> bool:
        """Take a place for a connection. False: there is none for this user."""
        with self._lock:
            others = sum(count for one, count in self._users.items() if one)
            own = self._users[uid]
            few = uid == 0 or others < (MOST if own < MOST_OF_ONE_THERE else MOST - KEPT)
            if not few or own >= MOST_OF_ONE:
                return False
            self._users[uid] += 1
            return True

    def give_back(self, uid: int) -> None:
        """Give a place back."""
        with self._lock:
            self._users[uid] -= 1
            self._users += Counter()  # without those at zero


class HookTurns:
    """Requests at work. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._users: Counter[int] = Counter()
        self._closed = False

    @contextlib.contextmanager
    def turn(self, uid: int) -> Iterator[None]:
        """Wait for the user's turn, and hold it within the block. A user waits a second at most for other users, whose requests a
        dead file system may hold. LimitExceeded: the user's own requests take too long, or the daemon stops."""
        with self._changed:
            free = self._changed.wait_for(lambda: self._closed or self._users[uid] < AT_ONCE_OF_ONE, _WAIT_S)
            if not free or self._closed:
                raise LimitExceeded("the daemon stops" if self._closed else "other requests of this user take too long")
            self._users[uid] += 1
            self._changed.wait_for(lambda: self._closed or self._users.total() <= AT_ONCE, _WAIT_FOR_OTHERS_S)
        try:
            yield
        finally:
            with self._changed:
                self._users[uid] -= 1
                self._users += Counter()
                self._changed.notify_all()

    def close(self) -> None:
        """Let no request begin any more. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
