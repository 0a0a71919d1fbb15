"""`snapshotd rm`."""

from __future__ import annotations

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.text import print_json
from snapshotd.cli.values import complete_trajectory


@declare("rm", examples=["snapshotd rm box", "snapshotd rm --force box"])
@click.option("-f", "--force", is_flag=True, help="Stop a running sandbox first.")
@json_option
@click.argument("trajectories", metavar="TRAJECTORY...", nargs=-1, required=True, shell_complete=complete_trajectory)
@click.pass_context
def command(ctx: click.Context, trajectories: tuple[str, ...], force: bool, as_json: bool) -> int:
    """Forget trajectories and free what only they used.

    Their snapshots, conversations and tags go with them. Refused while a sandbox runs (unless --force) or forks exist,
    and for a tag or a snapshot: `snapshotd tag --delete` takes a tag away.
    With --json: {"removed":[ids]}.
    """
    client = connect(ctx)
    removed = []
    for ref in trajectories:
        full = client.trajectory(ref).id
        client.remove(ref, force=force)  # as the user typed it: the daemon refuses the name of a snapshot
        removed.append(full)
        if not as_json:
            click.echo(ref)
    if as_json:
        print_json({"removed": removed})
    return 0
