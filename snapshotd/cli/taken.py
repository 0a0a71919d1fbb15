"""What a command that made one snapshot says about it."""

from __future__ import annotations

import dataclasses

import click

from snapshotd.cli.log import snapshot_json
from snapshotd.cli.text import print_json, snapshot_line
from snapshotd.cli.waiting import Wait
from snapshotd.client.client import Snapshotd
from snapshotd.client.results import SnapshotInfo


def report_taken(client: Snapshotd, taken: SnapshotInfo, wait: Wait | None, *, as_json: bool) -> None:
    """One line on standard error, or with `as_json` the snapshot as `log --json` has it."""
    if taken.files is None:
        taken = client.snapshot(taken.id)  # which waits for the count
    if as_json:
        print_json(snapshot_json(taken))
        return
    click.echo(snapshot_line(
        seq=taken.seq, snapshot_id=taken.id, tool=taken.tool.name, status=taken.tool.status, pause_ms=taken.pause_ms,
        files=None if taken.files is None else dataclasses.asdict(taken.files), method=taken.method,
        state=None if wait is None else taken.state,
    ), err=True)  # fmt: skip
