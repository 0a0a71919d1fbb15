"""`snapshotd inspect`."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.snapshots import details_json
from snapshotd.cli.text import is_snapshot, print_json
from snapshotd.cli.values import complete_snapshot
from snapshotd.client.client import Snapshotd


@declare("inspect", examples=["snapshotd inspect box", "snapshotd inspect --json a1b2c3 best | jq '.[].kind'"])
@json_option
@click.argument("refs", metavar="ID...", nargs=-1, required=True, shell_complete=complete_snapshot)
def command(ctx: click.Context, refs: tuple[str, ...], as_json: bool) -> None:
    """Print all about trajectories and snapshots as JSON.

    An array with one object for each: "kind" is "trajectory" (the rest as in `ls --json`) or "snapshot" (as in `show
    --json`). With --json on one line.
    """
    client = connect(ctx)
    found = [_inspect(client, ref) for ref in refs]
    print_json(found, indent=None if as_json else 2)


def _inspect(client: Snapshotd, ref: str) -> dict[str, Any]:
    taken = client.snapshot(ref)  # a trajectory's head, if it names one
    if is_snapshot(ref, taken):
        return {"kind": "snapshot", **details_json(taken)}
    return {"kind": "trajectory", **dataclasses.asdict(client.trajectory(ref))}
