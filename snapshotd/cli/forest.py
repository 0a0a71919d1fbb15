"""Trajectories as a forest: a fork hangs below the snapshot it began at."""

from __future__ import annotations

import dataclasses
import sys
from collections import defaultdict
from typing import TYPE_CHECKING

import click

from snapshotd.cli.snapshots import snapshot_json
from snapshotd.cli.text import file_counts, fit_text, id_text, print_json, printable
from snapshotd.client.client import Snapshotd
from snapshotd.client.results import SnapshotInfo, TrajectoryInfo
from snapshotd.terms import main_argument

if TYPE_CHECKING:
    from rich.text import Text


_INDENT = 4
"""Columns by which a level of a tree is indented."""


def show_forest(client: Snapshotd, ref: str | None = None, *, full: bool, as_json: bool) -> None:
    """Print all trajectories as a forest, or only the tree that the trajectory `ref` is in. `full`: whole ids."""
    trajectories = client.trajectories()
    snapshots: dict[str, list[SnapshotInfo]] = defaultdict(list)
    for item in client.all_snapshots():
        snapshots[item.trajectory].append(item)
    for line in snapshots.values():
        line.sort(key=lambda s: s.seq)
    if ref is not None:
        origins = _origins(trajectories, snapshots)
        wanted = origins.get(client.trajectory(ref).id)
        trajectories = [item for item in trajectories if origins[item.id] == wanted]
    if as_json:
        print_json(
            [{**dataclasses.asdict(t), "snapshots": [snapshot_json(s) for s in snapshots[t.id]]} for t in trajectories]
        )
        return
    _draw(trajectories, snapshots, full)


def _origins(trajectories: list[TrajectoryInfo], snapshots: dict[str, list[SnapshotInfo]]) -> dict[str, str]:
    """Map each trajectory to the one that its tree begins with."""
    owners = {item.id: line for line, taken in snapshots.items() for item in taken}
    origins: dict[str, str] = {}
    for item in trajectories:  # oldest first: whatever a fork began at is known already
        origins[item.id] = origins.get(owners.get(item.forked_from or "", ""), item.id)
    return origins


def _draw(trajectories: list[TrajectoryInfo], snapshots: dict[str, list[SnapshotInfo]], full: bool) -> None:
    from rich.console import Console
    from rich.text import Text
    from rich.tree import Tree

    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 1000)
    owners = {item.id: item.trajectory for line in snapshots.values() for item in line}
    levels: dict[str, int] = {}
    nodes: dict[str, Tree] = {}
    roots: list[Tree] = []
    for item in trajectories:  # oldest first: whatever a fork began at has its node already
        label = Text.assemble((item.name or id_text(item.id, full=full), "bold"), f"  {item.status}", style="")
        if item.name:
            label.append(f"  {id_text(item.id, full=full)}", style="dim")
        parent = nodes.get(item.forked_from or "")
        if parent is None:
            tree = Tree(label)
            roots.append(tree)
            if item.forked_from is not None and item.forked_from not in owners:
                label.append("  (forked from a snapshot that is gone)", style="dim")
        else:
            tree = parent.add(label)
        levels[item.id] = level = 0 if parent is None else levels[owners[item.forked_from or ""]] + 1
        line = snapshots[item.id]
        for snapshot, label in zip(line, _labels(line, _INDENT * (2 * level + 1), full), strict=True):
            nodes[snapshot.id] = tree.add(label)
    for root in roots:
        with console.capture() as drawn:  # rich would end the process with 1 where the reader has gone away
            console.print(root)
        click.echo(drawn.get(), nl=False)


def _labels(line: list[SnapshotInfo], indent: int, full: bool) -> list[Text]:
    """Return a label for each snapshot of one trajectory, in columns; the last column is cut to the terminal."""
    from rich.text import Text

    rows = [
        (
            (f"{item.seq} {id_text(item.id, full=full)}", ""),
            (printable(item.tool.name), ""),
            (item.tool.status, "green" if item.tool.status == "done" else "red"),
            (file_counts(item.files), ""),
            (" ".join(item.tags), "yellow"),
        )
        for item in line
    ]
    widths = [max(len(text) for text, _ in column) for column in zip(*rows, strict=True)]
    numbers = max((len(str(item.seq)) for item in line), default=0)
    labels = []
    for item, row in zip(line, rows, strict=True):
        label = Text(" " * (numbers - len(str(item.seq))))
        for (text, style), width in zip(row, widths, strict=True):
            if width:
                label.append(text, style=style).append(" " * (width - len(text) + 2))
        label.append(fit_text(main_argument(item.tool.arguments), indent + len(label.plain)), style="dim")
        label.rstrip()
        labels.append(label)
    return labels
