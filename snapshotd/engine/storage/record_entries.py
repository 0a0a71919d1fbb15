"""Journal entries in a record: to JSON and back. The input may be hostile; a malformed value raises ValueError."""

from __future__ import annotations

import json
from typing import Any

from snapshotd.engine.storage.record_fields import ANY_TIME, ID, Fields, shallow
from snapshotd.types import CallID, CallStatus, EntryKind, JournalEntry, SideEffect, Snapshot, SnapshotID, ToolCall

_MAX_NUMBER = 1 << 53
"""Greatest place in a line: every reader of JSON keeps it exactly, and it is far below the catalog's limit."""


def entry_document(entry: JournalEntry, call: ToolCall) -> dict[str, Any]:
    """An entry as a record has it; `call` is the call of the snapshot that binds it."""
    document = {
        "id": entry.id,
        "kind": entry.kind.value,
        "name": entry.name,
        "after": entry.after,
        "began_at_ns": entry.began_at_ns,
        "side_effect": entry.side_effect.value,
        "key": entry.key,
        "status": None if entry.status is None else entry.status.value,
        "ended_at_ns": entry.ended_at_ns,
        "error": entry.error,
        "facts": list(entry.facts),
        "details": entry.details,
        "result": entry.result,
        "number": entry.number,
    }
    if entry.id != call.id or json.dumps(entry.arguments) != json.dumps(call.arguments):  # == finds 1 and true equal
        document["arguments"] = entry.arguments
    return document


def read_entries(items: list[Any], snapshot: Snapshot) -> tuple[JournalEntry, ...]:
    """The entries that a snapshot binds, in the order in which they began."""
    entries = tuple([_read(Fields(item, "entries"), snapshot) for item in items])
    numbers = [entry.number for entry in entries]
    if numbers != sorted(set(numbers)) or len({entry.id for entry in entries}) != len(entries):
        raise ValueError("its journal has one entry twice, or is out of order")
    return entries


def _read(fields: Fields, snapshot: Snapshot) -> JournalEntry:
    entry_id, number = CallID(fields.text("id", ID)), fields.integer("number")
    if number > _MAX_NUMBER:
        raise ValueError("entries.number is too large")
    if not fields.has("arguments") and entry_id != snapshot.call.id:
        raise ValueError("entries.arguments is missing")
    arguments = shallow(fields.value("arguments")) if fields.has("arguments") else snapshot.call.arguments
    return JournalEntry(
        entry_id,
        fields.one_of("kind", EntryKind),
        fields.text("name"),
        arguments,
        SnapshotID(fields.text("after", ID)),
        fields.integer("began_at_ns", ANY_TIME),
        fields.one_of("side_effect", SideEffect),
        fields.text_or_none("key"),
        fields.one_of("status", CallStatus),
        fields.integer("ended_at_ns", ANY_TIME),
        shallow(fields.value("result")),
        fields.text_or_none("error"),
        tuple([shallow(fact) for fact in fields.items("facts")]),
        shallow(fields.within("details").whole),
        snapshot.id,
        number,
    )
