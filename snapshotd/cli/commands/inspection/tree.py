"""`snapshotd tree`."""

from __future__ import annotations

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.forest import show_forest


@declare("tree", examples=["snapshotd tree", "snapshotd tree --json"])
@click.option("--no-trunc", is_flag=True, help="Whole ids.")
@json_option
def command(ctx: click.Context, no_trunc: bool, as_json: bool) -> None:
    """Show all trajectories as a forest.

    A fork hangs below the snapshot it began at. With --json: an array of trajectories, each with "snapshots" as `log
    --json` has them; "forked_from" is the snapshot that joins a trajectory to its parent.
    """
    show_forest(connect(ctx), full=no_trunc, as_json=as_json)
