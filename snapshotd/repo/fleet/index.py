"""The changes of a node of a fleet to its index: its own, those it publishes, and those it merges. The tables are in places.py."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from snapshotd.repo.fleet.places import COPY_COLUMNS, FleetPlaces
from snapshotd.repo.format.index import IndexEntry, PackRow
from snapshotd.repo.format.segment import Condemned, Segment
from snapshotd.sqlite import Row

SEGMENT_OBJECTS = 100_000
"""Objects in one segment, so that it stays below some 10 MiB."""
_PACK = "(SELECT number FROM packs WHERE id = ?)"


class Outgoing(NamedTuple):
    """The segment that is being published."""

    number: int
    data: bytes


class FleetIndex(FleetPlaces):
    """See the module's text."""

    remedy = "run `snapshotd check`, and restore the packs that it names from a backup of the bucket"

    def __init__(self, path: Path, write: bool) -> None:
        super().__init__(path, write)
        self._now_ms = 0

    # -- changes of this node ------------------------------------------------------------------------------------------

    def set_time(self, now_s: float) -> None:
        """Set the time at which objects are condemned from now on."""
        self._now_ms = int(now_s * 1000)

    def add_pack(self, pack: PackRow) -> None:
        super().add_pack(pack)
        self._note_packs([pack.id])

    def add_objects(self, entries: Iterable[IndexEntry]) -> None:
        entries = list(entries)
        with self.seeing_condemned():
            moved = self.find_many([entry.id for entry in entries])
        super().add_objects(entries)
        olds = ((entry, moved[entry.id].pack) for entry in entries if entry.id in moved)
        self._drop([(entry.id, old) for entry, old in olds if old != entry.pack])
        self._db.write_many("DELETE FROM condemned WHERE id = ?", [(entry.id,) for entry in entries])
        self.settle(list(moved))
        self._note([(entry.id, entry.pack) for entry in entries])

    def remove_objects(self, object_ids: Iterable[bytes]) -> None:
        """Condemn objects: see `fleet/base.py`."""
        ids = [raw for raw in object_ids if self._db.read_one("SELECT 1 FROM objects WHERE id = ?", (raw,))]
        at_ms = self._now_ms or int(time.time() * 1000)
        rows = [(at_ms, raw) for raw in ids]
        places = self.find_many(ids)
        self._db.write_many("INSERT OR REPLACE INTO condemned SELECT *, ? FROM objects WHERE id = ?", rows)
        self._db.write_many("DELETE FROM copies WHERE id = ?", [(raw,) for raw in ids])
        super().remove_objects(ids)
        self._note([(raw, places[raw].pack) for raw in ids])

    def remove_empty_packs(self, packs: Iterable[bytes]) -> None:
        """Packs in which nothing lives: their bytes stay for the grace."""
        packs = list(packs)
        at_ms = self._now_ms or int(time.time() * 1000)
        self._db.write_many("INSERT OR IGNORE INTO removed_packs VALUES (?, ?)", [(pack, at_ms) for pack in packs])
        self._note_packs(packs)

    def take_back(self, object_ids: Sequence[bytes]) -> list[bytes]:
        """Let condemned objects live again, in one transaction. Returns the packs that are not removed any more."""
        with self._db.transaction():
            rows = [(raw,) for raw in object_ids]
            ids_of = "SELECT p.id FROM condemned c JOIN packs p ON p.number = c.pack WHERE c.id = ?"
            places = {raw: row[0] for raw in object_ids if (row := self._db.read_one(ids_of, (raw,)))}
            self._db.write_many(
                "INSERT OR IGNORE INTO objects SELECT id, kind, pack, offset, stored, plain, base, depth FROM condemned WHERE id = ?",
                rows,
            )
            self._db.write_many("DELETE FROM condemned WHERE id = ?", rows)
            self.settle(object_ids)
            self.remember_records(object_ids)
            packs = [pack for pack in dict.fromkeys(places.values()) if self.keep_pack(pack)]
            self._note(list(places.items()))
            self._note_packs(packs)
        return packs

    def forget_condemned(self, limit_ms: int) -> int:
        """Forget the objects that were condemned at this time or before, in one transaction. Returns their number."""
        with self._db.transaction():
            of = "SELECT c.id, p.id FROM condemned c JOIN packs p ON p.number = c.pack WHERE c.at_ms <= ?"
            rows = self._db.read(of, (limit_ms,))
            self._db.write("DELETE FROM condemned WHERE at_ms <= ?", (limit_ms,))
            self._note(rows)
        return len(rows)

    def forget_pack(self, pack: bytes) -> None:
        """Forget a pack whose bytes are gone, in one transaction."""
        with self._db.transaction():
            self.drop_pack(pack)
            self._note_packs([pack])

    def settle_copies(self, own: str) -> None:
        """Choose one place for every object that several nodes stored: the others are garbage. For collections, in one
        transaction."""
        with self._db.transaction():
            chosen = []
            for (raw,) in self._db.read("SELECT DISTINCT c.id FROM copies c JOIN objects o ON o.id = c.id"):
                of = "SELECT p.id FROM copies c JOIN packs p ON p.number = c.pack WHERE c.id = ?"
                best = min((row[0] for row in self._db.read(of, (raw,))), key=lambda pack: self._rank(raw, pack, own))
                entry = self.find(raw)
                if entry is not None and self._rank(raw, best, own) < self._rank(raw, entry.pack, own):
                    self.use_copy(raw, best)
                    chosen.append(raw)
                    self._note([(raw, best)])
            self.settle(chosen)
            self._db.write("DELETE FROM copies")

    def _rank(self, raw: bytes, pack: bytes, own: str) -> tuple[bool, str, bytes]:
        """The rank of a pack as the place of an object; the least one is chosen. Every node ranks alike: else two
        collections at once could each remove the place that the other keeps. Places that a collection has given up come
        last."""
        given_up = "SELECT 1 FROM removed_packs WHERE id = ? UNION ALL SELECT 1 FROM dropped WHERE id = ? AND pack = ?"
        return self._db.read_one(given_up, (pack, raw, pack)) is not None, self.home_of(pack) or own, pack

    def _drop(self, places: Sequence[tuple[bytes, bytes]]) -> None:
        self._db.write_many("INSERT OR IGNORE INTO dropped VALUES (?, ?)", places)

    def _note(self, objects: Iterable[Row]) -> None:
        self._db.write_many("INSERT OR REPLACE INTO changed (id, pack) VALUES (?, ?)", objects)

    def _note_packs(self, packs: Iterable[bytes]) -> None:
        self._db.write_many("INSERT OR REPLACE INTO changed_packs (id) VALUES (?)", [(pack,) for pack in packs])

    def condemn_unpublished(self) -> None:
        """Condemn this node's unpublished objects, because some of them need what is gone. One transaction."""
        with self._db.transaction():
            self.remove_objects([row[0] for row in self._db.read("SELECT id FROM changed")])

    # -- publishing ----------------------------------------------------------------------------------------------------

    def outgoing(self) -> Outgoing | None:
        """The segment that was begun and is not known to be published."""
        row = self._db.read_one("SELECT number, data FROM outbox")
        return None if row is None else Outgoing(int(row[0]), bytes(row[1]))

    def next_segment(self, node: str, *, collection: bool) -> tuple[Segment, int, int] | None:
        """The next segment of this node, and the last changes in it; None if the fleet knows everything."""
        rows = self._db.read("SELECT number, id, pack FROM changed ORDER BY number LIMIT ?", (SEGMENT_OBJECTS,))
        packs = self._db.read("SELECT number, id FROM changed_packs ORDER BY number")
        if not rows and not packs:
            return None
        number, seal = self.last_merged(node)
        one = Segment(node, number + 1, seal, collection)
        told = "SELECT node, number FROM merged WHERE number > told AND node <> ? ORDER BY node"
        one.after = [(str(row[0]), int(row[1])) for row in self._db.read(told, (node,))]
        places = self.find_many([row[1] for row in rows])
        for _, raw, pack in rows:
            if raw in places:
                one.objects.append(places[raw])
                one.forgotten += self._db.read("SELECT id, pack FROM dropped WHERE id = ?", (raw,))
            elif entry := self.find_readable(raw):
                at = self._db.read("SELECT at_ms FROM condemned WHERE id = ?", (raw,))
                one.condemned.append(Condemned(raw, entry.pack, int(at[0][0])))
            else:
                one.forgotten.append((raw, pack))
        for _, pack in packs:
            self._add_pack_to(one, pack)
        return one, rows[-1][0] if rows else 0, packs[-1][0] if packs else 0

    def _add_pack_to(self, one: Segment, pack: bytes) -> None:
        found = self._db.read_one("SELECT id, bytes, objects FROM packs WHERE id = ?", (pack,))
        removed = self._db.read_one("SELECT at_ms FROM removed_packs WHERE id = ?", (pack,))
        if found is None:
            one.gone.append(pack)
        elif removed is not None:
            one.removed.append((pack, int(removed[0])))
        else:
            one.packs.append(PackRow(*found))

    def keep_outgoing(self, outgoing: Outgoing, objects_upto: int, packs_upto: int) -> None:
        """Keep the bytes of a segment, which belong to its number from now on, whatever happens. One transaction."""
        with self._db.transaction():
            values = (outgoing.number, outgoing.data, objects_upto, packs_upto)
            self._db.write("INSERT INTO outbox VALUES (?, ?, ?, ?)", values)

    def note_published(self, segment: Segment, seal: bytes) -> None:
        """Note that the outgoing segment is in the bucket. One transaction."""
        with self._db.transaction():
            self._db.write("DELETE FROM changed WHERE number <= (SELECT objects_upto FROM outbox)")
            self._db.write("DELETE FROM changed_packs WHERE number <= (SELECT packs_upto FROM outbox)")
            self._db.write("DELETE FROM outbox")
            self._db.write_many(
                "UPDATE merged SET told = max(told, ?) WHERE node = ?", [(n, m) for m, n in segment.after]
            )
            self._note_merged(segment, seal)

    def drop_outgoing(self) -> None:
        """Drop the outgoing segment, whose number an earlier life of this node has used: it is made again."""
        with self._db.transaction():
            self._db.write("DELETE FROM outbox")

    # -- merging -------------------------------------------------------------------------------------------------------

    def merge(self, segment: Segment, seal: bytes, own: str) -> None:
        """Take over the next segment of a node, in one transaction. DataLoss when it builds upon what is not here."""
        with self._db.transaction():
            for row in segment.packs:
                self._merge_pack(row, segment.node, own)
            self._db.write_many("INSERT OR IGNORE INTO removed_packs VALUES (?, ?)", segment.removed)
            self._db.write_many(
                f"DELETE FROM condemned WHERE id = ? AND pack = {_PACK}",
                [(raw, pack) for raw, pack in segment.forgotten],
            )
            self._drop([place for place in segment.forgotten if self.knows_pack(place[1])])
            self._merge_objects(segment, own)
            self.settle([one.id for one in segment.condemned if self._merge_condemned(one)])
            for pack in segment.gone:
                self.drop_pack(pack)
            self._note_merged(segment, seal)

    def _note_merged(self, segment: Segment, seal: bytes) -> None:
        self._db.write(
            "INSERT INTO merged VALUES (?, ?, ?, 0) ON CONFLICT (node) DO UPDATE SET number = excluded.number, seal = excluded.seal",
            (segment.node, segment.number, seal),
        )

    def _merge_pack(self, row: PackRow, node: str, own: str) -> None:
        """Take in a new pack of the node, or one of any node that is not removed any more."""
        if self._db.write("INSERT OR IGNORE INTO packs (id, bytes, objects) VALUES (?, ?, ?)", row):
            if node != own:
                self._db.write("INSERT INTO foreign_packs VALUES (?, ?)", (row.id, node))
        else:
            self.keep_pack(row.id)

    def _merge_objects(self, segment: Segment, own: str) -> None:
        """Take in the places of a segment's objects. A collection chooses among the places of an object; otherwise the first
        place that a node knows stays."""
        ids = [entry.id for entry in segment.objects]
        known = self.find_many(ids)
        with self.seeing_condemned():
            moved = self.find_many(ids)
        fresh = []
        for entry in segment.objects:
            had = known.get(entry.id)
            if not self.knows_pack(entry.pack):
                continue  # a later segment, merged already, says that it is gone
            if had is None:
                fresh.append(entry)
            elif had.pack != entry.pack:
                rank = self._rank(entry.id, had.pack, own)
                better = (segment.collection or rank[0]) and self._rank(entry.id, entry.pack, own) < rank
                if better:
                    fresh.append(entry)
                self._add_copy(had if better else entry)
        super().add_objects(fresh)
        self._db.write_many("DELETE FROM condemned WHERE id = ?", [(entry.id,) for entry in fresh])
        self.settle([entry.id for entry in fresh if entry.base is not None or entry.id in moved])

    def _add_copy(self, entry: IndexEntry) -> None:
        self._db.write(
            f"INSERT OR IGNORE INTO copies ({COPY_COLUMNS}) VALUES (?, ?, {_PACK}, ?, ?, ?, ?)",
            (entry.id, int(entry.kind), *entry[2:7]),
        )

    def _merge_condemned(self, one: Condemned) -> bool:
        """Condemn one copy of an object. True if another copy, which the collection did not know, takes its place."""
        self._db.write(f"DELETE FROM copies WHERE id = ? AND pack = {_PACK}", (one.id, one.pack))
        entry = self.find(one.id)
        if entry is None or entry.pack != one.pack:
            return False
        if self.use_copy(one.id):
            return True
        self._db.write("INSERT OR REPLACE INTO condemned SELECT *, ? FROM objects WHERE id = ?", (one.at_ms, one.id))
        super().remove_objects([one.id])
        return False
