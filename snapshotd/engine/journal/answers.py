"""The answer that a program gets for a recorded call: its outcome, with its secrets revealed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from snapshotd.engine.context import Context
from snapshotd.engine.journal.replay import Recorded
from snapshotd.engine.protocol.agent_handler import Answer
from snapshotd.errors import DataLoss, LimitExceeded, NotFound
from snapshotd.secrets.redactor import Funnel
from snapshotd.types import JournalEntry

MAX_REPLAYED_BYTES = 64 << 20
"""Size limit of a recorded result that is handed out again: the daemon holds it in memory."""
MAX_SHOWN_BYTES = 1 << 20
"""Size limit of a result that a list of entries shows."""


def with_result(context: Context, entry: JournalEntry) -> JournalEntry:
    """The entry with the result that its call's snapshot has; it stays None where `result_of` does not know it."""
    result, _ = result_of(context, entry, MAX_SHOWN_BYTES)
    return replace(entry, result=result)


def result_of(context: Context, entry: JournalEntry, limit_bytes: int) -> tuple[Any, bool]:
    """A call's result, and True if it is known. It is unknown if it is longer than `limit_bytes`, no JSON, damaged or
    gone. Markers of secrets stay."""
    if entry.snapshot is None or entry.result is not None:
        return entry.result, True
    text = bytearray()
    try:
        snapshot = context.catalog.snapshots.get(entry.snapshot)
        pieces = context.recorded_output(snapshot, "output") if snapshot.call.id == entry.id else None
        if pieces is None:
            return None, True
        for piece in pieces:
            text += piece
            if len(text) > limit_bytes:
                return None, False
        return json.loads(bytes(text)), True
    except (NotFound, DataLoss, ValueError):
        return None, False


def reveal_entry(funnel: Funnel, entry: JournalEntry) -> JournalEntry:
    """The entry with its secrets revealed, as the program knows it."""
    error = None if entry.error is None else funnel.reveal_text(entry.error)
    return replace(entry, result=funnel.reveal(entry.result), error=error)


def as_recorded(context: Context, funnel: Funnel, recorded: Recorded) -> Answer:
    """The fields of an answer to `call_begin`. LimitExceeded; NotFound or DataLoss: the result is gone."""
    entry, snapshot = recorded.entry, recorded.snapshot
    replayed: dict[str, Any] = {
        "status": entry.status,
        "error": entry.error,
        "exit_code": None,
        "snapshot": entry.snapshot,
    }
    answer: Answer = {"replayed": replayed}
    if snapshot is None:
        replayed["result"] = entry.result
        return answer
    error = None if snapshot.call.error is None else funnel.reveal_text(snapshot.call.error)
    replayed.update(status=snapshot.call.status, error=error, exit_code=snapshot.call.exit_code)
    result = context.recorded_output(snapshot, "output")
    if result is not None:
        answer["body"] = _whole(result, funnel)
    return answer


def _whole(result: Iterator[bytes], funnel: Funnel) -> bytes:
    pieces, size = [], 0
    for piece in funnel.reveal_stream(result):
        size += len(piece)
        if size > MAX_REPLAYED_BYTES:
            raise LimitExceeded(
                f"a recorded result of more than {MAX_REPLAYED_BYTES} bytes cannot be replayed; rewind to before it"
            )
        pieces.append(piece)
    return b"".join(pieces)
