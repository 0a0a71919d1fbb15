"""`snapshotd mount`."""

from __future__ import annotations

import os

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.text import print_json


@declare(
    "mount",
    examples=[
        "snapshotd mount /mnt && ls /mnt/tags",
        "diff -r /mnt/snapshots/a1b2c3/workspace /mnt/tags/best/workspace   # after snapshotd mount /mnt",
    ],
)
@json_option
@click.argument("directory", metavar="DIR", type=click.Path())
def command(ctx: click.Context, directory: str, as_json: bool) -> None:
    """Show every stored snapshot as a folder.

    Below DIR, read-only: trajectories/ID/SEQ, snapshots/ID and tags/NAME, for grep, diff, cp and find across time. New
    snapshots appear as they are stored. `snapshotd umount DIR` ends it. With --json: {"mounted":DIR}.
    """
    connect(ctx).mount(directory)
    if as_json:
        print_json({"mounted": os.path.abspath(directory)})
