"""Journal entries in the database: rows and back, and writing them inside a transaction of the caller.

The arguments of a tool call are held once: when the snapshot with the call itself binds its entry, the entry gives up
its own.
"""

from __future__ import annotations

import json
from typing import Any

from snapshotd.catalog import rows
from snapshotd.catalog.database import CatalogDatabase, Row
from snapshotd.catalog.lookup import no_such
from snapshotd.errors import Conflict, InternalError, UsageError
from snapshotd.types import (
    ID_HEX_CHARS,
    CallID,
    CallStatus,
    Ended,
    EntryKind,
    JournalEntry,
    SideEffect,
    Snapshot,
    SnapshotID,
)

ENTRY_SELECT = """
SELECT e.id, e.pk, e.number, e.kind, e.name, e.head, e.began_at_ns, e.side_effect, e.key, e.status, e.ended_at_ns, e.error, b.id,
       e.facts, e.details, e.result, coalesce(e.arguments, b.call_arguments)
FROM entries e LEFT JOIN snapshots b ON b.pk = e.snapshot
"""

_INSERT = """
INSERT INTO entries (id, line, number, snapshot, kind, name, head, began_at_ns, side_effect, key, status, ended_at_ns, error, facts,
    details, result, arguments)
VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)
"""


def decode_entry(row: Row) -> JournalEntry:
    """The entry in a row of ENTRY_SELECT."""
    with rows.intact("journal entry", row):
        entry_id, _, number, kind, name, head, began, side_effect, key = row[:9]
        status, ended, error, snapshot, facts, details, result, arguments = row[9:]
        return JournalEntry(
            CallID(entry_id),
            EntryKind(kind),
            rows.decode_text(name),
            json.loads(arguments),
            SnapshotID(head),
            began,
            SideEffect(side_effect),
            rows.decode_text_or_none(key),
            None if status is None else CallStatus(status),
            ended,
            None if result is None else json.loads(result),
            rows.decode_text_or_none(error),
            () if facts is None else tuple(json.loads(facts)),
            {} if details is None else dict(json.loads(details)),
            snapshot,
            number,
        )


def add_entry(db: CatalogDatabase, line: int, entry: JournalEntry) -> None:
    """Insert an entry that no snapshot binds, as the latest of its line. Conflict: its id exists."""
    row = db.read_one("SELECT max(number) FROM entries WHERE line = ?", (line,))
    number = 0 if row is None or row[0] is None else row[0] + 1
    _insert(db, line, number, None, entry, rows.encode_json(entry.arguments))


def add_bound_entry(db: CatalogDatabase, line: int, snapshot: Snapshot, number: int, entry: JournalEntry) -> None:
    """Insert an entry that a snapshot (in row `number`) binds, with the number that it has. Conflict: its id exists."""
    if entry.status is None:
        raise InternalError(f"the open journal entry {entry.id} cannot belong to snapshot {snapshot.id}")
    arguments = rows.encode_json(entry.arguments)
    held = entry.id == snapshot.call.id and arguments == rows.encode_json(snapshot.call.arguments)
    _insert(db, line, entry.number, number, entry, None if held else arguments)


def _insert(
    db: CatalogDatabase, line: int, number: int, snapshot: int | None, entry: JournalEntry, arguments: str | None
) -> None:
    if not rows.ID.fullmatch(entry.id):
        raise UsageError(
            f"{entry.id[:80]!a} cannot be the id of a call: it must be {ID_HEX_CHARS} hexadecimal digits in lower case"
        )
    if db.read("SELECT 1 FROM entries WHERE id = ?", (entry.id,)):
        raise Conflict(
            f"journal entry {entry.id} is in the catalog already: a call is recorded once, under an id of its own"
        )
    if (entry.status is None) is not (entry.ended_at_ns is None):
        raise InternalError(f"journal entry {entry.id} must have a status and an end, or neither")
    values = (
        entry.id,
        line,
        number,
        snapshot,
        entry.kind.value,
        rows.encode_text(entry.name),
        entry.after,
        entry.began_at_ns,
        entry.side_effect.value,
        rows.encode_text_or_none(entry.key),
        None if entry.status is None else entry.status.value,
        entry.ended_at_ns,
        rows.encode_text_or_none(entry.error),
        rows.encode_json(list(entry.facts)) if entry.facts else None,
        _details(entry.details),
        _result(entry.result),
        arguments,
    )
    db.write(_INSERT, values)


def end_entry(db: CatalogDatabase, trajectory: int, ended: Ended) -> None:
    """Record the outcome of an open entry of a trajectory. NotFound: it is none."""
    row = db.read_one(
        "SELECT e.pk, e.details FROM entries e JOIN lines l ON l.pk = e.line WHERE e.id = ? AND e.status IS NULL AND l.trajectory = ?",
        (ended.id, trajectory),
    )
    if row is None:
        raise no_such("open journal entry", ended.id)
    number, details = row
    with rows.intact("journal entry", (ended.id,)):
        merged = {**({} if details is None else json.loads(details)), **ended.details}
    db.write(
        "UPDATE entries SET status = ?, ended_at_ns = ?, result = ?, error = ?, details = ? WHERE pk = ?",
        (
            ended.status.value,
            ended.at_ns,
            _result(ended.result),
            rows.encode_text_or_none(ended.error),
            _details(merged),
            number,
        ),
    )


def _result(value: Any) -> str | None:
    return None if value is None else rows.encode_json(value)


def _details(details: dict[str, Any]) -> str | None:
    return rows.encode_json(details) if details else None
