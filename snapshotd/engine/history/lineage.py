"""The way to a snapshot: its ancestors, across forks, rewinds and edits."""

from __future__ import annotations

from collections.abc import Callable

from snapshotd.errors import NotFound
from snapshotd.types import Snapshot


def lineage(find: Callable[[str], Snapshot], ref: str) -> list[Snapshot]:
    """A snapshot and its ancestors, oldest first. Before a rewind or an edit comes the snapshot whose conversation was
    kept. NotFound, also where the trajectory is removed meanwhile; Ambiguous."""
    found = [find(ref)]
    try:
        while (before := found[-1].continues) is not None:
            found.append(find(before))
    except NotFound as exc:
        raise NotFound(f"{ref} was removed while its history was read; go on without it") from exc
    return found[::-1]
