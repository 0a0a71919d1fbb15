"""The JSON of the API: everything that it says goes through `json_bytes`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from snapshotd.api.approvals import ApprovalView
from snapshotd.api.forms import iso_time
from snapshotd.api.record import ApiRecord, Json, encode
from snapshotd.engine import base
from snapshotd.engine.experiments import base as trials
from snapshotd.engine.records import as_records, make_record, record_of
from snapshotd.scores import ExperimentInfo, ScoredRun


def json_bytes(value: Any) -> bytes:
    """JSON in ASCII; records and values of the engine may stand in `value`. Text that programs in sandboxes left may hold
    lone surrogates, for which UTF-8 has no bytes: here an escape stands for each."""
    return json.dumps(value, separators=(",", ":"), default=_encode).encode()


def event(name: str, value: Any) -> Json:
    """An event with the members of a value's record."""
    return {"event": name, **_encode(value)}


def _encode(value: Any) -> Json:
    if isinstance(value, ExperimentInfo):
        return value.json()
    return encode(value if isinstance(value, ApiRecord) else record_of(value))


def approval_view(view: base.ApprovalView, most: int) -> ApprovalView:
    """At most so many changes are listed."""
    return make_record(ApprovalView, view, changes=as_records(view.files[:most]), more=len(view.files) > most)


def run_event(told: Json) -> Json:
    """An event of a run in the API's words. Event logs of earlier versions are read, too, so the engine keeps its own."""
    words = _EVENT_WORDS.get(told["event"], {})
    return {words.get(key, key): value for key, value in told.items()}


_EVENT_WORDS = {
    "started": {"image": "image_name"},
    "snapshot": {"tool": "name"},
    "approval": {"tool": "name"},
    "replayed": {"tool": "name"},
    "finished": {"snapshots": "snapshot_count", "reused": "reuse"},
}
"""Event to the words of the engine that mean something else elsewhere in the API."""


def command_event(told: Json) -> Json:
    """An event of a command with its times as text."""
    times = {f"{name}_at": f"{name}_at_ns" for name in ("began", "ended") if f"{name}_at_ns" in told}
    kept = {key: value for key, value in told.items() if key not in times.values()}
    return {**kept, **{name: iso_time(told[key]) for name, key in times.items()}}


# -- comparisons, scores, bisections -----------------------------------------------------------------------------------


def run_json(row: trials.SnapshotScores, run: ScoredRun) -> Json:
    """One run, and the snapshot that it scored."""
    return {"ref": row.ref, "snapshot": row.snapshot, "run": asdict(run)}


def row_json(row: trials.SnapshotScores) -> Json:
    """A scored snapshot: its place, its runs and their statistics."""
    runs = [asdict(run) for run in row.runs]
    return {"ref": row.ref, "snapshot": row.snapshot, **row.statistics(), "error": row.error, "runs": runs}
