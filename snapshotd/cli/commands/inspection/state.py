"""`snapshotd state`."""

from __future__ import annotations

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.documents import as_page
from snapshotd.cli.text import print_answer
from snapshotd.cli.values import complete_snapshot


@declare("state", examples=["snapshotd state nightly", "snapshotd state --json a1b2c3 | jq .plan"])
@json_option
@click.argument("snapshot", metavar="ID", shell_complete=complete_snapshot)
def command(ctx: click.Context, snapshot: str, as_json: bool) -> None:
    """Show the agent's state.

    The JSON object that the agent keeps, as it was saved with a snapshot. With --json: the same on one line.
    """
    found = connect(ctx).state(snapshot)
    print_answer(found, as_page(found), as_json=as_json)
