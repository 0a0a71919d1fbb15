"""`snapshotd rm`."""

from __future__ import annotations

import click

from snapshotd.cli.command import ask, connect, declare, is_terminal, json_option, refuse
from snapshotd.cli.text import print_json
from snapshotd.cli.values import complete_trajectory
from snapshotd.terms import number_of


@declare("rm", examples=["snapshotd rm box", "snapshotd rm --force box", "snapshotd rm --all --force"])
@click.option("-f", "--force", is_flag=True, help="Stop a running sandbox first.")
@click.option("--all", "everything", is_flag=True, help="All trajectories; asks first, unless --force.")
@json_option
@click.argument("trajectories", metavar="TRAJECTORY...", nargs=-1, shell_complete=complete_trajectory)
def command(ctx: click.Context, trajectories: tuple[str, ...], force: bool, everything: bool, as_json: bool) -> None:
    """Forget trajectories and free what only they used.

    Their snapshots, conversations and tags go with them. Refused while a sandbox runs (unless --force) or forks exist,
    and for a tag or a snapshot: `snapshotd tag --delete` takes a tag away.
    With --json: {"removed":[ids]}.
    """
    if everything == bool(trajectories):
        refuse("name the trajectories to forget, or give --all, not both")
    client = connect(ctx)
    if everything:
        trajectories = tuple(item.id for item in client.trajectories())
        if not force and trajectories:
            _ask_for_all(len(trajectories))
            force = True
    found = [(client.trajectory(ref), ref) for ref in trajectories]
    removed = []
    for line, ref in sorted(found, key=lambda one: one[0].created_at, reverse=True):  # forks before what they began at
        client.remove(ref, force=force)  # as the user typed it: the daemon refuses the name of a snapshot
        removed.append(line.id)
        if not as_json:
            click.echo(ref)
    if as_json:
        print_json({"removed": removed})


def _ask_for_all(count: int) -> None:
    """Ask before all trajectories go. UsageError: there is no terminal to ask at. Declined: the answer is no."""
    what = f"{number_of(count, 'trajectory')} with all snapshots"
    if not is_terminal():
        refuse(f"--all would forget {what}, and there is no terminal to ask at; add --force to do it")
    ask(f"Forget {what}, running ones too?")
