"""`snapshotd log`."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.text import file_counts, milliseconds, print_json, printable, shown_id, size, status, table
from snapshotd.cli.values import complete_trajectory
from snapshotd.client.results import SnapshotInfo


@declare("log", examples=["snapshotd log box", "snapshotd log --json box | jq '.[] | {id, tool: .tool.name}'"])
@click.option("-q", "--quiet", is_flag=True, help="Only ids.")
@click.option("--no-trunc", is_flag=True, help="Whole ids.")
@json_option
@click.argument("trajectory", shell_complete=complete_trajectory)
@click.pass_context
def command(ctx: click.Context, trajectory: str, quiet: bool, no_trunc: bool, as_json: bool) -> int:
    """List a trajectory's snapshots.

    Oldest first, with the tool call that each was taken after and what it changed. With --json: an array of
    {id,parent,trajectory,seq,tool,files,state,pause_ms,created_at,tags}.
    """
    found = connect(ctx).log(trajectory)
    if as_json:
        print_json([snapshot_json(item) for item in found])
        return 0
    if quiet:
        for item in found:
            click.echo(shown_id(item.id, full=no_trunc))
        return 0
    rows = [
        (
            str(item.seq), shown_id(item.id, full=no_trunc), printable(item.tool.name), status(item.tool.status),
            "-" if item.tool.exit_code is None else str(item.tool.exit_code), file_counts(item.files),
            "-" if item.files is None else size(item.files.bytes), milliseconds(item.pause_ms), status(item.state),
            " ".join(item.tags) or "-",
        )
        for item in found
    ]  # fmt: skip
    table(("SEQ", "SNAPSHOT", "TOOL", "STATUS", "EXIT", "FILES", "BYTES", "PAUSE", "STATE", "TAGS"), rows, right=(0, 4, 6, 7))
    return 0


def snapshot_json(item: SnapshotInfo) -> dict[str, Any]:
    """One snapshot as `log --json` prints it."""
    tool = item.tool
    return {
        "id": item.id, "parent": item.parent, "trajectory": item.trajectory, "seq": item.seq,
        "tool": {
            "name": tool.name, "arguments": tool.arguments, "status": tool.status, "exit_code": tool.exit_code,
            "duration_ms": tool.duration_ms,
        },
        "files": None if item.files is None else dataclasses.asdict(item.files),
        "state": item.state, "pause_ms": item.pause_ms, "created_at": item.created_at, "tags": list(item.tags),
    }  # fmt: skip
