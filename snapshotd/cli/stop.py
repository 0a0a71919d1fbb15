"""`snapshotd stop`."""

from __future__ import annotations

import dataclasses

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.text import print_json
from snapshotd.cli.values import complete_trajectory


@declare("stop", examples=["snapshotd stop box", "snapshotd stop $(snapshotd ps -q)"])
@json_option
@click.argument("trajectories", metavar="TRAJECTORY...", nargs=-1, required=True, shell_complete=complete_trajectory)
@click.pass_context
def command(ctx: click.Context, trajectories: tuple[str, ...], as_json: bool) -> int:
    """End sandboxes after a last snapshot.

    A stopped trajectory goes on from its head: `exec` starts its sandbox again. Not an error when it is stopped already.
    With --json: an array of the trajectories.
    """
    client = connect(ctx)
    stopped = []
    for ref in trajectories:
        stopped.append(client.stop(ref))
        if not as_json:
            click.echo(ref)
    if as_json:
        print_json([dataclasses.asdict(item) for item in stopped])
    return 0
