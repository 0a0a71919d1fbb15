"""`snapshotd approve`."""

from __future__ import annotations

import click

from snapshotd.cli.command import connect, declare, json_option, refuse
from snapshotd.cli.commands.history.approval import report_decisions
from snapshotd.cli.documents import json_file
from snapshotd.cli.values import complete_approval
from snapshotd.client.verbs.history import RECORDED


@declare(
    "approve",
    examples=[
        "snapshotd approve a1b2c3",
        "snapshotd approve a1b2c3 --reason 'checked with ann'",
        "snapshotd approve a1b2c3 --arguments smaller.json",
    ],
)
@click.option("--reason", metavar="TEXT", help="Why; kept with the approval.")
@click.option(
    "--arguments", metavar="FILE", help="Run it with the JSON in FILE (- for standard input) as its arguments instead."
)
@click.option("--by", metavar="NAME", help="Name of the decider; default: the user who runs this.")
@json_option
@click.argument("approvals", metavar="ID...", nargs=-1, required=True, shell_complete=complete_approval)
def command(
    ctx: click.Context,
    approvals: tuple[str, ...],
    reason: str | None,
    arguments: str | None,
    by: str | None,
    as_json: bool,
) -> None:
    """Let a call run that waits for it.

    An approval holds for the tool, the arguments and the files that it was asked for: it is refused (exit code 6) when
    something else would run by now. With --json: an array of approvals as `approvals --json` has them.
    """
    if arguments is not None and len(approvals) > 1:
        refuse("--arguments are for one approval; name only that")
    given = RECORDED if arguments is None else json_file(arguments, "the arguments")
    client = connect(ctx)
    report_decisions(
        (client.approve(each, by=by, reason=reason, arguments=given) for each in approvals), as_json=as_json
    )
