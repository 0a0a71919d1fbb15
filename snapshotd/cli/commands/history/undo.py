"""`snapshotd undo`."""

from __future__ import annotations

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.snapshots import report_snapshot
from snapshotd.cli.values import complete_trajectory
from snapshotd.cli.waiting import Wait, wait_option


@declare("undo", examples=["snapshotd rewind box a1b2c3 && snapshotd undo box"])
@wait_option
@json_option
@click.argument("trajectory", shell_complete=complete_trajectory)
def command(ctx: click.Context, trajectory: str, wait: Wait | None, as_json: bool) -> None:
    """Take the last rewind, promotion or merge of a trajectory back.

    Files, conversation, journal and state return to the point before it. Refused when steps were taken since. The undo
    can be undone, too. Compensations that the rewind ran stay run. With --json: the new snapshot as `log --json` has
    it.
    """
    client = connect(ctx)
    report_snapshot(client, client.undo(trajectory, wait=wait or "captured"), wait, as_json=as_json)
