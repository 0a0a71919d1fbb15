"""Objects that the writer has and the index has not: queued, in packs that are being made, or in packs of other
processes. A reader that knows them reads them like any others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from snapshotd.repo.base import ObjectKind
from snapshotd.repo.format import pack
from snapshotd.repo.format.encode import Encoded
from snapshotd.repo.format.index import IndexEntry, PackRow
from snapshotd.repo.reading.reader import PackReader
from snapshotd.repo.writing.pending import Queued
from snapshotd.types import RecordID

Stored = list[tuple[PackRow, list[IndexEntry]]]
"""Durable packs with their objects, not indexed yet."""


class Unflushed:
    """An object moves from `queued` to `placed` to the index. Encoding threads look while it moves, so each look-up asks
    in this order, and each move adds before it removes."""

    def __init__(self) -> None:
        self.queued: dict[bytes, Queued] = {}
        self.placed: dict[bytes, IndexEntry] = {}
        """Objects with a place in a pack."""
        self._frames: dict[bytes, list[pack.Part]] = {}
        """Their frames, until their pack is durable."""
        self._elsewhere: dict[bytes, list[IndexEntry]] = {}
        """Objects in packs that other processes make, by pack, until the packs are durable."""

    def clear(self) -> None:
        """Nothing is unflushed."""
        for of in (self.queued, self.placed, self._frames, self._elsewhere):
            of.clear()

    def __contains__(self, raw: bytes) -> bool:
        return raw in self.queued or raw in self.placed

    @property
    def awaits_others(self) -> bool:
        """True if another process makes a pack."""
        return bool(self._elsewhere)

    def find(self, raw: bytes, indexed: Callable[[bytes], IndexEntry | None]) -> IndexEntry | None:
        """The place of an object, by `indexed` if it is not here; a queued one has no pack yet."""
        queued = self.queued.get(raw)
        entry = self.placed.get(raw) or indexed(raw)
        if entry is None and queued is not None:  # else it was queued again, and its place may be a delta's base
            return IndexEntry(raw, queued.kind, b"", 0, 0, len(queued.data), None, 0)
        return entry

    def frame(self, raw: bytes) -> bytes | None:
        """The bytes of a frame that is in no durable pack of this process."""
        parts = self._frames.get(raw)
        return None if parts is None else b"".join(parts)

    def all(self, indexed: Callable[[bytes], IndexEntry | None]) -> list[IndexEntry | Queued]:
        """All of them but those that `indexed` has."""
        queued = [one for one in self.queued.values() if indexed(one.id) is None]
        return [*self.placed.values(), *queued]

    def place(self, frame: Encoded, entry: IndexEntry) -> Queued:
        """A queued object has a place. Returns it as it was queued."""
        self._frames[frame.id] = frame.parts
        self.placed[frame.id] = entry
        return self.queued.pop(frame.id)

    def place_elsewhere(self, entries: list[IndexEntry], rows: list[PackRow]) -> Stored:
        """Take in the entries of other processes. Returns their packs that have become durable."""
        for entry in entries:
            if entry.id not in self:  # else it stays there for the garbage collection
                self.placed[entry.id] = entry
                self._elsewhere.setdefault(entry.pack, []).append(entry)
        return [(row, self._elsewhere.pop(row.id, [])) for row in rows]

    def durable(self, entries: list[IndexEntry]) -> None:
        """The pack of these is durable: it is read from the store."""
        for entry in entries:
            self._frames.pop(entry.id, None)

    def indexed(self, stored: Stored) -> None:
        """The index has these."""
        for _, entries in stored:
            for entry in entries:
                del self.placed[entry.id]


class UnflushedReader(PackReader):
    """Reads what is unflushed, too."""

    unflushed: Unflushed

    def find(self, raw: bytes) -> IndexEntry | None:
        return self.unflushed.find(raw, super().find)

    def plain(self, raw: bytes, kinds: tuple[ObjectKind, ...] | None = None, keep: bool = True) -> bytes:
        queued = self.unflushed.queued.get(raw)
        if queued is not None and (kinds is None or queued.kind in kinds):
            return queued.data
        return super().plain(raw, kinds, keep)

    def plain_at(self, entry: IndexEntry, keep: bool = True) -> bytes:
        queued = self.unflushed.queued.get(entry.id)
        if queued is not None:
            return queued.data
        placed = self.find(entry.id) if not entry.pack else entry  # it was queued when another thread looked it up
        return super().plain_at(placed or entry, keep)

    def frame_bytes(self, entry: IndexEntry) -> bytes:
        frame = self.unflushed.frame(entry.id)
        return super().frame_bytes(entry) if frame is None else frame

    def records(self) -> Iterator[tuple[RecordID, bytes]]:
        yield from super().records()
        for one in self.unflushed.all(super().find):
            if one.kind == ObjectKind.RECORD:
                yield RecordID(one.id.hex()), self._record(one.id)
