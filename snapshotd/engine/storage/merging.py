"""Keeps stacks shallow: runs of layers are merged in the background and used from the next pivot on.

Like a log-structured merge tree: `FAN_IN` neighbours of one level become one layer of the next level, so a trajectory
of N snapshots has about FAN_IN * log(N) layers and each file is linked log(N) times. Old snapshots keep their own
layers; merged ones serve later snapshots.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict

from snapshotd.engine.storage.worker import Worker
from snapshotd.errors import SnapshotdError
from snapshotd.layers.store import LayerStore
from snapshotd.types import LayerID, Stack

FAN_IN = 8
"""Eight levels of eight stay below 32 layers up to some thousand snapshots; an overlay of 32 costs 1.3 ms to mount, of
128 3.3 ms."""

MAX_DEPTH = 64
"""Depth from which a step waits for merges rather than grow its stack. Every look into a stack costs time in proportion
to its depth, and so does merging: a worker that has fallen behind would never catch up. The kernel takes 500."""


MAX_MERGED = 1024
"""Number of merged runs in the cache, the most recently used: far more than one stack of `MAX_DEPTH` and more has, else
merging one would never end. A run that falls out would be merged again."""


class Merger:
    """Remembers which runs have a merged form. Thread-safe. After a restart it starts from nothing, which costs time,
    not truth."""

    def __init__(self, store: LayerStore, worker: Worker) -> None:
        self._store, self._worker = store, worker
        self._lock = threading.Lock()
        self._working = threading.Lock()
        self._merged: OrderedDict[tuple[LayerID, ...], LayerID] = OrderedDict()
        self._level: dict[LayerID, int] = {}

    def apply(self, stack: Stack) -> Stack:
        """Return the stack with every merged run in place of its layers. Merges here if merging has fallen far
        behind."""
        swapped = self._swap(stack)
        while len(swapped.layers) > MAX_DEPTH and self.work(stack):
            swapped = self._swap(stack)
        return swapped

    def _swap(self, stack: Stack) -> Stack:
        with self._lock:
            layers = stack.layers
            changed = True
            while changed:
                changed = False
                for start in range(len(layers) - FAN_IN + 1):
                    run = layers[start : start + FAN_IN]
                    if run in self._merged:
                        self._merged.move_to_end(run)
                        layers = (*layers[:start], self._merged[run], *layers[start + FAN_IN :])
                        changed = True
                        break
            return Stack(stack.image, layers)

    def work(self, stack: Stack) -> bool:
        """Merge one run of this stack if it has one to merge. True if something was merged. One thread at a time."""
        with self._working:
            run = self._plan(self._swap(stack).layers)
            if run is None:
                return False
            if any(self._store.lazy(layer) for layer in run) or not self._store.hold(run):
                return False
            target = self._store.create()
            try:
                size = self._worker.merge(run, target)
                self._store.drop_work(target)
                self._remember(run, target)
            except (SnapshotdError, OSError):
                self._store.remove(target)  # out of space: the unmerged stack serves as well
                return False
            finally:
                self._store.release(run)
            # Last: what has a size may be evicted at once, and is forgotten here before it goes.
            with contextlib.suppress(OSError):  # without one it stays until the daemon ends
                self._store.sizes.note(target, size)
            return True

    def _remember(self, run: tuple[LayerID, ...], target: LayerID) -> None:
        with self._lock:
            self._merged[run] = target
            self._level[target] = self._level.get(run[0], 0) + 1
            while len(self._merged) > MAX_MERGED:
                self._drop(next(iter(self._merged)))

    def _plan(self, layers: tuple[LayerID, ...]) -> tuple[LayerID, ...] | None:
        """The oldest FAN_IN neighbours of one level, lowest level first; the newest layer stays out, it may still be
        settling."""
        with self._lock:
            levels = [self._level.get(layer, 0) for layer in layers]
        for level in sorted(set(levels)):
            end = len(layers)
            while end > 1:
                start = end
                while start > 1 and levels[start - 1] == level:
                    start -= 1
                if end - start >= FAN_IN:
                    return layers[end - FAN_IN : end]
                end = start if start < end else end - 1
        return None

    def forget(self, gone: list[LayerID]) -> None:
        """Drop the merged forms of layers that went or are about to go, and merged forms that contain such a layer, so
        that a sweep can take them."""
        lost = set(gone)
        with self._lock:
            for run in [run for run, target in self._merged.items() if target in lost or lost.intersection(run)]:
                self._drop(run)

    def _drop(self, run: tuple[LayerID, ...]) -> None:
        """Caller holds the lock."""
        target = self._merged.pop(run)
        self._level.pop(target, None)
        self._store.unpin([target])
