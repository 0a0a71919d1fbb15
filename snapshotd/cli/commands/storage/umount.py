"""`snapshotd umount`."""

from __future__ import annotations

import os

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.text import print_json


@declare("umount", examples=["snapshotd umount /mnt"])
@json_option
@click.argument("directory", metavar="DIR", type=click.Path())
def command(ctx: click.Context, directory: str, as_json: bool) -> None:
    """End what `snapshotd mount` began.

    With --json: {"unmounted":DIR}.
    """
    connect(ctx, autostart=False).unmount(directory)
    if as_json:
        print_json({"unmounted": os.path.abspath(directory)})
