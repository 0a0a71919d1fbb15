"""`snapshotd diff`."""

from __future__ import annotations

import base64

import click

from snapshotd.cli.changes import ShownPatch, change_json, change_line, change_path
from snapshotd.cli.command import connect, declare, json_option, refuse
from snapshotd.cli.follow import note
from snapshotd.cli.text import is_snapshot, print_json, printable, size
from snapshotd.cli.values import complete_snapshot
from snapshotd.client.client import Snapshotd
from snapshotd.client.results import ChangeInfo, EntryInfo
from snapshotd.terms import number_of, short

_BAR_CHARS = 30


@declare(
    "diff",
    examples=[
        "snapshotd diff a1b2c3",
        "snapshotd diff before after --stat",
        "snapshotd diff --patch start best | git apply",
    ],
)
@click.option("--stat", is_flag=True, help="Sizes before and after, with bars.")
@click.option("--patch", is_flag=True, help="A patch of /workspace for `git apply` and `patch -p1`.")
@json_option
@click.argument("a", metavar="A", shell_complete=complete_snapshot)
@click.argument("b", metavar="[B]", required=False, shell_complete=complete_snapshot)
def command(ctx: click.Context, a: str, b: str | None, stat: bool, patch: bool, as_json: bool) -> int:
    """Show what changed between two snapshots.

    With one, what changed from its parent to it. A line is A (added), M (changed) or D (deleted) and the path. A patch on
    a terminal is in colour (not with NO_COLOR), with control characters escaped; elsewhere it is as it is.

    With --json: an array of {change,path,before,after}; with --patch, {"patch_b64","outside"}.
    """
    if stat and patch:
        refuse("--stat and --patch exclude each other; choose one")
    client = connect(ctx)
    if patch:
        return _patch(client, a, b, as_json)
    changes = client.diff(a, b)
    if as_json:
        print_json([change_json(change) for change in changes])
        return 0
    shown = 0
    if stat:
        shown = _stat(list(changes))
    else:
        for change in changes:
            click.echo(change_line(change))
            shown += 1
    if not shown:
        note(_unchanged_text(client, a, b))
    return 0


def _unchanged_text(client: Snapshotd, a: str, b: str | None) -> str:
    """Say that two snapshots have the same files. A trajectory's name means its last snapshot, and that of a run is taken at
    its end, which changed nothing: the user probably means the whole run."""
    if b is not None:
        return f"the files of {a} and {b} are the same"
    taken = client.snapshot(a)
    said = f"{short(taken.id)} ({printable(taken.tool.name)}) changed no file"
    if is_snapshot(a, taken):
        return said
    first = client.trajectory(a).forked_from or client.log(a)[0].id
    if first == taken.id:
        return said
    return f"{said}; `snapshotd diff {short(first)} {a}` shows what all of {a} changed"


def _patch(client: Snapshotd, a: str, b: str | None, as_json: bool) -> int:
    if as_json:
        parts: list[bytes] = []
        outside = client.patch(a, b, write=parts.append)
        print_json({"patch_b64": base64.b64encode(b"".join(parts)).decode(), "outside": outside})
        return 0
    shown = ShownPatch()
    outside = client.patch(a, b, write=shown.write)
    shown.end()
    if outside:
        note(
            f"the patch lacks {number_of(outside, 'change')} outside /workspace; `snapshotd diff {a}{' ' + b if b else ''}` lists all"
        )
    return 0


def _stat(changes: list[ChangeInfo]) -> int:
    """Print added bytes as `+` and removed ones as `-`; the largest change fills the bar. Returns the number of changes."""
    moved = [(change, _bytes(change.before), _bytes(change.after)) for change in changes]
    most = max((before + after for _, before, after in moved), default=0) or 1
    width = max((len(change_path(change)) for change in changes), default=0)
    for change, before, after in moved:
        bar = click.style("+" * _cells(after, most), fg="green") + click.style("-" * _cells(before, most), fg="red")
        sizes = f"{size(before) if change.before else '-':>10} → {size(after) if change.after else '-':<10}"
        click.echo(f" {change_path(change):{width}} | {sizes} {bar}".rstrip())
    counts: dict[str, int] = dict.fromkeys(("added", "changed", "deleted"), 0)
    for change in changes:
        counts[change.change] += 1
    click.echo(f" {counts['added']} added, {counts['changed']} changed, {counts['deleted']} deleted")
    return len(changes)


def _bytes(entry: EntryInfo | None) -> int:
    return entry.size if entry is not None and entry.kind == "file" else 0


def _cells(count: int, most: int) -> int:
    return -(-count * _BAR_CHARS // most) if count else 0
