"""`snapshotd logs`."""

from __future__ import annotations

import click

from snapshotd.cli.background import command_logs
from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.follow import logs
from snapshotd.cli.values import complete_command, complete_trajectory


@declare(
    "logs",
    examples=[
        "snapshotd logs nightly",
        "snapshotd logs -f nightly",
        "snapshotd logs nightly | grep -i error",
        "snapshotd logs -f box 3c2f   # a background command",
    ],
)
@click.option("-f", "--follow", "following", is_flag=True, help="Go on until it has ended.")
@json_option
@click.argument("trajectory", shell_complete=complete_trajectory)
@click.argument("background", metavar="[COMMAND]", required=False, shell_complete=complete_command)
def command(ctx: click.Context, trajectory: str, background: str | None, following: bool, as_json: bool) -> None:
    """Print what a run, or a background command, has printed so far.

    COMMAND is a background command of the trajectory (`snapshotd ps TRAJECTORY`); without it, the trajectory's run. From
    its beginning, standard output and standard error each to its own. `snapshotd attach` follows it and shows its
    snapshots, too. The exit code is 0 whatever the run's is. With --json: its events, one per line.
    """
    client = connect(ctx)
    if background is not None:
        command_logs(client, trajectory, background, as_json=as_json, following=following)
        return
    logs(client, client.trajectory(trajectory).id, as_json=as_json, following=following)
