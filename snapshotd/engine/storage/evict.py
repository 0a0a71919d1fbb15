"""Keeps the layer directory within its budget: layers whose snapshots are stored go, least recently used first. They
come back on demand.

Never evicted: layers that a live sandbox stands on or a reader has open (held in the layer store), layers of a snapshot
that is not stored yet, installed dependencies, and images.
"""

from __future__ import annotations

import logging
import os
import shutil

from snapshotd.engine.context import Context
from snapshotd.engine.storage import retention
from snapshotd.engine.storage.cold import Cold
from snapshotd.engine.storage.merging import Merger
from snapshotd.engine.storage.needed import cached_layers, referenced_layers
from snapshotd.errors import SnapshotdError
from snapshotd.failpoints import hit
from snapshotd.types import LayerID, TrajectoryID

BUDGET_SHARE = 0.5
"""Part of the layers' file system that they may take, unless the settings name a number of bytes."""
ROOM_SHARE = 0.1
"""Share of the budget that an eviction frees beyond the excess."""
_log = logging.getLogger(__name__)


class Disposal:
    """Removes what nothing needs. Thread-safe."""

    def __init__(self, context: Context, merger: Merger, cold: Cold) -> None:
        self._context, self._merger, self._cold = context, merger, cold

    def evict(self) -> int:
        """Evict until the layers take somewhat less than their budget, or nothing more may go. Returns the bytes given up.
        Costs nothing while they fit; else some system calls for each layer, which is why it makes room for a while."""
        budget = budget_bytes(self._context)
        excess = self._context.store.sizes.total() - budget
        if excess <= 0:
            return 0
        excess += int(budget * ROOM_SHARE)
        sizes = self._context.store.sizes.read()
        needed = _find_needed(self._context)
        freed = 0
        for layer in sorted(sizes, key=lambda item: sizes[item][1]):
            if freed >= excess:
                break
            if layer in needed or self._context.store.is_held(layer):
                continue
            self._merger.forget([layer])
            if self._context.store.evict(layer):
                freed += sizes[layer][0]
        if freed:
            self._context.store.sweep(lambda: referenced_layers(self._context))
            _log.info("evicted layers of %d bytes; their snapshots are in the repository", freed)
            self._cold.prepare()
        return freed

    def forget(self, trajectory: TrajectoryID) -> None:
        """Remove an ended trajectory, with the layers that nothing else needs. Errors: as `TrajectoryTable.remove`."""
        layers = any(snapshot.own_layers for snapshot in self._context.catalog.snapshots.of_trajectory(trajectory))
        self._context.catalog.trajectories.remove(trajectory)
        hit("engine.remove.recorded")
        retention.set_policy(self._context.catalog, trajectory, None)
        self._context.events.remove(trajectory)
        shutil.rmtree(self._context.command_logs(trajectory), ignore_errors=True)
        self._context.secrecy.forget(trajectory)
        if layers:  # a fork that changed nothing has no layers, and a sweep looks at everyone's
            self.sweep()

    def sweep(self) -> None:
        """Remove layers that nothing needs. Repeats while layers go: removed layers may free merged ones."""
        while gone := self._context.store.sweep(lambda: referenced_layers(self._context)):
            self._merger.forget(gone)

    def sweep_what_was_held(self) -> None:
        """Remove layers that a reader has released. Errors are logged."""
        try:
            self.sweep()
        except (SnapshotdError, OSError) as exc:
            _log.warning("layers that nothing needs are left for the next start: %s", exc)


def budget_bytes(context: Context) -> int:
    """Space that the layers may take."""
    if context.config.layer_budget_bytes is not None:
        return context.config.layer_budget_bytes
    st = os.statvfs(context.store.root)
    return int(st.f_blocks * st.f_frsize * BUDGET_SHARE)


def _find_needed(context: Context) -> set[LayerID]:
    needed = set(cached_layers(context).values())
    for snapshot_id in context.catalog.snapshots.unstored():
        needed.update(context.catalog.snapshots.get(snapshot_id).stack.layers)
    return needed
