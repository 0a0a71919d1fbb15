"""`snapshotd deny`."""

from __future__ import annotations

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.commands.history.approval import report_decisions
from snapshotd.cli.values import complete_approval


@declare("deny", examples=["snapshotd deny a1b2c3 --reason 'the amount is wrong'"])
@click.option("--reason", metavar="TEXT", help="Why; the agent is told.")
@click.option("--by", metavar="NAME", help="Name of the decider; default: the user who runs this.")
@json_option
@click.argument("approvals", metavar="ID...", nargs=-1, required=True, shell_complete=complete_approval)
def command(ctx: click.Context, approvals: tuple[str, ...], reason: str | None, by: str | None, as_json: bool) -> None:
    """Refuse a call that waits for approval.

    The agent gets an error that names who refused it and why, and goes on. With --json: an array of approvals as
    `approvals --json` has them.
    """
    client = connect(ctx)
    report_decisions((client.deny(each, by=by, reason=reason) for each in approvals), as_json=as_json)
