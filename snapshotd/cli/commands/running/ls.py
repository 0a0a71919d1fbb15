"""`snapshotd ls`."""

from __future__ import annotations

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.text import ago, id_text, print_json, printable, status, table


@declare("ls", examples=["snapshotd ls", "snapshotd ls -q", "snapshotd ls --json | jq '.[].id'"])
@click.option("-q", "--quiet", is_flag=True, help="Only ids.")
@click.option("--no-trunc", is_flag=True, help="Whole ids.")
@json_option
def command(ctx: click.Context, quiet: bool, no_trunc: bool, as_json: bool) -> None:
    """List trajectories.

    Oldest first. With --json: an array.
    """
    client = connect(ctx)
    found = client.trajectories()
    if as_json:
        print_json(found)
        return
    if quiet:
        for item in found:
            click.echo(id_text(item.id, full=no_trunc))
        return
    images = {image.id: image.name for image in client.images()}
    rows = [
        (
            id_text(item.id, full=no_trunc),
            item.name or "-",
            status(item.status),
            "-" if item.exit_code is None else str(item.exit_code),
            id_text(item.head, full=no_trunc),
            images.get(item.image) or id_text(item.image, full=no_trunc),
            item.runtime,
            ago(item.created_at),
            id_text(item.forked_from, full=no_trunc),
            printable(" ".join(item.agent.argv)) if item.agent else "-",
        )
        for item in found
    ]
    table(("TRAJECTORY", "NAME", "STATUS", "EXIT", "HEAD", "IMAGE", "RUNTIME", "CREATED", "FORKED FROM", "AGENT"), rows)
