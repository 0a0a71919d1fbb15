"""`snapshotd fork`."""

from __future__ import annotations

import click

from snapshotd.cli.command import after_dashes, connect, declare, json_option
from snapshotd.cli.text import print_json
from snapshotd.cli.values import Count, Name, complete_snapshot
from snapshotd.cli.waiting import Wait, state_of, wait_option
from snapshotd.daemon.http.wire import FORK_MAX

_EXAMPLES = [
    "snapshotd fork a1b2c3",
    "snapshotd fork a1b2c3 --n 4 -- --strategy '{index}'",
    "snapshotd fork --resume a1b2c3 --n 2 -- --model other",
    "for T in $(snapshotd fork best --n 2); do snapshotd exec $T -- make test; done",
]


@declare("fork", examples=_EXAMPLES, splits=True)
@click.option(
    "-n",
    "--n",
    "count",
    type=Count(1, FORK_MAX),
    default="1",
    show_default=True,
    metavar="N",
    help="How many, 1 to 256; all or none.",
)
@click.option(
    "--resume", is_flag=True, help="Let the agent go on from the snapshot: what is recorded is replayed up to it."
)
@click.option("--name", type=Name(), metavar="NAME", help="Name of the forks; of several, NAME-0, NAME-1, ...")
@wait_option
@json_option
@click.argument("snapshot", metavar="ID [-- ARGS...]", shell_complete=complete_snapshot)
@click.pass_context
def command(
    ctx: click.Context, snapshot: str, count: int, resume: bool, name: str | None, wait: Wait | None, as_json: bool
) -> int:
    """Start new sandboxes from a snapshot.

    The sandbox that the snapshot came from runs on. What follows `--` are arguments for the agent that made the
    snapshot, which is then started in each fork ({index} is the fork's number from 0); where there was no agent, it is
    a command. With --resume the agent is replayed up to the snapshot, with the same arguments or those; where it does
    something else than what is recorded, it goes on live from the last snapshot that matched. Prints the trajectories'
    ids. With --json: {"experiment","trajectories":[ids]}.
    """
    client = connect(ctx)
    forked = client.fork(snapshot, count, args=after_dashes(ctx), name=name, resume=resume, wait=wait or "captured")
    ids = [item.id for item in forked.trajectories]
    if as_json:
        state = {} if wait is None else {"state": state_of(client, *(item.head for item in forked.trajectories))}
        print_json({"experiment": forked.experiment, "trajectories": ids, **state})
    else:
        for each in ids:
            click.echo(each)
    return 0
