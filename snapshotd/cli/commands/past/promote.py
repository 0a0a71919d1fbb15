"""`snapshotd promote`."""

from __future__ import annotations

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.commands.past import rewind
from snapshotd.cli.values import complete_snapshot
from snapshotd.cli.waiting import Wait, wait_option


@declare("promote", examples=["snapshotd promote best", "snapshotd promote a1b2c3 && snapshotd undo agent"])
@click.option(
    "--compensate", is_flag=True, help="Run the compensations of irreversible calls that are left behind, newest first."
)
@click.option("-y", "--yes", is_flag=True, help="Leave irreversible calls behind without asking.")
@wait_option
@json_option
@click.argument("branch", shell_complete=complete_snapshot)
@click.pass_context
def command(ctx: click.Context, /, branch: str, compensate: bool, yes: bool, wait: Wait | None, as_json: bool) -> int:
    """Make a fork's head the head of the trajectory that it was forked from.

    BRANCH is a fork, or a snapshot of one. It adds to the trajectory's history, as `snapshotd rewind` does, and
    `snapshotd undo` takes it back. The fork stays; the trajectory keeps its own program and arguments for a `resume`.
    Refused while processes live in the trajectory's sandbox. With --json: the new snapshot as `log --json` has it.
    """
    base, head = connect(ctx).promotion(branch)
    code: int = ctx.invoke(
        rewind.command,
        trajectory=base,
        snapshot=head,
        mode=None,
        preview=False,
        compensate=compensate,
        yes=yes,
        wait=wait,
        as_json=as_json,
    )
    return code
