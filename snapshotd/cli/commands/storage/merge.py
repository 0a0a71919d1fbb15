"""`snapshotd merge`."""

from __future__ import annotations

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.commands.storage.apply import changes_json, print_changes
from snapshotd.cli.follow import note
from snapshotd.cli.text import id_text, print_json
from snapshotd.cli.values import complete_snapshot, complete_trajectory
from snapshotd.errors import Conflict
from snapshotd.terms import number_of


@declare(
    "merge", examples=["snapshotd merge try-2 agent --dry-run", "snapshotd merge try-2 agent && snapshotd undo agent"]
)
@click.option(
    "--base",
    metavar="ID",
    shell_complete=complete_snapshot,
    help="Bring what changed since this snapshot.  [default: the last one that both go on from]",
)
@click.option(
    "--path",
    metavar="PATH",
    default="/workspace",
    show_default=True,
    help="Only what lies below it, from /workspace on if it is relative.",
)
@click.option("-n", "--dry-run", is_flag=True, help="Only list what would happen.")
@json_option
@click.argument("source", metavar="FROM", shell_complete=complete_snapshot)
@click.argument("into", metavar="INTO", shell_complete=complete_trajectory)
def command(
    ctx: click.Context, source: str, into: str, base: str | None, path: str, dry_run: bool, as_json: bool
) -> int:
    """Bring what one branch changed to another trajectory, and keep what that one has changed.

    FROM is a snapshot or a trajectory, INTO a trajectory. The lines are those of `snapshotd apply`, and so are the rules:
    texts are merged by lines, and with a conflict nothing is merged and the exit code is 6. The files change in one step,
    a new snapshot of INTO, and `snapshotd undo` takes it back; conversation, journal and state of INTO go on. With
    --json: {source,head,base,dry_run,snapshot,changes:[{change,path,kind,merged}],conflicts:[{path,reason}],same,
    warnings}.
    """
    done = connect(ctx).merge(source, into, base=base, path=path, dry_run=dry_run)
    if as_json:
        print_json(
            {
                "source": done.source,
                "head": done.head,
                "base": done.base,
                "dry_run": done.dry_run,
                "snapshot": None if done.snapshot is None else done.snapshot.id,
                **changes_json(done),
            }
        )
        return Conflict.exit_code if done.conflicts else 0
    print_changes(done)
    same = f"; there already: {done.same}" if done.same else ""
    if done.conflicts:
        note(
            f"{number_of(len(done.conflicts), 'conflict')}: nothing was merged; settle them in {into}, or merge a part with --path"
        )
    elif not done.changes:
        note(f"there is nothing to merge: {into} has all that {source} changed since {id_text(done.base, full=False)}")
    elif done.snapshot is None:
        note(f"{number_of(len(done.changes), 'change')} would be merged into {into}{same}")
    else:
        base_id = id_text(done.base, full=False)
        note(
            f"{number_of(len(done.changes), 'change')} since {base_id} merged into {into}, snapshot "
            f"{id_text(done.snapshot.id, full=False)}{same}"
        )
    return Conflict.exit_code if done.conflicts else 0
