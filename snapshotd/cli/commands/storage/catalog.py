"""`snapshotd catalog migrate`."""

from __future__ import annotations

import click

from snapshotd.cli.command import connect, declare, declare_group, json_option
from snapshotd.cli.progress import Meter
from snapshotd.cli.text import print_json
from snapshotd.terms import number_of

_PLACE = "URL|PATH"


@declare_group("catalog")
def command() -> None:
    """Move the catalog between a file and a PostgreSQL database.

    The catalog has what is known of images, trajectories and snapshots; their files are in the repository.
    """


@declare(
    "migrate",
    group=command,
    examples=[
        "snapshotd catalog migrate --to postgresql://snapshotd@db.example.com/snapshotd",
        "snapshotd catalog migrate --from postgresql:///snapshotd --to /var/lib/snapshotd/catalog.db",
    ],
)
@click.option("--to", "target", metavar=_PLACE, required=True, help="Database, or file, that is to have it.")
@click.option(
    "--from", "source", metavar=_PLACE, help="Database, or file, that has it.  [default: the state directory's file]"
)
@json_option
def migrate(ctx: click.Context, target: str, source: str | None, as_json: bool) -> None:
    """Copy a whole catalog, and compare what came with what left.

    No daemon may run on the files. A file must not exist, a database must have no rows of a catalog: there is all or nothing
    of it afterwards, so after a failure the command can be repeated. The source stays as it is. A database needs
    `pip install 'snapshotd[fleet]'`. With --json: {"row_count","tables":[{"name","row_count","sha256"}]}; the hash is
    that of the table's rows.
    """
    from snapshotd.daemon import wiring

    state_dir = connect(ctx, autostart=False).state_dir
    with Meter("migrating the catalog", quiet=as_json) as meter:
        copied = wiring.migrate_catalog(state_dir, source, target, meter.line)
    count = sum(table.row_count for table in copied)
    if as_json:
        print_json({"row_count": count, "tables": copied})
    else:
        click.echo(f"copied and verified {number_of(count, 'row')} in {number_of(len(copied), 'table')}")
