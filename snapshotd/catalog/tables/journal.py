"""Journals in the catalog's database, read across forks and rewinds (`catalog/lines.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from snapshotd.catalog import rows
from snapshotd.catalog.database import PAGE_CHARS, PAGE_ROWS, CatalogDatabase, Row
from snapshotd.catalog.entries import ENTRY_SELECT, add_entry, decode_entry, end_entry
from snapshotd.catalog.lines import find_writer, position_of
from snapshotd.catalog.lookup import CANDIDATES, check_unique, id_range, no_such, searchable, snapshot_numbers
from snapshotd.types import CallID, Ended, JournalEntry, SnapshotID, TrajectoryID


class _Segment(NamedTuple):
    """The part of a line's journal that snapshots in the rows (after, last] bind."""

    line: int
    after: int
    last: int


class JournalTable:
    """The entries of trajectories: what was intended, and how it ended. A snapshot binds the ones that ended before it."""

    def __init__(self, db: CatalogDatabase) -> None:
        self._db = db

    def begin(self, trajectory_id: TrajectoryID, entry: JournalEntry, *, fence: int | None = None) -> None:
        """Record an intent (with `status`: a complete entry) at the end of the trajectory's journal. Survives `kill -9`
        on return. Conflict: the id exists, or `fence` is older than the trajectory's; NotFound; UsageError: the id is
        no id."""
        with self._db.transaction():
            add_entry(self._db, find_writer(self._db, trajectory_id, fence).line, entry)

    def end(self, trajectory_id: TrajectoryID, ended: Ended, *, fence: int | None = None) -> None:
        """Record the outcome of an open entry without a snapshot; the next one binds it. NotFound: it is not open (any
        more), or another trajectory's. Conflict as `begin`."""
        with self._db.transaction():
            end_entry(self._db, find_writer(self._db, trajectory_id, fence).trajectory, ended)

    def get(self, entry_id: CallID) -> JournalEntry:
        """The journal entry of this id. NotFound."""
        row = self._db.read_one(ENTRY_SELECT + "WHERE e.id = ?", (entry_id,)) if searchable(entry_id) else None
        if row is None:
            raise no_such("journal entry", entry_id)
        return decode_entry(row)

    def find(self, ref: str) -> tuple[TrajectoryID, JournalEntry]:
        """The journal entry of this id or unique prefix (>= 4 characters). NotFound, Ambiguous."""
        found: list[Row] = []
        if ref and searchable(ref):
            found = self._db.read(
                "SELECT e.id, t.id FROM entries e JOIN lines l ON l.pk = e.line JOIN trajectories t ON t.pk = l.trajectory"
                " WHERE e.id >= ? AND e.id < ? LIMIT ?",
                (*id_range(ref), CANDIDATES + 1),
            )
        if not found:
            raise no_such("journal entry", ref)
        check_unique(ref, [row[0] for row in found])
        return TrajectoryID(found[0][1]), self.get(CallID(found[0][0]))

    def own(self, snapshot_id: SnapshotID) -> list[JournalEntry]:
        """The entries that a snapshot binds, in the order in which they began. NotFound."""
        with self._db.lock:
            number, _ = snapshot_numbers(self._db, snapshot_id)
            found = self._db.read(ENTRY_SELECT + "WHERE e.snapshot = ? ORDER BY e.number, e.pk", (number,))
        return [decode_entry(row) for row in found]

    def read(self, snapshot_id: SnapshotID, since: SnapshotID | None = None) -> Iterator[JournalEntry]:
        """The journal up to a snapshot, in the order in which entries began, across forks and rewinds; with `since`,
        only the entries bound after that snapshot (if it lies on the way; else all). NotFound."""
        return self._entries(snapshot_id, self._segments(snapshot_id, since))

    def left_running(self, snapshot_id: SnapshotID, since: SnapshotID | None = None) -> list[JournalEntry]:
        """The calls that ran where the way to a snapshot leaves a line, by a rewind or a fork, and at the snapshot
        itself. They began before and ended after that, or never, so `read` lacks them. NotFound."""
        with self._db.lock:
            found = [
                row
                for line, _, last in self._segments(snapshot_id, since)
                for row in self._db.read(
                    ENTRY_SELECT + "WHERE e.line = ?1 AND (e.snapshot IS NULL OR e.snapshot > ?2)"
                    " AND e.began_at_ns < (SELECT created_at_ns FROM snapshots WHERE pk = ?2) ORDER BY e.number, e.pk",
                    (line, last),
                )
            ]
        return [decode_entry(row) for row in found]

    def unbound(self, trajectory_id: TrajectoryID) -> list[JournalEntry]:
        """The entries of the trajectory's present line that no snapshot binds: open ones, and the ones that ended since
        the head. NotFound."""
        with self._db.lock:
            line = find_writer(self._db, trajectory_id, None).line
            numbers = self._db.read(
                "SELECT pk FROM entries INDEXED BY entries_unbound WHERE line = ? AND snapshot IS NULL", (line,)
            )
            found = self._db.read(
                ENTRY_SELECT + "WHERE e.pk IN (SELECT CAST(value AS BIGINT) FROM json_each(?)) ORDER BY e.number, e.pk",
                (rows.encode_json([number for (number,) in numbers]),),
            )
            return [decode_entry(row) for row in found]

    def _segments(self, snapshot_id: SnapshotID, since: SnapshotID | None) -> list[_Segment]:
        """The parts of lines that lead to a snapshot, the oldest first. NotFound."""
        segments = []
        with self._db.lock:
            stop = None if since is None else position_of(self._db, since)
            number: int | None = position_of(self._db, snapshot_id).number
            while number is not None:
                row = self._db.read_one(
                    "SELECT s.line, l.forked_from FROM snapshots s JOIN lines l ON l.pk = s.line WHERE s.pk = ?",
                    (number,),
                )
                assert row is not None
                line, origin = row
                reached = stop is not None and stop.line == line and stop.number <= number
                segments.append(_Segment(line, stop.number if stop is not None and reached else 0, number))
                number = None if reached else origin
        return segments[::-1]

    def _entries(self, snapshot_id: SnapshotID, segments: list[_Segment]) -> Iterator[JournalEntry]:
        for segment in segments:
            bounds = self._db.read_one(  # so that the pages below do not look at entries far outside
                "SELECT min(e.number), max(e.number) FROM snapshots s JOIN entries e ON e.snapshot = s.pk"
                " WHERE s.line = ? AND s.pk > ? AND s.pk <= ?",
                segment,
            )
            if bounds is None or bounds[0] is None:
                continue
            at = (bounds[0], 0)
            while True:
                page = self._db.read_page(
                    ENTRY_SELECT + "WHERE e.line = ?1 AND e.snapshot > ?2 AND e.snapshot <= ?3 AND e.number <= ?4"
                    " AND (e.number, e.pk) > (?5, ?6) ORDER BY e.number, e.pk",
                    (*segment, bounds[1], *at),
                    rows=PAGE_ROWS,
                    size=PAGE_CHARS,
                )
                if not page:
                    break
                yield from map(decode_entry, page)
                at = (page[-1][2], page[-1][1])
        snapshot_numbers(self._db, snapshot_id)  # NotFound: removed while it was read
