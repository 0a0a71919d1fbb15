"""`snapshotd snapshot`."""

from __future__ import annotations

import queue
import sys

import click

from snapshotd.cli.command import connect, declare, json_option, refuse
from snapshotd.cli.follow import catch_signals, note
from snapshotd.cli.snapshots import report_snapshot
from snapshotd.cli.values import Name, Seconds, complete_trajectory
from snapshotd.cli.waiting import Wait, wait_option
from snapshotd.client.client import Snapshotd
from snapshotd.client.results import SnapshotInfo
from snapshotd.errors import Conflict, NotFound


@declare(
    "snapshot",
    examples=[
        "snapshotd snapshot box",
        "snapshotd snapshot --name before-upgrade box",
        "snapshotd snapshot --every 30s nightly &",
    ],
)
@click.option("--name", type=Name(), help="Tag it with this name.")
@click.option(
    "--every", metavar="SECONDS", type=Seconds(), help="Take one again and again (30, 1.5, 10m), until the run ends."
)
@wait_option
@json_option
@click.argument("trajectory", shell_complete=complete_trajectory)
def command(
    ctx: click.Context, trajectory: str, name: str | None, every: float | None, wait: Wait | None, as_json: bool
) -> int:
    """Take a snapshot of a running sandbox now.

    Its id goes to standard output. Snapshots are taken after every call by themselves: this one is for a moment in
    between. Processes in the sandbox run on; while some are alive, changed files are copied. In the log it is
    a `snapshot`, and in the middle of tool calls of the agent it names them. A fork of it has the files as they were
    then; an agent that is resumed from it makes such a call again, on the files from before the call.

    Refused when the sandbox does not run, since its head has its files then (`snapshotd tag`), and while its agent is
    being replayed.

    With --every it goes on until the run or sandbox ends (exit code 0), Ctrl-C or SIGTERM. A turn is left out if no
    file was written since the newest snapshot; where processes were alive then, it may be taken all the same.

    With --json: the snapshot as `log --json` has it, one on each line.
    """
    client = connect(ctx)
    if every is None:
        _show(client, client.take_snapshot(trajectory, name, wait=wait or "captured"), wait, as_json=as_json)
        return 0
    if name is not None:
        refuse("a name belongs to one snapshot; leave out --name or --every")
    return _again_and_again(client, client.trajectory(trajectory).id, every, wait, as_json=as_json)


def _show(client: Snapshotd, taken: SnapshotInfo, wait: Wait | None, *, as_json: bool) -> None:
    report_snapshot(client, taken, wait, as_json=as_json)
    if not as_json:
        click.echo(taken.id)
    sys.stdout.flush()


def _again_and_again(client: Snapshotd, trajectory: str, every_s: float, wait: Wait | None, *, as_json: bool) -> int:
    newest, first = client.trajectory(trajectory).head, True
    with catch_signals() as caught:
        while True:
            try:
                taken = client.take_snapshot(trajectory, if_changed=True, wait=wait or "captured")
            except (Conflict, NotFound) as exc:
                if first:
                    raise
                if not _runs(client, trajectory):
                    return 0
                note(exc.message)
            else:
                if taken.id != newest and taken.tool.name == "snapshot":
                    _show(client, taken, wait, as_json=as_json)
                newest, first = taken.id, False
            try:
                return 128 + caught.get(timeout=every_s)
            except queue.Empty:
                pass


def _runs(client: Snapshotd, trajectory: str) -> bool:
    try:
        return client.trajectory(trajectory).status == "running"
    except NotFound:
        return False
