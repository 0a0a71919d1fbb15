"""`snapshotd restore`."""

from __future__ import annotations

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.follow import note_warnings
from snapshotd.cli.github import GitHub, github_option
from snapshotd.cli.text import print_json, size
from snapshotd.cli.values import complete_snapshot
from snapshotd.terms import number_of


@declare(
    "restore", examples=["snapshotd restore best --to ./out", "snapshotd restore best --path /workspace --to ./out"]
)
@click.option("--to", metavar="DIR", required=True, type=click.Path(), help="Where to; must not exist or be empty.")
@click.option(
    "--path", metavar="PATH", default="", help="Only what lies below it, from /workspace on if it is relative."
)
@github_option
@json_option
@click.argument("snapshot", metavar="ID", shell_complete=complete_snapshot)
def command(ctx: click.Context, snapshot: str, to: str, path: str, github: GitHub | None, as_json: bool) -> None:
    """Write a snapshot's files into a folder.

    Every byte of a stored snapshot is verified: if one differs, this fails, and the folder stays as it was. Everything
    that the folder cannot hold (owners, devices, attributes) is told as a warning. With --json:
    {"file_count","directories","bytes","warnings"}.
    """
    report = connect(ctx).restore(snapshot, to, path=path)
    if github is not None:
        github.outputs({"directory": to, "files": report.file_count, "bytes": report.bytes})
        github.warn(report.warnings)
    if as_json:
        print_json(report)
        return
    note_warnings(report.warnings)
    click.echo(
        f"{number_of(report.file_count, 'file')} and {number_of(report.directories, 'directory')}, {size(report.bytes)}, in {to}",
        err=True,
    )
