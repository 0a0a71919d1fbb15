"""`snapshotd promote`."""

from __future__ import annotations

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.follow import patience
from snapshotd.cli.snapshots import report_snapshot
from snapshotd.cli.values import complete_trajectory
from snapshotd.cli.waiting import Wait, wait_option


@declare("promote", examples=["snapshotd promote way-warm", "snapshotd promote --yes way-warm && snapshotd undo box"])
@click.option(
    "--into",
    metavar="TRAJECTORY",
    shell_complete=complete_trajectory,
    help="The one that takes it over, if not the one it was forked from: one further up.",
)
@click.option("-y", "--yes", is_flag=True, help="Leave behind what that one did since the fork.")
@click.option(
    "--compensate", is_flag=True, help="The same, and run compensations of irreversible calls among it, newest first."
)
@wait_option
@json_option
@click.argument("branch", shell_complete=complete_trajectory)
def command(
    ctx: click.Context, branch: str, into: str | None, yes: bool, compensate: bool, wait: Wait | None, as_json: bool
) -> None:
    """Make a fork the head of the trajectory that it came from.

    The trajectory takes over files, conversation, journal and state, as a new snapshot: nothing is lost, `snapshotd
    undo` takes it back, and the fork stays as it is. Refused when the trajectory went on since the fork, unless --yes
    or --compensate, and while something runs in either. Program, arguments and environment of the trajectory stay its
    own. With --json: the new snapshot as `log --json` has it.
    """
    client = connect(ctx)
    with patience():
        taken = client.promote(branch, into=into, leave_behind=yes, compensate=compensate, wait=wait or "captured")
    report_snapshot(client, taken, wait, as_json=as_json)
