"""`snapshotd port`."""

from __future__ import annotations

import sys
import time

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.follow import catch_signals, note
from snapshotd.cli.text import print_json
from snapshotd.cli.values import PortPair, complete_trajectory
from snapshotd.errors import SnapshotdError

_NOTE_EVERY_S = 1.0
_EXAMPLES = [
    "snapshotd port box 8000",
    "snapshotd port box 8000:9000   # curl http://127.0.0.1:9000/",
    "snapshotd port box db          # the port that the service db declares",
    "snapshotd port --unix /run/box.sock box 8000",
]


@declare("port", examples=_EXAMPLES)
@click.option(
    "--unix", metavar="PATH", type=click.Path(), help="Listen on a new unix socket, which only this user may use."
)
@json_option
@click.argument("trajectory", shell_complete=complete_trajectory)
@click.argument("port", metavar="PORT[:LOCAL]", type=PortPair())
def command(
    ctx: click.Context, trajectory: str, port: tuple[int | str, int | None], unix: str | None, as_json: bool
) -> int:
    """Reach a server inside a sandbox at an address of this machine.

    Connections to 127.0.0.1:LOCAL (without LOCAL, or with 0: any free port) go to the TCP server on PORT in the sandbox,
    also if the sandbox has no network, and across snapshots and rewinds. The server listens on the sandbox's loopback or
    on all its addresses. The address is the one line on standard output; then the command runs until Ctrl-C or SIGTERM.

    Each connection looks for the sandbox anew, so it may be stopped and started meanwhile. A connection that cannot be
    made is closed, and standard error says why, each reason at most once a second. Every user of this machine may connect to
    127.0.0.1; --unix keeps others out.

    For PORT, the name of a service stands for the port that it declares (`exec --detach --service`).

    With --json: {"address","trajectory","port"}.
    """
    number, local = port
    with catch_signals() as caught:
        client = connect(ctx)
        with client.port(trajectory, number, local, unix=unix, on_failure=_Notes().say) as opened:
            if as_json:
                print_json({"address": opened.address, "trajectory": client.trajectory(trajectory).id, "port": number})
            else:
                click.echo(opened.address)
            sys.stdout.flush()
            return 128 + caught.get()


class _Notes:
    """Failures as lines on standard error, each not more than once in a while: a client may try again without pause."""

    def __init__(self) -> None:
        self._next: dict[str, float] = {}
        """By message; there are few, since all are about one port."""

    def say(self, failure: SnapshotdError) -> None:
        now = time.monotonic()
        if now >= self._next.get(failure.message, 0.0):
            self._next[failure.message] = now + _NOTE_EVERY_S
            note(failure.message)
