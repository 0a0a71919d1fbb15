"""`snapshotd tag`."""

from __future__ import annotations

import click

from snapshotd.cli.command import connect, declare, json_option, refuse
from snapshotd.cli.text import print_json
from snapshotd.cli.values import Name, complete_snapshot, complete_tag


@declare(
    "tag", examples=["snapshotd tag a1b2c3 best", "snapshotd tag --move d4e5f6 best", "snapshotd tag --delete best"]
)
@click.option("--move", is_flag=True, help="Take the tag away from the snapshot that has it.")
@click.option("--delete", metavar="NAME", help="Remove this tag; the snapshot stays.", shell_complete=complete_tag)
@json_option
@click.argument("snapshot", metavar="ID", required=False, shell_complete=complete_snapshot)
@click.argument("name", required=False, type=Name())
@click.pass_context
def command(
    ctx: click.Context, snapshot: str | None, name: str | None, move: bool, delete: str | None, as_json: bool
) -> int:
    """Name a snapshot, or take a name away.

    A tag can be used wherever a snapshot's id can, and is no trajectory's name. With --json: {"snapshot","name"}, or
    {"deleted"}.
    """
    client = connect(ctx)
    if delete is not None:
        if snapshot is not None or move:
            refuse("--delete NAME takes nothing else; `snapshotd tag ID NAME` gives a tag")
        client.untag(delete)
        if as_json:
            print_json({"deleted": delete})
        return 0
    if snapshot is None or name is None:
        refuse("a tag needs a snapshot and a name: `snapshotd tag ID NAME`")
    tagged = client.tag(snapshot, name, move=move)
    if as_json:
        print_json({"snapshot": tagged, "name": name})
    return 0
