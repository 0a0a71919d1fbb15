"""The idempotency keys of calls that were cut off: such a call must be repeated under the same key.

The journal alone knows them: any snapshot may bind a cut-off call before it runs again, and any daemon may go on with
the program.
"""

from __future__ import annotations

import threading
from typing import Any

from snapshotd.catalog.base import Catalog
from snapshotd.engine.journal.replay import canonical
from snapshotd.types import CallStatus, JournalEntry, SideEffect, Trajectory


class Keys:
    """Keys that are given out once each. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[tuple[str, str], list[str]] = {}

    def add(self, name: str, arguments: Any, key: str) -> None:
        self._of.setdefault((name, canonical(arguments)), []).append(key)

    def take(self, name: str, arguments: Any) -> str | None:
        """The key for such a call; equal calls get their keys in the order in which they were first made."""
        with self._lock:
            left = self._of.get((name, canonical(arguments)))
            return left.pop(0) if left else None


def cut_off_keys(catalog: Catalog, trajectory: Trajectory) -> Keys:
    """The keys of the trajectory's own calls that were cut off. A fork draws its own keys, because a call of its source
    may have ended there."""
    unknown: dict[str, JournalEntry] = {}
    used: set[str] = set()
    for entries in (
        catalog.journal.read(trajectory.head, since=trajectory.began),
        catalog.journal.unbound(trajectory.id),
    ):
        for entry in entries:
            if entry.key is None or entry.side_effect is SideEffect.LOCAL:
                continue
            if entry.status is not CallStatus.UNKNOWN:
                used.add(entry.key)  # it ended, or it is running again
            elif entry.snapshot is None or catalog.snapshots.get(entry.snapshot).trajectory == trajectory.id:
                unknown.setdefault(entry.key, entry)
    keys = Keys()
    for key, entry in unknown.items():
        if key not in used:
            keys.add(entry.name, entry.arguments, key)
    return keys
