"""The way to a snapshot: its ancestors, across forks, rewinds and edits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from snapshotd.client.results import SnapshotInfo

if TYPE_CHECKING:
    from snapshotd.client.client import Snapshotd


def lineage(client: Snapshotd, ref: str) -> list[SnapshotInfo]:
    """A snapshot and those before it, oldest first. After a rewind or an edit it goes on with the snapshot whose
    conversation was kept. NotFound, Ambiguous."""
    at: SnapshotInfo | None = client.snapshot(ref)
    known = {one.id: one for one in client.all_snapshots()}
    found = []
    while at is not None:
        found.append(at)
        before = at.follows or at.parent
        at = known.get(before) if before is not None else None
    return found[::-1]
