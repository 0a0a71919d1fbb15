"""`snapshotd logs`."""

from __future__ import annotations

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.follow import logs
from snapshotd.cli.values import complete_trajectory


@declare(
    "logs", examples=["snapshotd logs nightly", "snapshotd logs -f nightly", "snapshotd logs nightly | grep -i error"]
)
@click.option("-f", "--follow", "following", is_flag=True, help="Go on until the run has ended.")
@json_option
@click.argument("trajectory", shell_complete=complete_trajectory)
@click.pass_context
def command(ctx: click.Context, trajectory: str, following: bool, as_json: bool) -> int:
    """Print what a run has printed so far.

    From its beginning, standard output and standard error each to its own. `snapshotd attach` follows it and shows its
    snapshots, too. The exit code is 0 whatever the run's is. With --json: its events, one per line.
    """
    client = connect(ctx)
    logs(client, client.trajectory(trajectory).id, as_json=as_json, following=following)
    return 0
