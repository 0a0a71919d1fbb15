"""`snapshotd rewind`."""

from __future__ import annotations

import dataclasses

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.log import snapshot_json
from snapshotd.cli.text import print_json, snapshot_line
from snapshotd.cli.values import complete_snapshot, complete_trajectory
from snapshotd.cli.waiting import Wait, wait_option


@declare("rewind", examples=["snapshotd rewind box a1b2c3", "snapshotd rewind box before-the-mess"])
@wait_option
@json_option
@click.argument("trajectory", shell_complete=complete_trajectory)
@click.argument("snapshot", metavar="ID", shell_complete=complete_snapshot)
@click.pass_context
def command(ctx: click.Context, trajectory: str, snapshot: str, wait: Wait | None, as_json: bool) -> int:
    """Give a sandbox the files of an older snapshot, in place.

    In a few milliseconds, and recorded as a new snapshot, so nothing is lost. Refused while processes live in the sandbox.
    With --json: the new snapshot as `log --json` has it.
    """
    client = connect(ctx)
    taken = client.rewind(trajectory, snapshot, wait=wait or "captured")
    if taken.files is None:
        taken = client.snapshot(taken.id)  # which waits for the count
    if as_json:
        print_json(snapshot_json(taken))
        return 0
    click.echo(snapshot_line(
        seq=taken.seq, snapshot_id=taken.id, tool=taken.tool.name, status=taken.tool.status, pause_ms=taken.pause_ms,
        files=None if taken.files is None else dataclasses.asdict(taken.files), method=taken.method,
        state=None if wait is None else taken.state,
    ), err=True)  # fmt: skip
    return 0
