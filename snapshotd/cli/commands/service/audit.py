"""`snapshotd audit`."""

from __future__ import annotations

import click

from snapshotd.api.access import AUDIT_MAX
from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.text import print_list, printable
from snapshotd.cli.values import Count


@declare("audit", examples=["snapshotd audit", "snapshotd audit --last 1000 --json"])
@click.option("--last", metavar="N", type=Count(1, AUDIT_MAX), default=100, show_default=True, help="The newest N.")
@json_option
def command(ctx: click.Context, last: int, as_json: bool) -> None:
    """List who did what.

    Requests of other machines, those that were refused too, and what the daemon's own users changed, recorded while the
    daemon listens for other machines. Oldest first. With --json: an array of
    {"happened_at","caller","token_id","tenant","address","verb","operation","status"}.
    """
    print_list(
        connect(ctx).audit(last=last),
        ("TIME", "CALLER", "TENANT", "FROM", "STATUS", "VERB", "REQUEST"),
        lambda one: (
            one.happened_at[:19],
            printable(one.caller or "-"),
            one.tenant or "(all)" if one.caller else "-",
            one.address or "socket",
            one.status,
            one.verb or "-",
            printable(one.operation),
        ),
        as_json=as_json,
    )
