"""`snapshotd ps`."""

from __future__ import annotations

import dataclasses

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.text import ago, print_json, shown_id, table


@declare("ps", examples=["snapshotd ps", "snapshotd stop $(snapshotd ps -q)"])
@click.option("-q", "--quiet", is_flag=True, help="Only the trajectories' ids.")
@click.option("--no-trunc", is_flag=True, help="Whole ids.")
@json_option
@click.pass_context
def command(ctx: click.Context, quiet: bool, no_trunc: bool, as_json: bool) -> int:
    """List live sandboxes.

    With --json: an array.
    """
    found = connect(ctx).sandboxes()
    if as_json:
        print_json([dataclasses.asdict(item) for item in found])
        return 0
    if quiet:
        for item in found:
            click.echo(shown_id(item.trajectory.id, full=no_trunc))
        return 0
    rows = [
        (
            shown_id(item.trajectory.id, full=no_trunc),
            item.trajectory.name or "-",
            shown_id(item.container, full=no_trunc),
            str(item.pid),
            item.trajectory.runtime,
            "running" if item.agent_running else "-",
            ago(item.started_at),
        )
        for item in found
    ]
    table(("TRAJECTORY", "NAME", "CONTAINER", "PID", "RUNTIME", "AGENT", "STARTED"), rows, right=(3,))
    return 0
