"""Pins: snapshots that are in use, or about to be. A prune leaves them alone, and makes its decisions while no pin is
taken."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from snapshotd.types import Snapshot, SnapshotID, TreeID


class Pins:
    """Thread-safe. `read` gives a snapshot's present state (it may have been pruned a moment ago)."""

    def __init__(self, read: Callable[[SnapshotID], Snapshot]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._pinned: Counter[SnapshotID] = Counter()
        self._trees: Counter[TreeID] = Counter()
        self._hold: Callable[[Snapshot], object] = lambda _: None

    def hold_with(self, hold: Callable[[Snapshot], object]) -> None:
        """Call `hold` with each snapshot that is pinned from now on: it keeps the snapshot where other nodes could remove it.
        NotFound: it is gone there."""
        self._hold = hold

    def pin(self, snapshot_id: SnapshotID) -> tuple[Snapshot, Callable[[], None]]:
        """The snapshot as it is now, and the function that unpins it (call once). Its files stay until then, even if it
        is removed. NotFound."""
        with self._lock:
            snapshot = self._read(snapshot_id)
            self._pinned[snapshot_id] += 1
            if snapshot.tree is not None:
                self._trees[snapshot.tree] += 1
        try:
            self._hold(snapshot)
        except BaseException:
            self._unpin(snapshot)
            raise
        return snapshot, lambda: self._unpin(snapshot)

    @contextmanager
    def pinned(self, snapshot_id: SnapshotID) -> Iterator[Snapshot]:
        """The snapshot, pinned for the block."""
        snapshot, unpin = self.pin(snapshot_id)
        try:
            yield snapshot
        finally:
            unpin()

    @contextmanager
    def frozen(self) -> Iterator[set[SnapshotID]]:
        """The pinned snapshots. No snapshot can be pinned or unpinned inside the block."""
        with self._lock:
            yield set(self._pinned)

    def trees(self) -> set[TreeID]:
        """The trees of the pinned snapshots."""
        with self._lock:
            return set(self._trees)

    def _unpin(self, snapshot: Snapshot) -> None:
        with self._lock:
            self._pinned[snapshot.id] -= 1
            self._pinned += Counter()  # drops counts of zero
            if snapshot.tree is not None:
                self._trees[snapshot.tree] -= 1
                self._trees += Counter()
