"""The output of a command that made one snapshot."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import click

from snapshotd.cli.text import print_json, printable, snapshot_line
from snapshotd.cli.waiting import Wait
from snapshotd.client.client import Snapshotd
from snapshotd.client.results import SnapshotInfo
from snapshotd.terms import short

_COUNT_S = 0.5
_IN_LOG = [
    "id",
    "parent",
    "trajectory",
    "seq",
    "tool",
    "files",
    "state",
    "pause_ms",
    "created_at",
    "tags",
    "warnings",
    "refused",
    "reused",
]
_IN_DETAILS = ["image", "layers", "follows", "side_effect", "sub_agent", "model_use"]
_BACK = ("rewind", "undo", "promote", "retry", "merge")
_TOOL_IN_LOG = ["name", "arguments", "status", "exit_code", "duration_ms"]
"""The parts of a snapshot, and of its call, that `log --json` prints."""


def wait_for_counts(client: Snapshotd, taken: SnapshotInfo) -> SnapshotInfo:
    """Wait a moment until the daemon has counted the snapshot's changes. Returns the snapshot, perhaps without counts."""
    deadline = time.monotonic() + _COUNT_S
    while taken.files is None and time.monotonic() < deadline:
        time.sleep(0.02)
        taken = client.snapshot(taken.id)
    return taken


def summary_line(taken: SnapshotInfo, *, with_state: bool) -> str:
    """Return the one line that tells of a snapshot."""
    return snapshot_line(
        seq=taken.seq,
        snapshot_id=taken.id,
        tool=taken.tool.name,
        status=taken.tool.status,
        pause_ms=taken.pause_ms,
        files=None if taken.files is None else dataclasses.asdict(taken.files),
        method=taken.method,
        state=taken.state if with_state else None,
    )


def report_snapshot(client: Snapshotd, taken: SnapshotInfo, wait: Wait | None, *, as_json: bool) -> None:
    """One line on standard error, or with `as_json` the snapshot as `log --json` has it. Behind a change of the past, a line for
    each service that did not come back, too."""
    if taken.tool.name in _BACK:
        _report_services(client, taken)
    taken = wait_for_counts(client, taken)
    if as_json:
        print_json(snapshot_json(taken))
        return
    click.echo(summary_line(taken, with_state=wait is not None), err=True)
    _report_folder(taken)


def _report_services(client: Snapshotd, taken: SnapshotInfo) -> None:
    """Report the services that were started again after this snapshot, and failed."""
    for one in client.commands(taken.trajectory):
        if one.service_state == "failed" and one.started_at > taken.created_at:
            where = f"`snapshotd logs {short(taken.trajectory)} {one.service}` has its output"
            said = printable(one.error or "it has ended")
            click.echo(f"snapshotd: the service {one.service} did not come back: {said}; {where}", err=True)


def _report_folder(taken: SnapshotInfo) -> None:
    """Report a rewind in a user's own folder: the files that had to stay, and on standard output the command that goes on with
    the agent's session."""
    told = taken.tool.arguments
    if taken.tool.name not in ("rewind", "undo") or not isinstance(told, dict):
        return
    for sentence in told.get("left", ()):
        click.echo(printable(sentence), err=True)
    if "resume" in told:
        click.echo(printable(told["resume"]))


def snapshot_json(item: SnapshotInfo) -> dict[str, Any]:
    """One snapshot as `log --json` prints it."""
    answer = {name: getattr(item, name) for name in _IN_LOG}
    answer["tool"] = {name: getattr(item.tool, name) for name in _TOOL_IN_LOG}
    return answer | {"kind": item.kind, "published": item.published}


def state_text(item: SnapshotInfo) -> str:
    """Return the snapshot's state, and `unpublished` while the other nodes of a fleet cannot read it."""
    return f"{item.state}, unpublished" if item.published is False else item.state


def details_json(item: SnapshotInfo) -> dict[str, Any]:
    """One snapshot as `show --json` prints it."""
    answer = snapshot_json(item)
    answer["tool"] |= {
        "error": item.tool.error,
        "outputs": item.tool.outputs,
        "damaged": item.tool.damaged,
        "started_at": item.tool.started_at,
    }
    more = {name: getattr(item, name) for name in _IN_DETAILS}
    return answer | {"method": item.method, "message_count": item.messages, **more}
