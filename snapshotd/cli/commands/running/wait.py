"""`snapshotd wait`."""

from __future__ import annotations

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.follow import end_of_run
from snapshotd.cli.text import print_json
from snapshotd.cli.values import complete_trajectory


@declare("wait", examples=["snapshotd wait nightly", "snapshotd wait --json nightly | jq .status"], docker_codes=True)
@json_option
@click.argument("trajectory", shell_complete=complete_trajectory)
@click.pass_context
def command(ctx: click.Context, trajectory: str, as_json: bool) -> int:
    """Wait until a run has ended.

    Prints nothing and ends with the agent's exit code, at once if it has ended before; 125 when snapshotd failed, or no
    agent ever ran. With --json: {"trajectory","exit_code","status"}.
    """
    client = connect(ctx)
    identity = client.trajectory(trajectory).id
    code = end_of_run(client.events(identity), identity)
    if as_json:
        print_json({"trajectory": identity, "exit_code": code, "status": client.trajectory(identity).status})
    return code
