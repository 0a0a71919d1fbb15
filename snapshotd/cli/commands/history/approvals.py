"""`snapshotd approvals`."""

from __future__ import annotations

import sys
from typing import Any

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.documents import short_json
from snapshotd.cli.follow import INTERRUPTED, note
from snapshotd.cli.text import ago, id_text, print_ids, print_json, print_list, printable, status
from snapshotd.client.client import Snapshotd
from snapshotd.errors import DaemonUnavailable
from snapshotd.terms import number_of, short


@declare(
    "approvals",
    examples=["snapshotd approvals", "snapshotd approvals --watch", "snapshotd approve $(snapshotd approvals -q)"],
)
@click.option("--all", "everything", is_flag=True, help="Also decided, expired and stale ones.")
@click.option("--watch", is_flag=True, help="Go on, with a line for each that is asked or decided, until Ctrl-C.")
@click.option("-q", "--quiet", is_flag=True, help="Only ids.")
@click.option("--no-trunc", is_flag=True, help="Whole ids.")
@json_option
def command(ctx: click.Context, everything: bool, watch: bool, quiet: bool, no_trunc: bool, as_json: bool) -> int:
    """List what waits for a person.

    Oldest first. The agents that asked stand still until `snapshotd approve` or `snapshotd deny`, across any restart.
    With --json: an array of
    {id,trajectory,call,name,arguments,digest,snapshot,side_effect,created_at,question,status,expires_at,decided_at,by,reason,edited};
    with --watch, one event per line: {"event":"approval","id","name","status","trajectory"}, first the ones that wait
    already.
    """
    client = connect(ctx)
    if watch:
        return _watch(client, as_json)
    found = client.approvals(None if everything else "pending")
    if quiet and not as_json:
        print_ids((item.id for item in found), full=no_trunc)
        return 0
    print_list(
        found,
        ("APPROVAL", "TRAJECTORY", "TOOL", "SIDE EFFECT", "STATUS", "ASKED", "EXPIRES", "BY", "WHAT"),
        lambda item: (
            id_text(item.id, full=no_trunc),
            id_text(item.trajectory, full=no_trunc),
            printable(item.name),
            item.side_effect,
            status(item.status),
            ago(item.created_at),
            item.expires_at or "-",
            printable(item.by or "-"),
            short_json(item.arguments) if item.question is None else printable(item.question),
        ),
        as_json=as_json,
    )
    return 0


def _watch(client: Snapshotd, as_json: bool) -> int:
    """Print approvals as they come. The watch begins before the pending ones are listed, so that no event is missed."""
    try:
        events = client.watch()
        waiting = client.approvals("pending")
        for item in waiting:
            event = {name: getattr(item, name) for name in ("id", "name", "status", "trajectory")}
            _tell({"event": "approval", **event}, as_json)
        known = {item.id for item in waiting}
        for event in events:
            if event["event"] == "approval" and not (event["status"] == "pending" and event["id"] in known):
                _tell(event, as_json)
            elif event["event"] == "lost":
                note(f"missed {number_of(event['count'], 'event')}; `snapshotd approvals` shows how it stands")
    except KeyboardInterrupt:
        return INTERRUPTED
    raise DaemonUnavailable("the daemon stopped, so there is nothing more to watch; what waits for approval waits on")


def _tell(event: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(event)
    else:
        line = f"{short(event['id'])}  {status(event['status'])}  {printable(str(event['name']))}  of {short(event['trajectory'])}"
        click.echo(
            line + (f"; `snapshotd approval {short(event['id'])}` shows it" if event["status"] == "pending" else "")
        )
    sys.stdout.flush()
