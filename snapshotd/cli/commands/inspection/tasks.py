"""`snapshotd tasks`."""

from __future__ import annotations

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.text import id_text, print_list, printable, status
from snapshotd.cli.values import complete_snapshot


@declare("tasks", examples=["snapshotd tasks nightly", "snapshotd tasks --json a1b2c3"])
@click.option("--no-trunc", is_flag=True, help="Whole ids.")
@json_option
@click.argument("snapshot", metavar="ID", shell_complete=complete_snapshot)
def command(ctx: click.Context, snapshot: str, no_trunc: bool, as_json: bool) -> None:
    """List the agent's subtasks.

    As they were at a snapshot, in the order in which they were declared: pending, in-progress, completed, failed or
    skipped. `snapshotd retry` does one again. With --json: an array of {name,status,depends,note,started_in,ended_in}.
    """
    print_list(
        connect(ctx).tasks(snapshot),
        ("TASK", "STATUS", "DEPENDS ON", "BEGAN", "ENDED", "NOTE"),
        lambda item: (
            printable(item.name),
            status(item.status),
            printable(" ".join(item.depends)) or "-",
            id_text(item.started_in, full=no_trunc),
            id_text(item.ended_in, full=no_trunc),
            printable(item.note or "-"),
        ),
        as_json=as_json,
    )
