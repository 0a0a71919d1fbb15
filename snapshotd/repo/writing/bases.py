"""The choice of bases: which object a new one may be a delta against."""

from __future__ import annotations

from collections.abc import Mapping

from snapshotd.repo.base import ObjectKind
from snapshotd.repo.format import encode
from snapshotd.repo.format.index import IndexEntry
from snapshotd.repo.writing.pending import Queued
from snapshotd.repo.writing.similar import Recent, Similar
from snapshotd.repo.writing.unflushed import Unflushed


class Bases:
    """For the writer's own thread."""

    def __init__(self, unflushed: Unflushed) -> None:
        self._unflushed = unflushed
        self._recent = Recent()

    def clear(self) -> None:
        """Forget the recent files."""
        self._recent.clear()

    def plan(self, queued: Queued, known: Mapping[bytes, IndexEntry]) -> None:
        """Choose the object that this one may be a delta against. `known`: places of objects in the index."""
        previous = queued.previous
        if previous is None:
            return
        base = self._unflushed.get(previous) or known.get(previous)
        if base is None or base.kind != queued.kind or (isinstance(base, Queued) and base.number > queued.number):
            return  # a base comes first in the packs, and so no chain can come back to where it began
        size = base.plain if isinstance(base, IndexEntry) else len(base.data)
        if not encode.may_be_delta(len(queued.data), size):
            return
        queued.base, queued.depth = base, base.depth + 1
        if queued.depth > encode.max_depth(len(queued.data), size):
            queued.depth, queued.branch = encode.MAX_BRANCH + 1, True

    def plan_similar(self, queued: Queued, sort: bytes) -> None:
        """Choose the files that a new one is to be compared with."""
        found: list[Similar] = []
        for one in self._recent.get(sort, len(queued.data)):
            base = self._unflushed.get(one.id) or self._unflushed.place_of(one.id)
            if base is not None and base.kind == ObjectKind.CHUNK and base.depth < encode.MAX_SIMILAR_DEPTH:
                queued.depth = max(queued.depth, base.depth + 1)
                found.append(one)
        queued.similar = tuple(found)
        self._recent.add(sort, queued.id, queued.data)
