"""`snapshotd log`."""

from __future__ import annotations

import click

from snapshotd.cli.command import connect, declare, json_option, refuse
from snapshotd.cli.follow import note
from snapshotd.cli.snapshots import snapshot_json, state_text
from snapshotd.cli.text import file_counts, id_text, milliseconds, print_ids, print_json, printable, size, status, table
from snapshotd.cli.values import Count, complete_trajectory
from snapshotd.client.client import Snapshotd
from snapshotd.client.results import SnapshotInfo
from snapshotd.errors import Diverged
from snapshotd.terms import main_argument, number_of, short

_LAST = 100


@declare(
    "log",
    examples=[
        "snapshotd log box",
        "snapshotd log -n 10 box",
        "snapshotd log --all --json box | jq '.[] | {id, tool: .tool.name}'",
    ],
)
@click.option("-n", "--last", metavar="N", type=Count(1), help=f"Only the newest N.  [default: {_LAST}]")
@click.option("--all", "everything", is_flag=True, help="All of them, however many.")
@click.option("-q", "--quiet", is_flag=True, help="Only ids.")
@click.option("--no-trunc", is_flag=True, help="Whole ids.")
@click.option("--graph", is_flag=True, help="As `snapshotd tree`, of this trajectory's relatives or of all.")
@json_option
@click.argument("trajectory", required=False, shell_complete=complete_trajectory)
def command(
    ctx: click.Context,
    trajectory: str | None,
    last: int | None,
    everything: bool,
    quiet: bool,
    no_trunc: bool,
    graph: bool,
    as_json: bool,
) -> None:
    """List a trajectory's snapshots.

    Oldest first, with the tool call that each was taken after, its changed files, and its state: captured (survives a
    crash of the daemon), stored (survives power loss too), lost, or pruned (its files were given up); on a node of a fleet also
    whether it is unpublished: other nodes cannot read it yet. The last column is
    the call's main argument, cut to the terminal's width. The daemon counts
    changed files in the background: until then they are shown as "…", and "files" is null. With --json: an array of
    {id,parent,trajectory,seq,tool,files,state,pause_ms,created_at,tags,warnings,refused,reused,
    kind,published}; published is null where the daemon is no node of a fleet. A call that was answered from
    an earlier run (`run --reuse`) has "← SNAPSHOT", the one that it was answered from. Where the program was refused
    when it was resumed, since it did something else than what is recorded, the reason is on standard error.
    """
    if graph:
        if everything or quiet or last is not None:
            refuse("--graph shows all snapshots; leave out -n, --all and -q")
        from snapshotd.cli.forest import show_forest  # few logs are drawn

        show_forest(connect(ctx), trajectory, full=no_trunc, as_json=as_json)
        return
    if trajectory is None:
        refuse(
            "missing argument: name a trajectory, or give --graph for all; `snapshotd log --help` shows how it is used"
        )
    if everything and last is not None:
        refuse("--all and -n exclude each other; choose one")
    client = connect(ctx)
    wanted = None if everything else last or _LAST
    found = client.log(trajectory, None if wanted is None else wanted + 1)  # one more, to know whether there are more
    more = wanted is not None and len(found) > wanted
    found = found[1:] if more else found
    if as_json:
        print_json([snapshot_json(item) for item in found])
    elif quiet:
        print_ids((item.id for item in found), full=no_trunc)
    else:
        _table(found, no_trunc)
        for item in found:
            if item.warnings:
                which = id_text(item.id, full=no_trunc)
                note(f"{which} lacks some of what the sandbox had; `snapshotd show {which}` says what")
        refusal = _refusal(client, trajectory)
        if refusal is not None:
            note(refusal)
    if more:
        note(f"{number_of(_count_older(client, found[0]), 'older snapshot')} not listed; --all lists everything")


def _refusal(client: Snapshotd, ref: str) -> str | None:
    """Return the reason why the trajectory's program was refused when it was resumed; None: it was not. No snapshot has it."""
    trajectory = client.trajectory(ref)
    if trajectory.status != "interrupted":
        return None
    warnings = [event for event in client.events(trajectory.id, follow=False) if event["event"] == "warning"]
    if not warnings or warnings[-1].get("code") != Diverged.__name__:
        return None
    return f"the program of {short(trajectory.id)} was refused: {warnings[-1]['message']}"


def _count_older(client: Snapshotd, first: SnapshotInfo) -> int:
    """Count the snapshots that the trajectory has before this one. Numbers have no gaps; those of a fork go on from the
    snapshot that it was forked from."""
    forked_from = client.trajectory(first.trajectory).forked_from
    return first.seq if forked_from is None else first.seq - client.snapshot(forked_from).seq - 1


def _table(found: list[SnapshotInfo], no_trunc: bool) -> None:
    rows = [
        (
            str(item.seq),
            id_text(item.id, full=no_trunc),
            printable(item.tool.name) if item.reused is None else f"{printable(item.tool.name)} ← {short(item.reused)}",
            status(item.tool.status),
            "-" if item.tool.exit_code is None else str(item.tool.exit_code),
            file_counts(item.files),
            "-" if item.files is None else size(item.files.bytes),
            milliseconds(item.pause_ms),
            status(state_text(item)),
            " ".join(item.tags) or "-",
            main_argument(item.tool.arguments),
        )
        for item in found
    ]
    table(
        ("SEQ", "SNAPSHOT", "TOOL", "STATUS", "EXIT", "FILES", "BYTES", "PAUSE", "STATE", "TAGS", "ARGUMENT"),
        rows,
        right=(0, 4, 6, 7),
        fit=True,
    )
