"""`snapshotd wait`."""

from __future__ import annotations

import click

from snapshotd.cli.background import exit_code_of, wait_for_command
from snapshotd.cli.command import connect, declare, json_option, refuse
from snapshotd.cli.follow import end_of_run
from snapshotd.cli.text import print_json
from snapshotd.cli.values import complete_command, complete_trajectory
from snapshotd.cli.waiting import state_of


@declare(
    "wait",
    examples=[
        "snapshotd wait nightly",
        "snapshotd wait --json nightly | jq .status",
        "snapshotd wait box 3c2f",
        "snapshotd wait --until stored a1b2c3",
    ],
    docker_codes=True,
)
@json_option
@click.argument("trajectory", shell_complete=complete_trajectory)
@click.argument("background", metavar="[COMMAND]", required=False, shell_complete=complete_command)
@click.option(
    "--until", type=click.Choice(["stored", "published"]), help="Until a snapshot (of a trajectory: its head) is so."
)
def command(ctx: click.Context, trajectory: str, background: str | None, until: str | None, as_json: bool) -> int:
    """Wait until a run, or a background command, has ended.

    COMMAND is a background command of the trajectory (`snapshotd ps TRAJECTORY`); without it, the trajectory's run. Prints
    nothing and ends with the exit code of the agent or command, at once if it has ended before; 125 when snapshotd
    failed, no agent ever ran, or the exit code is not known. With --json: {"trajectory","exit_code","status"}, and of a
    command all that `snapshotd ps --json` says.
    With --until stored, TRAJECTORY may be a snapshot, and the exit code is 0 as soon as it survives power loss, and 1
    if its files are lost or were pruned. With --until published it is 0 as soon as the other nodes of the fleet can fork it,
    too. With --json: {"snapshot","state"}.
    """
    client = connect(ctx)
    if until is not None:
        if background is not None:
            refuse(f"--until {until} waits for a snapshot, and a command is none; leave one of them out")
        snapshot = client.snapshot(trajectory)
        client.flush(snapshot.trajectory, published=until == "published")
        state = state_of(client, snapshot.id)
        if as_json:
            print_json({"snapshot": snapshot.id, "state": state})
        return 0 if state == "stored" else 1
    if background is not None:
        done = wait_for_command(client, trajectory, background)
        if as_json:
            print_json(done)
        return exit_code_of(done)
    identity = client.trajectory(trajectory).id
    code = end_of_run(client.events(identity), identity)
    if as_json:
        print_json({"trajectory": identity, "exit_code": code, "status": client.trajectory(identity).status})
    return code
