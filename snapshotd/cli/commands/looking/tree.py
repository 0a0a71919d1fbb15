"""`snapshotd tree`."""

from __future__ import annotations

import dataclasses
import sys
from collections import defaultdict
from typing import TYPE_CHECKING

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.taken import snapshot_json
from snapshotd.cli.text import file_counts, print_json, printable, shown_id
from snapshotd.client.results import SnapshotInfo, TrajectoryInfo

if TYPE_CHECKING:
    from rich.text import Text


@declare("tree", examples=["snapshotd tree", "snapshotd tree --json"])
@click.option("--no-trunc", is_flag=True, help="Whole ids.")
@json_option
@click.pass_context
def command(ctx: click.Context, no_trunc: bool, as_json: bool) -> int:
    """Show all trajectories as a forest.

    A fork hangs below the snapshot it began at. With --json: an array of trajectories, each with "snapshots" as `log
    --json` has them; "forked_from" is the snapshot that joins a trajectory to its parent.
    """
    client = connect(ctx)
    trajectories = client.trajectories()
    snapshots: dict[str, list[SnapshotInfo]] = defaultdict(list)
    for item in client.all_snapshots():
        snapshots[item.trajectory].append(item)
    for line in snapshots.values():
        line.sort(key=lambda s: s.seq)
    if as_json:
        print_json(
            [{**dataclasses.asdict(t), "snapshots": [snapshot_json(s) for s in snapshots[t.id]]} for t in trajectories]
        )
        return 0
    _draw(trajectories, snapshots, no_trunc)
    return 0


def _draw(trajectories: list[TrajectoryInfo], snapshots: dict[str, list[SnapshotInfo]], full: bool) -> None:
    from rich.console import Console
    from rich.text import Text
    from rich.tree import Tree

    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 1000)
    known = {item.id for line in snapshots.values() for item in line}
    nodes: dict[str, Tree] = {}
    roots: list[Tree] = []
    for item in trajectories:  # oldest first: the origin of a fork has its node already
        label = Text.assemble((item.name or shown_id(item.id, full=full), "bold"), f"  {item.status}", style="")
        if item.name:
            label.append(f"  {shown_id(item.id, full=full)}", style="dim")
        parent = nodes.get(item.forked_from or "")
        if parent is None:
            tree = Tree(label)
            roots.append(tree)
            if item.forked_from is not None and item.forked_from not in known:
                label.append("  (forked from a snapshot that is gone)", style="dim")
        else:
            tree = parent.add(label)
        for snapshot in snapshots[item.id]:
            nodes[snapshot.id] = tree.add(_label(snapshot, full))
    for root in roots:
        console.print(root)


def _label(item: SnapshotInfo, full: bool) -> Text:
    from rich.text import Text

    label = Text(f"{item.seq} {shown_id(item.id, full=full)}  {printable(item.tool.name)}  ")
    label.append(item.tool.status, style="green" if item.tool.status == "done" else "red")
    label.append(f"  {file_counts(item.files)}")
    if item.tags:
        label.append("  " + " ".join(item.tags), style="yellow")
    return label
