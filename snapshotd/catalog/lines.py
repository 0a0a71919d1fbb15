"""Lines: the parts of a snapshot's conversation and journal, read from their beginning across forks and rewinds.

A line continues its origin (a snapshot of another line, or of an earlier part of the same trajectory) and keeps a
number of its messages. Inside a line, snapshots are numbered as they came, so "up to this snapshot" is a comparison of
row numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from snapshotd.catalog import rows
from snapshotd.catalog.database import CatalogDatabase
from snapshotd.catalog.entries import ENTRY_SELECT, decode_entry
from snapshotd.catalog.lookup import read_row, snapshot_numbers
from snapshotd.errors import DataLoss
from snapshotd.types import JournalEntry, Message, SnapshotID, short

PAGE_ROWS = 500
PAGE_CHARS = 1 << 20


def add_line(db: CatalogDatabase, trajectory: int, origin: int | None, kept: int) -> int:
    """Begin a line; its row."""
    return db.insert("INSERT INTO lines (trajectory, forked_from, kept) VALUES (?,?,?)", (trajectory, origin, kept))


class Position(NamedTuple):
    """The place of a snapshot (in row `number`). `state`: the row of its agent's state."""

    number: int
    line: int
    messages: int
    state: int | None


def position_of(db: CatalogDatabase, snapshot_id: SnapshotID) -> Position:
    """The place of a snapshot. NotFound."""
    select = "SELECT pk, line, messages, agent_state FROM snapshots WHERE id = ?"
    return Position(*read_row(db, "snapshot", snapshot_id, select))


# -- conversations -----------------------------------------------------------------------------------------------------


def own_messages(db: CatalogDatabase, snapshot_id: SnapshotID) -> list[Message]:
    """See `Catalog.own_messages`."""
    row = read_row(
        db,
        "snapshot",
        snapshot_id,
        "SELECT s.line, CASE WHEN p.line = s.line THEN p.messages ELSE l.kept END, s.messages"
        " FROM snapshots s JOIN lines l ON l.pk = s.line LEFT JOIN snapshots p ON p.pk = coalesce(s.follows, s.parent) WHERE s.id = ?",
    )
    return list(_messages(db, snapshot_id, [row]))


def conversation(db: CatalogDatabase, snapshot_id: SnapshotID, start: int) -> Iterator[Message]:
    """See `Catalog.conversation`."""
    segments = []
    with db.lock:
        number: int | None
        number, end = snapshot_numbers(db, snapshot_id)
        while number is not None and end > start:
            row = db.read_one(
                "SELECT l.pk, l.kept, l.forked_from FROM snapshots s JOIN lines l ON l.pk = s.line WHERE s.pk = ?",
                (number,),
            )
            assert row is not None
            line, kept, number = row
            if end > kept:
                segments.append((line, max(kept, start), end))
                end = kept
    return _messages(db, snapshot_id, segments[::-1])


def _messages(db: CatalogDatabase, snapshot_id: SnapshotID, segments: list[Any]) -> Iterator[Message]:
    for line, position, end in segments:
        while position < end:
            page = db.read_page(
                "SELECT position, role, content FROM messages WHERE line = ? AND position >= ? AND position < ? ORDER BY position",
                (line, position, end),
                rows=PAGE_ROWS,
                size=PAGE_CHARS,
            )
            if [row[0] for row in page] != list(range(position, position + len(page))) or not page:
                snapshot_numbers(db, snapshot_id)  # NotFound: removed while it was read
                raise DataLoss(
                    f"message {position} of snapshot {short(snapshot_id)} is missing: restore the catalog from a backup"
                )
            yield from map(rows.decode_message, page)
            position += len(page)


# -- the agent's state -------------------------------------------------------------------------------------------------


def save_state(db: CatalogDatabase, content: str | None, before: int | None) -> int | None:
    """The row of a state; `before` where it is None or the same as there."""
    if content is None or db.read("SELECT 1 FROM states WHERE pk = ? AND content = ?", (before, content)):
        return before
    if before is None and content == "{}":
        return None
    return db.insert("INSERT INTO states (content) VALUES (?)", (content,))


