"""Markers: snapshots that the daemon took on its own account, or for a person, and not for a call.

A marker is known by what no program can write: its call is in no journal as a tool. Its name alone tells nothing, since
an agent may have a tool `edit`.
"""

from __future__ import annotations

from collections.abc import Collection

from snapshotd.catalog.base import Catalog
from snapshotd.errors import NotFound
from snapshotd.types import EntryKind, Snapshot

EDIT = "edit"
_OF_PROGRAMS = ("start", "exit", "stop", "diverged", "approval", "checkpoint", "turn")
_OF_PEOPLE = ("snapshot", "edits", "prompt", "service", "rewind", "undo", EDIT, "retry", "promote", "merge")
MARKERS = frozenset((*_OF_PROGRAMS, *_OF_PEOPLE))


def is_marker(catalog: Catalog, snapshot: Snapshot, names: Collection[str] = MARKERS) -> bool:
    """True for a marker with one of these names; one look into the journal for a snapshot that is called like one."""
    if snapshot.call.name not in names:
        return False
    try:
        return catalog.journal.get(snapshot.call.id).kind is not EntryKind.TOOL
    except NotFound:
        return True
