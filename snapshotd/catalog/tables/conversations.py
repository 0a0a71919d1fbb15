"""Conversations and agents' states in the catalog's database, read across forks and rewinds (`catalog/lines.py`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from snapshotd.catalog import rows
from snapshotd.catalog.database import PAGE_CHARS, PAGE_ROWS, CatalogDatabase
from snapshotd.catalog.lookup import read_row, snapshot_numbers
from snapshotd.errors import DataLoss
from snapshotd.types import Message, SnapshotID, short


class ConversationTable:
    """The messages that an agent has seen up to a snapshot, and the state that it had there. `SnapshotTable.commit` adds both."""

    def __init__(self, db: CatalogDatabase) -> None:
        self._db = db

    def own(self, snapshot_id: SnapshotID) -> list[Message]:
        """The messages that this snapshot added to the conversation that it continues. NotFound."""
        row = read_row(
            self._db,
            "snapshot",
            snapshot_id,
            "SELECT s.line, CASE WHEN p.line = s.line THEN p.messages ELSE l.kept END, s.messages"
            " FROM snapshots s JOIN lines l ON l.pk = s.line LEFT JOIN snapshots p ON p.pk = coalesce(s.follows, s.parent) WHERE s.id = ?",
        )
        return list(self._messages(snapshot_id, [row]))

    def read(self, snapshot_id: SnapshotID, start: int = 0) -> Iterator[Message]:
        """The conversation up to a snapshot, from message number `start`, across forks and rewinds. NotFound, at the call.
        Cost: the messages that it yields, and one query per fork or rewind on the way."""
        start, segments = max(start, 0), []
        with self._db.lock:
            number: int | None
            number, end = snapshot_numbers(self._db, snapshot_id)
            while number is not None and end > start:
                row = self._db.read_one(
                    "SELECT l.pk, l.kept, l.forked_from FROM snapshots s JOIN lines l ON l.pk = s.line WHERE s.pk = ?",
                    (number,),
                )
                assert row is not None
                line, kept, number = row
                if end > kept:
                    segments.append((line, max(kept, start), end))
                    end = kept
        return self._messages(snapshot_id, segments[::-1])

    def _messages(self, snapshot_id: SnapshotID, segments: list[Any]) -> Iterator[Message]:
        for line, position, end in segments:
            while position < end:
                page = self._db.read_page(
                    "SELECT position, role, content FROM messages WHERE line = ? AND position >= ? AND position < ? ORDER BY position",
                    (line, position, end),
                    rows=PAGE_ROWS,
                    size=PAGE_CHARS,
                )
                if [row[0] for row in page] != list(range(position, position + len(page))) or not page:
                    snapshot_numbers(self._db, snapshot_id)  # NotFound: removed while it was read
                    raise DataLoss(
                        f"message {position} of snapshot {short(snapshot_id)} is missing: restore the catalog from a backup"
                    )
                yield from map(rows.decode_message, page)
                position += len(page)

    def state(self, snapshot_id: SnapshotID) -> dict[str, Any]:
        """The agent's state as it was saved with a snapshot, or with the nearest one that it continues; {} at the
        beginning. NotFound."""
        row = read_row(
            self._db,
            "snapshot",
            snapshot_id,
            "SELECT s.id, k.content FROM snapshots s LEFT JOIN states k ON k.pk = s.agent_state WHERE s.id = ?",
        )
        with rows.intact("the agent's state at snapshot", row):
            return {} if row[1] is None else dict(json.loads(row[1]))

    def own_state(self, snapshot_id: SnapshotID) -> dict[str, Any] | None:
        """The agent's state if this snapshot changed it; None if it has the state of the snapshot that it continues.
        NotFound."""
        with self._db.lock:
            (changed,) = read_row(
                self._db,
                "snapshot",
                snapshot_id,
                "SELECT s.agent_state IS DISTINCT FROM p.agent_state FROM snapshots s"
                " LEFT JOIN snapshots p ON p.pk = coalesce(s.follows, s.parent) WHERE s.id = ?",
            )
            return self.state(snapshot_id) if changed else None
