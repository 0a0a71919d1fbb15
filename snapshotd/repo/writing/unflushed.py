"""Objects that the writer has and the index has not: queued, in packs that are being made, or in packs of other
processes. The writer's reader finds them here before it asks the index."""

from __future__ import annotations

from collections.abc import Iterator

from snapshotd.repo.base import ObjectKind
from snapshotd.repo.format import pack
from snapshotd.repo.format.encode import Encoded
from snapshotd.repo.format.index import Index, IndexEntry, PackRow
from snapshotd.repo.reading.finder import Finder, closed_error
from snapshotd.repo.writing.pending import Queued

Stored = list[tuple[PackRow, list[IndexEntry]]]
"""Durable packs with their objects, not indexed yet."""


class Unflushed(Finder):
    """The writer's thread moves objects: each is queued, then it has a place in a pack, then it is in the index.
    Encoding threads look meanwhile. They miss none, since an object is in `_objects` until the index has it, and a
    frame is here until the store has it."""

    def __init__(self, index: Index) -> None:
        self._index: Index | None = index
        self._path = index.path
        self._objects: dict[bytes, Queued | IndexEntry] = {}
        self._frames: dict[bytes, list[pack.Part]] = {}
        """The frames of objects that have a place, until their pack is durable."""
        self._elsewhere: dict[bytes, list[IndexEntry]] = {}
        """Objects in packs that other processes make, by pack, until the packs are durable."""

    def refresh(self) -> None:
        """No other process replaces the index of a writer."""

    def close(self) -> None:
        if self._index is not None:
            self._index.close()
            self._index = None

    def clear(self) -> None:
        """Forget all unflushed objects."""
        for of in (self._objects, self._frames, self._elsewhere):
            of.clear()

    def __contains__(self, raw: bytes) -> bool:
        return raw in self._objects

    def get(self, raw: bytes) -> Queued | IndexEntry | None:
        """An object, or its place in a pack; None if it is not one of these."""
        return self._objects.get(raw)

    def drop_existing(self, batch: list[Queued]) -> tuple[list[Queued], dict[bytes, IndexEntry]]:
        """The objects of a batch that do not exist yet, and the places of the others and of previous versions in the
        index."""
        if not batch:
            return [], {}
        wanted = {queued.id for queued in batch} | {queued.previous for queued in batch if queued.previous is not None}
        known = self.index().find_many([raw for raw in wanted if not isinstance(self.get(raw), IndexEntry)])
        for queued in batch:
            if queued.id in known:
                self.drop_known(queued)
        return [queued for queued in batch if queued.id not in known], known

    @property
    def empty(self) -> bool:
        """True if the index has everything."""
        return not self._objects

    @property
    def awaits_others(self) -> bool:
        """True if another process makes a pack."""
        return bool(self._elsewhere)

    def index(self) -> Index:
        if self._index is None:
            raise closed_error(self._path)
        return self._index

    def place_of(self, raw: bytes) -> IndexEntry | None:
        """The place of an object in a pack; None if it has none (yet)."""
        one = self._objects.get(raw)
        return one if isinstance(one, IndexEntry) else self.index().find(raw)

    def find(self, raw: bytes) -> IndexEntry | None:
        one = self._objects.get(raw)
        entry = self.place_of(raw)  # a queued object may have one, too: it was saved again, and not looked up yet
        if entry is None and isinstance(one, Queued):
            return IndexEntry(raw, one.kind, b"", 0, 0, len(one.data), None, 0)
        return entry

    def plain(self, raw: bytes, kinds: tuple[ObjectKind, ...] | None = None) -> bytes | None:
        one = self._objects.get(raw)
        return one.data if isinstance(one, Queued) and (kinds is None or one.kind in kinds) else None

    def frame(self, raw: bytes) -> bytes | None:
        parts = self._frames.get(raw)
        return None if parts is None else b"".join(parts)

    def records(self) -> Iterator[bytes]:
        yield from self.index().records()
        for raw, one in list(self._objects.items()):
            if one.kind == ObjectKind.RECORD and self.index().find(raw) is None:
                yield raw

    def add(self, queued: Queued) -> None:
        """Add an object that was saved."""
        self._objects[queued.id] = queued

    def drop_known(self, queued: Queued) -> None:
        """Drop an object that the index has had all along."""
        del self._objects[queued.id]

    def place(self, frame: Encoded, entry: IndexEntry) -> None:
        """Note the place of a queued object in a pack."""
        self._frames[frame.id] = frame.parts
        self._objects[frame.id] = entry

    def place_elsewhere(self, entries: list[IndexEntry], rows: list[PackRow]) -> Stored:
        """Take in the entries of other processes. Returns their packs that have become durable."""
        for entry in entries:
            if entry.id not in self:  # else it stays there for the garbage collection
                self._objects[entry.id] = entry
                self._elsewhere.setdefault(entry.pack, []).append(entry)
        return [(row, self._elsewhere.pop(row.id, [])) for row in rows]

    def note_durable(self, entries: list[IndexEntry]) -> None:
        """Drop the frames of these objects, whose pack is in the store now."""
        for entry in entries:
            self._frames.pop(entry.id, None)

    def note_indexed(self, stored: Stored) -> None:
        """Drop these objects, which the index has now."""
        for _, entries in stored:
            for entry in entries:
                del self._objects[entry.id]
