"""`snapshotd export --format html`: trajectories as one HTML file that opens without a server. It has what the page shows
of them, but for their files."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from snapshotd.api import operations as op
from snapshotd.api.operation import Operation
from snapshotd.client.transport import Transport
from snapshotd.client.twofold import iterate, run
from snapshotd.errors import NotFound
from snapshotd.page.bundle import join_page
from snapshotd.terms import number_of, short

CALLS_MAX = 2000
"""Newest calls of each trajectory."""
PART_MAX_BYTES = 64 << 10
"""Bytes kept of each output, message and patch; the rest is cut."""
DATA_MAX_BYTES = 64 << 20
"""Bytes kept of all outputs, messages and patches together; later ones are left out."""
Progress = Callable[[str], object]
_FILE_MAX_BYTES, _OMITTED_MAX = 2 << 20, 100
"""Larger files are named in a patch, and not in it; so many of them."""
_PAGE = 200


def export_page(
    socket_path: Path, refs: Sequence[str], *, forks: bool = False, progress: Progress | None = None
) -> tuple[str, tuple[str, ...]]:
    """Return the file's text, and a sentence for each thing that it lacks. `refs`: trajectories, or snapshots for the whole
    trajectory of each; with `forks` all that were forked from them, too. NotFound."""
    saving = _Saving(Transport(socket_path), progress or (lambda line: None))
    chosen = saving.choose(refs, forks)
    data = saving.save(chosen)
    names = ", ".join(one["trajectory"]["name"] or short(one["trajectory"]["id"]) for one in chosen[:3])
    return join_page(data, f"{names} · snapshotd"), tuple(data["notes"])


class _Saving:
    def __init__(self, transport: Transport, progress: Progress) -> None:
        self._transport, self._progress = transport, progress
        self._left = DATA_MAX_BYTES
        self._cut = self._omitted = 0
        self._data: dict[str, Any] = {
            name: {} for name in ("logs", "messages", "outputs", "patches", "journals", "answers")
        }

    def choose(self, refs: Sequence[str], forks: bool) -> list[dict[str, Any]]:
        """Return the overviews of the trajectories, oldest first."""
        every = self._get(op.OVERVIEW)
        ids = {one["trajectory"]["id"] for one in every}
        names = {one["trajectory"]["name"]: one["trajectory"]["id"] for one in every}
        wanted = {names.get(ref) or (ref if ref in ids else self._trajectory_of(ref)) for ref in refs}
        if forks:
            for one in every:  # a fork is younger than what it was forked from
                if one["origin"] is not None and one["origin"]["trajectory"] in wanted:
                    wanted.add(one["trajectory"]["id"])
        return [one for one in every if one["trajectory"]["id"] in wanted]

    def save(self, chosen: list[dict[str, Any]]) -> dict[str, Any]:
        """Read all about these trajectories. Returns `Saved` in static/saved.js."""
        notes = []
        for one in chosen:
            trajectory = one["trajectory"]
            self._progress(f"reading {trajectory['name'] or short(trajectory['id'])}")
            log = self._get(op.LOG, trajectory["id"], last=CALLS_MAX)
            if len(log) < one["snapshots"]:
                notes.append(
                    f"{trajectory['name'] or short(trajectory['id'])}: the newest {len(log)} of {number_of(one['snapshots'], 'call')}"
                )
            one["snapshots"] = len(log)
            self._data["logs"][trajectory["id"]] = log
            self._data["answers"][f"/trajectories/{trajectory['id']}/effects"] = self._get(op.EFFECTS, trajectory["id"])
            has_tasks = bool(self._get(op.TASKS, trajectory["id"]))
            for at, taken in enumerate(log):
                self._save_call(taken, log[at - 1] if at else None, has_tasks)
        if self._cut:
            notes.append(f"{number_of(self._cut, 'text')} cut at {PART_MAX_BYTES >> 10} KiB; `snapshotd ui` shows all")
        if self._omitted:
            notes.append(
                f"{number_of(self._omitted, 'text')} left out: the file holds at most {DATA_MAX_BYTES >> 20} MiB of them"
            )
        made_at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        return {"made_at": made_at, "notes": notes, "overview": chosen, **self._data}

    def _save_call(self, taken: dict[str, Any], before: dict[str, Any] | None, has_tasks: bool) -> None:
        ref = taken["id"]
        for which in taken["tool"]["outputs"]:
            data = b"".join(self._pieces(op.OUTPUT, ref, which, count=PART_MAX_BYTES + 1))
            self._data["outputs"][f"{ref}/{which}"] = base64.b64encode(self._keep_bytes(data)).decode()
        if taken["files"] is None or any(taken["files"][name] for name in ("added", "changed", "deleted")):
            self._save_patch(ref)
        if has_tasks:
            self._data["answers"][f"/snapshots/{ref}/tasks"] = self._get(op.TASKS, ref)
        # A call adds to what was said before the one that it follows; after a rewind or an edit everything is read again.
        follows = before is not None and taken["follows"] in (None, before["id"]) and taken["parent"] == before["id"]
        kept = before["messages"] if before is not None and follows and before["messages"] <= taken["messages"] else 0
        added = [
            self._keep_message(message)
            for start in range(kept, taken["messages"], _PAGE)
            for message in self._get(op.CONVERSATION, ref, start=start, count=min(_PAGE, taken["messages"] - start))
        ]
        self._data["messages"][ref] = {"keep": before["id"] if before is not None and kept else None, "add": added}

    def _save_patch(self, ref: str) -> None:
        patch, outside = b"", 0
        omitted: list[dict[str, Any]] = []
        query: dict[str, str | int | bool | None] = {"a": ref, "max_file_bytes": _FILE_MAX_BYTES}
        for event in iterate(run(self._transport.lines(*op.PATCH.at(), query=query))):
            if event["event"] == "end":
                outside = event["outside"]
            elif event["event"] == "omitted":
                omitted.append({"path": event["path"], "bytes": event["bytes"]})
            elif len(patch) <= PART_MAX_BYTES:
                patch += base64.b64decode(event["data_b64"])
        whole = self._keep_bytes(patch)
        if len(whole) < len(patch):
            whole = whole[: whole.rfind(b"\n") + 1] + b" ...\n"
        data = base64.b64encode(whole).decode()
        self._data["patches"][ref] = {"data_b64": data, "outside": outside, "omitted": omitted[:_OMITTED_MAX]}

    def _keep_message(self, message: dict[str, Any]) -> dict[str, Any]:
        text = json.dumps(message["content"])
        if len(text) <= min(PART_MAX_BYTES, self._left):
            self._left -= len(text)
            return message
        kept = self._keep_bytes(text.encode()).decode(errors="replace")
        return {"role": message["role"], "content": f"{kept} ..."}

    def _keep_bytes(self, data: bytes) -> bytes:
        if len(data) > self._left:
            self._omitted += 1
            return b""
        kept = data[:PART_MAX_BYTES]
        self._cut += len(kept) < len(data)
        self._left -= len(kept)
        return kept

    def _trajectory_of(self, ref: str) -> str:
        try:
            return str(self._get(op.TRAJECTORY, ref)["id"])
        except NotFound:
            return str(self._get(op.SNAPSHOT, ref)["trajectory"])

    def _get(self, operation: Operation[Any], *names: str, **query: Any) -> Any:
        method, path = operation.at(*names)
        return run(self._transport.request(method, path, query=query))

    def _pieces(self, operation: Operation[Any], *names: str, **query: Any) -> Iterator[bytes]:
        return iterate(run(self._transport.pieces(*operation.at(*names), query=query)))
