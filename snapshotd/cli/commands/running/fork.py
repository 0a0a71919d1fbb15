"""`snapshotd fork`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from snapshotd.api.trajectories import QueuedFork, QueueInfo
from snapshotd.api.wire import FORK_MAX, QUEUE_MAX
from snapshotd.cli.command import after_dashes, connect, declare, json_option, refuse
from snapshotd.cli.follow import note
from snapshotd.cli.text import print_json, printable
from snapshotd.cli.values import AtOnce, Count, ForkName, complete_snapshot, idle_option
from snapshotd.cli.waiting import Wait, state_of, wait_option
from snapshotd.client.branching.variant_tables import add_options, keywords, read_tables
from snapshotd.terms import number_of, short

_EXAMPLES = [
    "snapshotd fork a1b2c3",
    "snapshotd fork a1b2c3 --n 4 -- --strategy '{index}'",
    "snapshotd fork --resume a1b2c3 --n 2 -- --model other",
    "snapshotd fork a1b2c3 --resume --variant cold:env.TEMPERATURE=0 --variant warm:env.TEMPERATURE=1",
    "snapshotd fork a1b2c3 --resume --variants ways.toml --name 'way-{variant}'",
    "snapshotd fork a1b2c3 --resume --variant hint:message.user='read the log first' --variant fixed:files.app.py=fixed.py",
    "snapshotd fork a1b2c3 --n 1000 --parallel 50 -- ./try.sh '{index}'",
    "for T in $(snapshotd fork best --n 2); do snapshotd exec $T -- make test; done",
]


@declare("fork", examples=_EXAMPLES, splits=True)
@click.option(
    "-n",
    "--n",
    "count",
    type=Count(1, QUEUE_MAX, f"from 1 to {FORK_MAX}, or with --parallel to {QUEUE_MAX:,}"),
    default="1",
    show_default=True,
    metavar="N",
    help="How many, 1 to 256; all or none. With --parallel up to 10,000.",
)
@click.option(
    "--parallel",
    type=AtOnce(),
    metavar="P",
    help="At most P run at once (auto: as many as fit into free memory); another begins when one has ended.",
)
@click.option(
    "--keep-going", is_flag=True, help="One that does not start is said, and the others go on. As --parallel auto."
)
@click.option(
    "--resume", is_flag=True, help="Let the agent go on from the snapshot: what is recorded is replayed up to it."
)
@click.option(
    "--name",
    type=ForkName(),
    metavar="NAME",
    help="Name of the forks; of several, NAME-0, NAME-1, ..., or NAME with {index} or {variant} in it.",
)
@click.option(
    "--variant",
    "single",
    metavar="LABEL:KEY=VALUE",
    multiple=True,
    help="A fork that differs, such as cold:env.TEMPERATURE=0. LABEL alone is one that does not. Repeat it for more.",
)
@click.option(
    "--variants",
    "file",
    metavar="FILE.toml",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The same as a file, with one table for each variant.",
)
@idle_option
@wait_option
@json_option
@click.argument("snapshot", metavar="ID [-- ARGS...]", shell_complete=complete_snapshot)
def command(
    ctx: click.Context,
    snapshot: str,
    count: int,
    parallel: int | None,
    keep_going: bool,
    resume: bool,
    name: str | None,
    single: tuple[str, ...],
    file: Path | None,
    idle_timeout: float | None,
    wait: Wait | None,
    as_json: bool,
) -> int:
    """Start new sandboxes from a snapshot.

    The sandbox that the snapshot came from runs on. Arguments after `--` go to the agent that made the snapshot, which
    is then started in each fork ({index} is the fork's number from 0); if there was no agent, they are a command. After
    `run -- CMD ARGS` they are another command, or, if they begin with an option, new arguments of CMD, or of the
    script where CMD is `sh -c SCRIPT NAME`. With --resume the agent is replayed up to the snapshot, with the same
    arguments or the new ones; if it leaves the recorded path, it goes on live from the last snapshot that matched. Each
    is stopped after half an hour without a command (--idle-timeout; the daemon's SNAPSHOTD_IDLE_TIMEOUT in seconds is
    the default, 0: never); `exec` starts it again.

    With --variant or --variants there is one fork for each variant, with its own

    \b
      name, args, env.X   {index} and {variant} in them become its number and label
      secrets.X           from the variable of this machine that is named
      model               that its gateway asks for
      message.ROLE, drop_messages, messages, result, state.KEY, drop_state   as `edit`
      files.PATH, remove  PATH gets the content of a file of this machine, or goes
      network, memory, cpus, pids, disk   as `run`

    With --parallel the forks need a program, and the command waits until all have ended. If one does not start, those
    that did are removed, unless --keep-going.

    Prints the trajectories' ids, in the order of the variants. With --json: {"experiment","trajectories":[ids]}, with
    variants also {"variants":[labels]}, with --parallel {"experiment","children":[{"index","label","trajectory",
    "status","exit_code","error"}]}.
    """
    variants = _variants(file, single)
    client = connect(ctx)
    if parallel is not None or keep_going:
        if wait is not None or idle_timeout is not None:
            refuse("--wait and --idle-timeout are of forks that stay; leave them out, or --parallel and --keep-going")
        try:
            queue = client.fork_queue(
                snapshot,
                count,
                parallel=parallel or None,
                keep_going=keep_going,
                args=after_dashes(ctx),
                name=name,
                resume=resume,
                variants=variants or None,
                on_child=_say,
            )
        except KeyboardInterrupt:
            note("no other fork begins; the ones that run go on")
            raise
        return _report_queue(queue, as_json)
    if (wanted := len(variants) or count) > FORK_MAX:
        refuse(
            f"{number_of(wanted, 'fork')} are more than the {FORK_MAX} that one fork makes; --parallel P makes them P at a time"
        )
    forked = client.fork(
        snapshot,
        count,
        args=after_dashes(ctx),
        name=name,
        resume=resume,
        variants=variants or None,
        wait=wait or "captured",
        idle_timeout=idle_timeout,
    )
    ids = [item.id for item in forked.trajectories]
    for warning in forked.warnings:
        note(printable(warning))
    if as_json:
        state = {} if wait is None else {"state": state_of(client, *(item.head for item in forked.trajectories))}
        print_json(
            {
                "experiment": forked.experiment,
                "trajectories": ids,
                **({"variants": list(variants)} if variants else {}),
                **state,
            }
        )
    else:
        for label, item in zip(variants, forked.trajectories, strict=False):
            if item.name is None:
                note(f"{printable(label)}: {short(item.id)}")
        for each in ids:
            click.echo(each)
    return 0


def _say(child: QueuedFork) -> None:
    how = child.error
    if how is None and child.trajectory is not None:
        how = f"exit code {child.trajectory.exit_code}"
    note(f"{printable(child.label)}: {'' if child.trajectory is None else short(child.trajectory.id) + '  '}{how}")


def _report_queue(queue: QueueInfo, as_json: bool) -> int:
    if as_json:
        print_json({"experiment": queue.experiment, "children": [_child_json(child) for child in queue.children]})
    else:
        for child in queue.children:
            if child.trajectory is not None:
                click.echo(child.trajectory.id)
    return int(bool(queue.failed))


def _child_json(child: QueuedFork) -> dict[str, Any]:
    line = child.trajectory
    return {
        "index": child.index,
        "label": child.label,
        "trajectory": None if line is None else line.id,
        "status": None if line is None else line.status,
        "exit_code": None if line is None else line.exit_code,
        "error": child.error,
    }


def _variants(file: Path | None, single: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the client's keywords for each label: the variants of the file, then those of the options."""
    tables = add_options({}, single, Path()) if file is None else add_options(read_tables(file), single, file.parent)
    return {label: keywords(label, table) for label, table in tables.items()}
