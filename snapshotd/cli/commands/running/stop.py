"""`snapshotd stop`."""

from __future__ import annotations

import dataclasses

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.text import print_json
from snapshotd.cli.values import complete_trajectory
from snapshotd.cli.waiting import Wait, state_of, wait_option


@declare("stop", examples=["snapshotd stop box", "snapshotd stop $(snapshotd ps -q)"])
@click.option("--discard", is_flag=True, help="Without a last snapshot: what changed since the newest one is lost.")
@wait_option
@json_option
@click.argument("trajectories", metavar="TRAJECTORY...", nargs=-1, required=True, shell_complete=complete_trajectory)
def command(ctx: click.Context, trajectories: tuple[str, ...], discard: bool, wait: Wait | None, as_json: bool) -> None:
    """End sandboxes after a last snapshot.

    Commands that `exec` runs in it are cut off and recorded as interrupted. A stopped trajectory goes on from its head:
    `exec` starts its sandbox again. Not an error when it is stopped already. Where the disk is full and there is no room
    for the snapshot, the sandbox goes on, unless --discard.
    With --json: an array of the trajectories.
    """
    client = connect(ctx)
    stopped = []
    for ref in trajectories:
        done = client.stop(ref, discard=discard, wait=wait or "captured")
        stopped.append({**dataclasses.asdict(done), **({} if wait is None else {"state": state_of(client, done.head)})})
        if not as_json:
            click.echo(ref)
    if as_json:
        print_json(stopped)
