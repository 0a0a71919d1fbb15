"""The idempotency keys of calls that were cut off: whoever makes such a call again has to make it under the same one.

The journal alone knows them: any snapshot may bind a cut-off call before it runs again, and any daemon may go on with
the program.
"""

from __future__ import annotations

import threading
from typing import Any

from snapshotd.catalog.base import Catalog
from snapshotd.engine.mind.replay import canonical
from snapshotd.types import CallStatus, JournalEntry, SideEffect, Trajectory


class Keys:
    """Each is given out once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[tuple[str, str], list[str]] = {}

    def add(self, name: str, arguments: Any, key: str) -> None:
        self._of.setdefault((name, canonical(arguments)), []).append(key)

    def take(self, name: str, arguments: Any) -> str | None:
        """The key for such a call, in the order in which they were first made."""
        with self._lock:
            left = self._of.get((name, canonical(arguments)))
            return left.pop(0) if left else None


def cut_off(catalog: Catalog, trajectory: Trajectory) -> Keys:
    """Those of a trajectory's own calls: a fork makes its own, and what it has from its source may have ended there."""
    unknown: dict[str, JournalEntry] = {}
    used: set[str] = set()
    for entries in (catalog.journal(trajectory.head, since=trajectory.began), catalog.unbound(trajectory.id)):
        for entry in entries:
            if entry.key is None or entry.side_effect is SideEffect.LOCAL:
                continue
            if entry.status is not CallStatus.UNKNOWN:
                used.add(entry.key)  # it ended, or it is running again
            elif entry.snapshot is None or catalog.get_snapshot(entry.snapshot).trajectory == trajectory.id:
                unknown.setdefault(entry.key, entry)
    keys = Keys()
    for key, entry in unknown.items():
        if key not in used:
            keys.add(entry.name, entry.arguments, key)
    return keys
