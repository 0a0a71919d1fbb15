"""`snapshotd journal`."""

from __future__ import annotations

import dataclasses

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.documents import short_json
from snapshotd.cli.text import id_text, print_json, printable, status, table
from snapshotd.cli.values import complete_snapshot


@declare(
    "journal",
    examples=[
        "snapshotd journal nightly",
        "snapshotd journal --json a1b2c3 | jq '.[] | select(.kind == \"model\").details'",
    ],
)
@click.option("--no-trunc", is_flag=True, help="Whole ids.")
@json_option
@click.argument("snapshot", metavar="ID", shell_complete=complete_snapshot)
def command(ctx: click.Context, snapshot: str, no_trunc: bool, as_json: bool) -> None:
    """Show what a program did, call by call.

    The journal up to a snapshot, from the program's beginning: tool calls, model calls, questions, tasks and
    checkpoints, each with its outcome and the snapshot that holds it. This is what a resume replays. For a trajectory
    it also shows the entries that no snapshot holds yet. With --json: an array of
    {position,id,kind,name,arguments,side_effect,key,status,started_at,ended_at,result,error,facts,details,parent,snapshot}.
    """
    found = list(connect(ctx).journal(snapshot))
    if as_json:
        print_json([{"position": number, **dataclasses.asdict(entry)} for number, entry in enumerate(found)])
        return
    rows = [
        (
            str(number),
            id_text(entry.id, full=no_trunc),
            entry.kind,
            printable(entry.name),
            entry.side_effect,
            status(entry.status or "open"),
            id_text(entry.snapshot, full=no_trunc),
            short_json(entry.arguments),
        )
        for number, entry in enumerate(found)
    ]
    table(("POSITION", "CALL", "KIND", "NAME", "SIDE EFFECT", "STATUS", "SNAPSHOT", "ARGUMENTS"), rows, right=(0,))