def state_of(db: CatalogDatabase, snapshot_id: SnapshotID) -> dict[str, Any]:
    """See `Catalog.state`."""
    row = read_row(
        db,
        "snapshot",
        snapshot_id,
        "SELECT s.id, k.content FROM snapshots s LEFT JOIN states k ON k.pk = s.agent_state WHERE s.id = ?",
    )
    with rows.intact("the agent's state at snapshot", row):
        return {} if row[1] is None else dict(json.loads(row[1]))


def own_state(db: CatalogDatabase, snapshot_id: SnapshotID) -> dict[str, Any] | None:
    """See `Catalog.own_state`."""
    row = read_row(
        db,
        "snapshot",
        snapshot_id,
        "SELECT s.agent_state IS DISTINCT FROM p.agent_state FROM snapshots s LEFT JOIN snapshots p ON p.pk = coalesce(s.follows, s.parent)"
        " WHERE s.id = ?",
    )
    return state_of(db, snapshot_id) if row[0] else None


# -- journals ----------------------------------------------------------------------------------------------------------


class _Segment(NamedTuple):
    """The part of a line's journal that snapshots in the rows (after, last] bind."""

    line: int
    after: int
    last: int


def own_entries(db: CatalogDatabase, snapshot_id: SnapshotID) -> list[JournalEntry]:
    """See `Catalog.own_entries`."""
    with db.lock:
        number, _ = snapshot_numbers(db, snapshot_id)
        found = db.read(ENTRY_SELECT + "WHERE e.snapshot = ? ORDER BY e.number, e.pk", (number,))
    return [decode_entry(row) for row in found]


def journal(db: CatalogDatabase, snapshot_id: SnapshotID, since: SnapshotID | None) -> Iterator[JournalEntry]:
    """See `Catalog.journal`."""
    return _entries(db, snapshot_id, _segments(db, snapshot_id, since))


def left_running(db: CatalogDatabase, snapshot_id: SnapshotID, since: SnapshotID | None) -> list[JournalEntry]:
    """See `Catalog.left_running`."""
    with db.lock:
        found = [
            row
            for line, _, last in _segments(db, snapshot_id, since)
            for row in db.read(
                ENTRY_SELECT + "WHERE e.line = ?1 AND (e.snapshot IS NULL OR e.snapshot > ?2)"
                " AND e.began_at_ns < (SELECT created_at_ns FROM snapshots WHERE pk = ?2) ORDER BY e.number, e.pk",
                (line, last),
            )
        ]
    return [decode_entry(row) for row in found]


def _segments(db: CatalogDatabase, snapshot_id: SnapshotID, since: SnapshotID | None) -> list[_Segment]:
    """The parts of lines that lead to a snapshot, the oldest first. NotFound."""
    segments = []
    with db.lock:
        stop = None if since is None else position_of(db, since)
        number: int | None = position_of(db, snapshot_id).number
        while number is not None:
            row = db.read_one(
                "SELECT s.line, l.forked_from FROM snapshots s JOIN lines l ON l.pk = s.line WHERE s.pk = ?", (number,)
            )
            assert row is not None
            line, origin = row
            reached = stop is not None and stop.line == line and stop.number <= number
            segments.append(_Segment(line, stop.number if stop is not None and reached else 0, number))
            number = None if reached else origin
    return segments[::-1]


def _entries(db: CatalogDatabase, snapshot_id: SnapshotID, segments: list[_Segment]) -> Iterator[JournalEntry]:
    for segment in segments:
        bounds = db.read_one(  # so that the pages below do not look at entries far outside
            "SELECT min(e.number), max(e.number) FROM snapshots s JOIN entries e ON e.snapshot = s.pk"
            " WHERE s.line = ? AND s.pk > ? AND s.pk <= ?",
            segment,
        )
        if bounds is None or bounds[0] is None:
            continue
        at = (bounds[0], 0)
        while True:
            page = db.read_page(
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
    snapshot_numbers(db, snapshot_id)  # NotFound: removed while it was read
