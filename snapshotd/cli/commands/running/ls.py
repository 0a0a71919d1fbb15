"""`snapshotd ls`."""

from __future__ import annotations

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.text import ago, id_text, print_ids, print_list, printable, status


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
    if quiet and not as_json:
        print_ids((item.id for item in found), full=no_trunc)
        return
    images = {} if as_json else {image.id: image.name for image in client.images()}
    print_list(
        found,
        ("TRAJECTORY", "NAME", "STATUS", "EXIT", "HEAD", "IMAGE", "RUNTIME", "CREATED", "FORKED FROM", "AGENT"),
        lambda item: (
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
        ),
        as_json=as_json,
    )
