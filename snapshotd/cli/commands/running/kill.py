"""`snapshotd kill`."""

from __future__ import annotations

import signal

import click

from snapshotd.cli.command import connect, declare, json_option, refuse
from snapshotd.cli.text import print_answer
from snapshotd.cli.values import complete_command, complete_trajectory


@declare(
    "kill",
    examples=[
        "snapshotd kill box 3c2f",
        "snapshotd kill -s INT box 3c2f",
        "snapshotd kill box $(snapshotd ps -q box)",
        "snapshotd kill --remove box db",
    ],
)
@click.option(
    "-s",
    "--signal",
    "name",
    metavar="SIGNAL",
    default="KILL",
    show_default=True,
    help="By name (TERM, SIGTERM) or number.",
)
@click.option(
    "--remove", is_flag=True, help="COMMAND is a service: end it and take its declaration away, in a new snapshot."
)
@json_option
@click.argument("trajectory", shell_complete=complete_trajectory)
@click.argument("commands", metavar="COMMAND...", nargs=-1, shell_complete=complete_command)
def command(
    ctx: click.Context, trajectory: str, commands: tuple[str, ...], name: str, remove: bool, as_json: bool
) -> None:
    """Send a signal to commands of a sandbox.

    COMMAND is an id that `snapshotd exec --detach` printed, or a prefix of it; `snapshotd ps TRAJECTORY` lists them, and
    those of `snapshotd exec` as long as they run, also if their client has gone away. KILL ends a command with all that
    it started, but for daemons that have put off its environment; any other signal goes to the command's process group,
    as from a terminal. The command's snapshot is taken when it has ended. To end a sandbox with all that runs in it:
    `snapshotd stop`. With --json: an array of the commands as they were at the signal.

    COMMAND may be the name of a service (`exec --detach --service`). A signal ends its process alone: it comes back with the
    next fork, rewind or start of the sandbox. With --remove it does not: the new snapshot, and all that begins there, is
    without it; its id is printed, and a stopped sandbox is started for that. With --json then: an array of the ids.
    """
    number = _number(name)
    if not commands:
        refuse(
            f"no command was named; `snapshotd ps {trajectory}` lists them, and `snapshotd stop {trajectory}` ends the sandbox "
            "after a last snapshot"
        )
    client = connect(ctx)
    if remove:
        ended = [client.remove_service(trajectory, one).id for one in commands]
        print_answer(ended, "\n".join(ended), as_json=as_json)
        return
    found = [client.command(trajectory, ref) for ref in commands]  # none is signalled if one is unknown
    told = [client.signal_command(one.trajectory, one.id, number) for one in found]
    print_answer(told, "\n".join(commands), as_json=as_json)


def _number(name: str) -> int:
    if name.isascii() and name.isdigit() and 1 <= int(name) <= 64:
        return int(name)
    try:
        return signal.Signals[f"SIG{name.upper().removeprefix('SIG')}"]
    except KeyError:
        refuse(f"{name!r} is no signal; use a name such as TERM or INT, or a number from 1 to 64")
