"""`snapshotd apply`."""

from __future__ import annotations

import os
from typing import Any

import click

from snapshotd.cli.changes import LETTERS, marked_path
from snapshotd.cli.command import connect, declare, json_option, refuse
from snapshotd.cli.follow import note
from snapshotd.cli.text import bytes_json, id_text, print_json, printable
from snapshotd.cli.values import complete_snapshot
from snapshotd.client.results import ApplyInfo, MergeInfo
from snapshotd.errors import Conflict
from snapshotd.terms import number_of


@declare(
    "apply",
    examples=[
        "snapshotd apply best --to . --dry-run",
        "snapshotd apply best --to . --commit 'Fix the parser'",
        "snapshotd apply a1b2c3 --base before --path /workspace/docs --to ./docs",
    ],
)
@click.option("--to", metavar="DIR", required=True, type=click.Path(), help="The folder that gets the changes.")
@click.option(
    "--base",
    metavar="ID",
    shell_complete=complete_snapshot,
    help="Bring what changed since this snapshot.  [default: since the workspace was copied in]",
)
@click.option(
    "--path",
    metavar="PATH",
    default="/workspace",
    show_default=True,
    help="The sandbox's folder that DIR is, from /workspace on if it is relative.",
)
@click.option("-n", "--dry-run", is_flag=True, help="Only list what would happen.")
@click.option(
    "--commit",
    metavar="[MESSAGE]",
    is_flag=False,
    flag_value="",
    help="Make a git commit of the applied files, and of nothing else.",
)
@click.option("--hooks", is_flag=True, help="Let the hooks and programs run that DIR's repository names for a commit.")
@json_option
@click.argument("snapshot", metavar="ID", shell_complete=complete_snapshot)
def command(
    ctx: click.Context,
    snapshot: str,
    to: str,
    base: str | None,
    path: str,
    dry_run: bool,
    commit: str | None,
    hooks: bool,
    as_json: bool,
) -> int:
    """Bring what a snapshot changed to a folder, and keep what the folder has changed.

    A line is A (added), M (changed) or D (deleted) and the path in DIR, or C for a conflict: what both changed in ways
    that exclude each other. Texts are merged by lines. All or nothing: with a conflict, nothing is written and the exit
    code is 6, with --dry-run too. Only what the snapshot changed is touched, and a file that it never knew is not
    overwritten. A dry run with --commit also says if git would refuse the commit. With --json:
    {snapshot,base,dry_run,applied,changes:[{change,path,kind,merged}],
    conflicts:[{path,reason}],same,warnings,commit}.
    """
    if hooks and commit is None:
        refuse("--hooks says how to commit; give --commit as well")
    wanted: str | bool = False if commit is None else commit or True
    done = connect(ctx).apply(snapshot, to, base, path, dry_run, commit=wanted, hooks=hooks)
    if as_json:
        print_json(_json(done))
    else:
        _print(done, to)
    return Conflict.exit_code if done.conflicts else 0


def print_changes(done: ApplyInfo | MergeInfo) -> None:
    """One line for each change and conflict; warnings on standard error."""
    for item in done.changes:
        letter, colour = LETTERS[item.change]
        click.echo(
            click.style(f"{letter} {marked_path(os.fsdecode(item.path), item.kind)}", fg=colour)
            + ("  (merged)" if item.merged else "")
        )
    for conflict in done.conflicts:
        line = f"C {printable(os.fsdecode(conflict.path))}  ({printable(conflict.reason)})"
        click.echo(click.style(line, fg="red", bold=True))
    for warning in done.warnings:
        note(f"warning: {printable(warning)}")


def _print(done: ApplyInfo, to: str) -> None:
    print_changes(done)
    same = f"; there already: {done.same}" if done.same else ""
    if done.conflicts:
        note(
            f"{number_of(len(done.conflicts), 'conflict')}: nothing was written to {to}; settle them there, or apply a part with --path"
        )
    elif done.dry_run:
        note(f"{number_of(len(done.changes), 'change')} would be applied to {to}{same}")
    else:
        made = f", commit {id_text(done.commit, full=False)}" if done.commit else ""
        note(
            f"{number_of(len(done.changes), 'change')} since {id_text(done.base, full=False)} applied to {to}{same}{made}"
        )


def _json(done: ApplyInfo) -> dict[str, Any]:
    return {
        "snapshot": done.snapshot,
        "base": done.base,
        "dry_run": done.dry_run,
        "applied": not done.dry_run and not done.conflicts,
        **changes_json(done),
        "commit": done.commit,
    }


def changes_json(done: ApplyInfo | MergeInfo) -> dict[str, Any]:
    """`changes`, `conflicts`, `same` and `warnings`."""
    return {
        "changes": [
            {"change": item.change, **bytes_json("path", item.path), "kind": item.kind, "merged": item.merged}
            for item in done.changes
        ],
        "conflicts": [{**bytes_json("path", item.path), "reason": printable(item.reason)} for item in done.conflicts],
        "same": done.same,
        "warnings": [printable(warning) for warning in done.warnings],
    }
