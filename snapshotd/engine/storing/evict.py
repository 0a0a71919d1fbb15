"""Keeps the layer directory within its budget: layers whose snapshots are stored go, least recently used first. They
come back on demand.

Never evicted: layers that a live sandbox stands on or a reader has open (held in the layer store), layers of a snapshot
that is not stored yet, installed dependencies, and images.
"""

from __future__ import annotations

import logging
import os

from snapshotd.engine.context import Context
from snapshotd.engine.storing.merging import Merger
from snapshotd.engine.storing.needed import cached_layers, referenced_layers
from snapshotd.types import LayerID

BUDGET_SHARE = 0.5
"""Part of the layers' file system that they may take, unless the settings name a number of bytes."""
ROOM_SHARE = 0.1
"""Share of the budget that an eviction frees beyond the excess."""
_log = logging.getLogger(__name__)


def budget_bytes(context: Context) -> int:
    """Space that the layers may take."""
    if context.config.layer_budget_bytes is not None:
        return context.config.layer_budget_bytes
    st = os.statvfs(context.store.root)
    return int(st.f_blocks * st.f_frsize * BUDGET_SHARE)


def evict(context: Context, merger: Merger, budget: int) -> int:
    """Evict until the layers take somewhat less than `budget` bytes, or nothing more may go. Returns the bytes given
    up. Costs nothing while they fit; else some system calls for each layer, which is why it makes room for a while."""
    excess = context.store.sized_bytes() - budget
    if excess <= 0:
        return 0
    excess += int(budget * ROOM_SHARE)
    sizes = context.store.sizes()
    needed = _needed(context)
    freed = 0
    for layer in sorted(sizes, key=lambda item: sizes[item][1]):
        if freed >= excess:
            break
        if layer in needed or context.store.is_held(layer):
            continue
        merger.forget([layer])
        if context.store.evict(layer):
            freed += sizes[layer][0]
    if freed:
        context.store.sweep(lambda: referenced_layers(context))
        _log.info("evicted layers of %d bytes; their snapshots are in the repository", freed)
    return freed


def _needed(context: Context) -> set[LayerID]:
    needed = set(cached_layers(context).values())
    for snapshot_id in context.catalog.unstored():
        needed.update(context.catalog.get_snapshot(snapshot_id).stack.layers)
    return needed
