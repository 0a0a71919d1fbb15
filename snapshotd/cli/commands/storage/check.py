"""`snapshotd check`."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.follow import note
from snapshotd.cli.progress import Meter
from snapshotd.cli.text import id_text, path_json, print_json, printable, size, table
from snapshotd.client.results import CheckInfo, DamageInfo
from snapshotd.errors import DataLoss
from snapshotd.terms import number_of


@declare(
    "check",
    examples=["snapshotd check", "snapshotd check --read-data", "snapshotd check --json | jq '.damages[].what'"],
)
@click.option("--read-data", is_flag=True, help="Also decode every object and compare it with its id.")
@click.option("--no-trunc", is_flag=True, help="Whole ids.")
@json_option
def command(ctx: click.Context, read_data: bool, no_trunc: bool, as_json: bool) -> int:
    """Verify the repository.

    Checks the catalog, the index, all checksums in the packs, the trees and every object that the catalog refers to;
    changes nothing. The exit code is 0 when all is well and 20 when something is damaged; `snapshotd repair` brings
    back as much as possible, and on a node of a fleet a backup of the bucket does. With --json:
    {objects,packs,bytes_read,damages:[{pack,object,what,snapshot,path}],snapshots}.
    """
    client = connect(ctx)
    with Meter("checking", quiet=as_json) as meter:
        report = client.check(read_data=read_data, progress=meter.line)
    if as_json:
        print_json(_json(report))
    else:
        _print(report, no_trunc)
    if not report.damages:
        return 0
    is_node = "node" in client.status()
    note(
        f"found {number_of(len(report.damages), 'damage')}; because of it, {number_of(len(report.unreadable), 'snapshot')} cannot "
        "be read in full; "
        + ("restore the packs from a backup of the bucket" if is_node else "`snapshotd repair` brings back what can be")
    )
    return DataLoss.exit_code


def _print(report: CheckInfo, full: bool) -> None:
    if report.damages:
        rows = [
            (
                id_text(item.snapshot, full=full),
                "-" if item.path is None else printable(item.path),
                "-" if item.pack is None else printable(item.pack),
                printable(item.what),
            )
            for item in report.damages
        ]
        table(("SNAPSHOT", "PATH", "PACK", "WHAT"), rows)
    read = f", {size(report.bytes_read)} read" if report.bytes_read else ""
    click.echo(
        f"{number_of(report.objects, 'object')} in {number_of(report.packs, 'pack')}{read}: {len(report.damages)} damaged"
    )


def _json(report: CheckInfo) -> dict[str, Any]:
    return {
        "objects": report.objects,
        "packs": report.packs,
        "bytes_read": report.bytes_read,
        "damages": [_damage(item) for item in report.damages],
        "unreadable": report.unreadable,
    }


def _damage(item: DamageInfo) -> dict[str, Any]:
    return dataclasses.asdict(item) | ({} if item.path is None else path_json(item.path))
