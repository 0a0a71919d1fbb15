"""`snapshotd version`."""

from __future__ import annotations

import click

import snapshotd
from snapshotd.api.wire import API_VERSION
from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.text import print_json
from snapshotd.errors import SnapshotdError


@declare("version", examples=["snapshotd version", "snapshotd version --json"])
@json_option
def command(ctx: click.Context, as_json: bool) -> None:
    """Print the versions of client and daemon.

    Starts no daemon. With --json: {"client_version","api_version","daemon_version"}, where daemon_version is null when none answers.
    """
    daemon: str | None = None
    problem: str | None = None
    try:
        daemon = connect(ctx, autostart=False).version().version
    except SnapshotdError as exc:  # an error of the daemon must not hide the client's version
        problem = exc.message
    if as_json:
        print_json({"client_version": snapshotd.__version__, "api_version": API_VERSION, "daemon_version": daemon})
        return
    click.echo(f"client {snapshotd.__version__} (API {API_VERSION})")
    click.echo(f"daemon {daemon}" if daemon else f"daemon -  ({problem})")
