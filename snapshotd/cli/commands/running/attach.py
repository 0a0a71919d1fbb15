"""`snapshotd attach`."""

from __future__ import annotations

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.follow import follow
from snapshotd.cli.values import complete_trajectory


@declare(
    "attach", examples=["snapshotd attach nightly", "snapshotd attach --json a1b2c3 | jq .event"], docker_codes=True
)
@click.option("-q", "--quiet", is_flag=True, help="Only the agent's output: no line per snapshot.")
@json_option
@click.argument("trajectory", shell_complete=complete_trajectory)
@click.pass_context
def command(ctx: click.Context, trajectory: str, quiet: bool, as_json: bool) -> int:
    """Follow a run from its beginning.

    Shows the output that `snapshotd run` would have shown and ends with the agent's exit code. Ctrl-C leaves; the run
    goes on.
    """
    client = connect(ctx)
    return follow(client, client.trajectory(trajectory).id, as_json=as_json, quiet=quiet, stop_on_interrupt=False)
