"""`snapshotd df`."""

from __future__ import annotations

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.text import print_json, size, status, table


@declare("df", examples=["snapshotd df", "snapshotd df --json | jq .repository_bytes"])
@json_option
def command(ctx: click.Context, as_json: bool) -> None:
    """Show what takes space.

    Layers hold the changes of each step, ready to mount; layers of stored snapshots go when their budget is used up,
    and come back when they are needed. The repository holds every stored snapshot, deduplicated and compressed. The
    spool holds outputs that are not in the repository yet. The cache, on a node of a fleet, holds parts of the
    repository that were read. With --json:
    {layer_bytes,layer_budget_bytes,repository_bytes,spool_bytes,states,unarchived,cache_bytes,cache_budget_bytes}.
    """
    usage = connect(ctx).usage()
    if as_json:
        print_json(usage)
        return
    rows = [
        ("layers", size(usage.layer_bytes), size(usage.layer_budget_bytes)),
        ("repository", size(usage.repository_bytes), "-"),
        ("spool", size(usage.spool_bytes), "-"),
    ]
    if usage.cache_budget_bytes:
        rows.append(("cache", size(usage.cache_bytes), size(usage.cache_budget_bytes)))
    table(("TYPE", "SIZE", "BUDGET"), rows, right=(1, 2))
    click.echo()
    counts = [(status(state), str(count)) for state, count in usage.states.items()]
    table(("SNAPSHOTS", "COUNT"), counts, right=(1,))
    if usage.unarchived:
        click.echo(f"{usage.unarchived} of them wait to be stored")
