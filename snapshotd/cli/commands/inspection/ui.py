"""`snapshotd ui`."""

from __future__ import annotations

import os
import sys

import click

from snapshotd.cli.command import connect, declare
from snapshotd.cli.values import complete_trajectory

_EXAMPLES = [
    "snapshotd ui",
    "snapshotd ui fix-tests",
    "snapshotd ui --print --port 8700   # ssh -L 8700:127.0.0.1:8700 HOST",
]


@declare("ui", examples=_EXAMPLES)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Listen on this port, and not on any free one.")
@click.option("--print", "print_only", is_flag=True, help="Print the address, and open no browser.")
@click.argument("trajectory", required=False, shell_complete=complete_trajectory)
def command(ctx: click.Context, port: int, print_only: bool, trajectory: str | None) -> None:
    """Show in a browser what agents did, and act on it.

    The page is served on 127.0.0.1 for as long as this command runs: until Ctrl-C, or until no page was open for a
    quarter of an hour. The address that it prints opens the page once, in one browser; it holds a key that no other user
    of this machine has. The page has your rights, as a command has them.
    """
    client = connect(ctx)
    chosen = None if trajectory is None else client.trajectory(trajectory)
    client.version()  # brings the daemon up
    from snapshotd.page.server import PageServer  # a web server, which no other command needs

    server = PageServer(str(client.socket_path), port=port)
    address = server.address(None if chosen is None else chosen.name or chosen.id)
    click.echo(address)
    sys.stdout.flush()
    if not print_only and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        import webbrowser

        webbrowser.open(address)
    server.run()
