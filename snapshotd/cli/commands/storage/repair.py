"""`snapshotd repair`."""

from __future__ import annotations

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.follow import note
from snapshotd.cli.progress import Meter
from snapshotd.cli.text import print_json, printable
from snapshotd.errors import DataLoss
from snapshotd.terms import number_of


@declare("repair", examples=["snapshotd repair", "snapshotd repair --json"])
@json_option
def command(ctx: click.Context, as_json: bool) -> int:
    """Rebuild damaged parts of the repository from intact ones.

    Takes the index and the catalog from the packs, and contents from layers that still hold them. Snapshots that cannot
    be brought back are marked as lost and listed, and the exit code is then 20. On a healthy repository it does
    nothing. With --json: {actions,lost}.
    """
    client = connect(ctx)
    with Meter("repairing", quiet=as_json) as meter:
        report = client.repair(progress=meter.line)
    if as_json:
        print_json(report)
    else:
        for action in report.actions:
            click.echo(printable(action))
        for lost in report.lost:
            click.echo(f"lost: {lost}")
        if not report.actions and not report.lost:
            click.echo("nothing was wrong")
    if not report.lost:
        return 0
    note(f"the files of {number_of(len(report.lost), 'snapshot')} are gone; calls and conversations are still there")
    return DataLoss.exit_code
