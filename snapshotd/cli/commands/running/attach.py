"""`snapshotd attach`."""

from __future__ import annotations

import io

import click

from snapshotd.cli.background import attach_command
from snapshotd.cli.command import connect, declare, json_option, refuse, standard_input
from snapshotd.cli.follow import follow
from snapshotd.cli.values import complete_command, complete_trajectory


@declare(
    "attach",
    examples=[
        "snapshotd attach nightly",
        "snapshotd attach --json a1b2c3 | jq .event",
        "snapshotd attach -i box 3c2f   # a background command",
    ],
    docker_codes=True,
)
@click.option("-q", "--quiet", is_flag=True, help="Only the output: no line per snapshot.")
@json_option
@click.option("-i", "--interactive", is_flag=True, help="Send standard input to a background command.")
@click.argument("trajectory", shell_complete=complete_trajectory)
@click.argument("background", metavar="[COMMAND]", required=False, shell_complete=complete_command)
def command(
    ctx: click.Context, trajectory: str, background: str | None, interactive: bool, quiet: bool, as_json: bool
) -> int:
    """Follow a run, or a background command, from its beginning.

    Shows the output that `snapshotd run` or `snapshotd exec` would have shown and ends with the exit code. Ctrl-C leaves;
    the run goes on. COMMAND is a background command of the trajectory (`snapshotd ps TRAJECTORY`); with -i it gets this
    command's standard input, if it was started with -i.
    """
    client = connect(ctx)
    if background is not None:
        source = (standard_input() or io.BytesIO()) if interactive else None
        return attach_command(client, trajectory, background, source, as_json=as_json, quiet=quiet)
    if interactive:
        refuse("a run has no standard input; name a background command behind the trajectory, or leave out -i")
    return follow(client, client.trajectory(trajectory).id, as_json=as_json, quiet=quiet, stop_on_interrupt=False)
