"""`snapshotd daemon`."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from snapshotd.cli.command import connect, declare, json_option, refuse
from snapshotd.cli.text import print_json, printable
from snapshotd.client.client import Snapshotd
from snapshotd.daemon.wire import log_path_of
from snapshotd.errors import DaemonUnavailable, NotPermitted

if TYPE_CHECKING:
    from snapshotd.engine.base import Engine

STOP_TIMEOUT_S = 120.0
"""A last snapshot of every sandbox; with live processes and much changed, seconds each."""


@declare("daemon", examples=["sudo snapshotd daemon --foreground", "snapshotd daemon --status", "snapshotd daemon --stop"])
@click.option("--foreground", is_flag=True, help="Log to standard error instead of daemon.log in the state directory.")
@click.option("--stop", is_flag=True, help="Stop the running daemon, after a last snapshot of every sandbox, and wait for its end.")
@click.option("--status", is_flag=True, help="Say what the running daemon is and has; starts none.")
@click.option(
    "--rebuild-catalog", is_flag=True, help="Make a damaged catalog.db again from what is stored, and end; the old one is kept beside it."
)
@click.option("--ready-fd", type=int, hidden=True)
@json_option
@click.pass_context
def command(
    ctx: click.Context, foreground: bool, stop: bool, status: bool, rebuild_catalog: bool, ready_fd: int | None, as_json: bool
) -> int:  # fmt: skip
    """Be the daemon, ask after it, or stop it.

    Without --stop or --status this process becomes the daemon until SIGTERM or Ctrl-C. Nobody needs to: commands run as root start one.
    With --json: --status and --rebuild-catalog print an object, --stop {"stopped":pid}.
    """
    if stop + status + rebuild_catalog > 1:
        refuse("--stop, --status and --rebuild-catalog exclude each other; choose one")
    client = connect(ctx, autostart=False)
    if stop:
        return _stop(client, as_json)
    if status:
        return _status(client, as_json)
    if rebuild_catalog:
        return _rebuild(client, as_json)
    return _serve(client, foreground, ready_fd)


def _rebuild(client: Snapshotd, as_json: bool) -> int:
    """Without a daemon: it cannot start on a damaged catalog."""
    from snapshotd.daemon import server, wiring

    def progress(text: str) -> None:
        click.echo(f"snapshotd: {printable(text)}", err=True)

    report = server.alone(client.state_dir, lambda path: wiring.rebuild_catalog(path, progress))
    if as_json:
        print_json({
            "images": report.images, "trajectories": report.trajectories, "snapshots": report.snapshots, "tags": report.tags,
            "lost": list(report.lost), "left_out": [{"snapshot": item.snapshot, "reason": item.reason} for item in report.left_out],
        })  # fmt: skip
        return 0
    for item in report.left_out:
        click.echo(f"snapshot {item.snapshot} could not be brought back: {printable(item.reason)}", err=True)
    for lost in report.lost:
        click.echo(f"snapshot {lost} came back without its files", err=True)
    counts = f"{report.trajectories} trajectories with {report.snapshots} snapshots, {report.images} images, {report.tags} tags"
    click.echo(f"brought back {counts}")
    return 0


def _serve(client: Snapshotd, foreground: bool, ready_fd: int | None) -> int:
    from snapshotd.daemon.server import ServerOptions, serve

    def open_engine(state_dir: Path) -> Engine:
        from snapshotd.daemon import wiring

        return wiring.open_engine(state_dir)

    options = ServerOptions(client.state_dir, client.socket_path, foreground=foreground, ready_fd=ready_fd)
    return serve(options, open_engine)


def _status(client: Snapshotd, as_json: bool) -> int:
    facts = client.status()
    if as_json:
        print_json(facts)
        return 0
    for key, value in facts.items():
        click.echo(click.style(f"{printable(key):20}", bold=True) + printable(str(value)))
    return 0


def _stop(client: Snapshotd, as_json: bool) -> int:
    """By signal, not through the API, so that a daemon of any version can be stopped."""
    from snapshotd.daemon.lock import lock_holder

    pid = lock_holder(client.state_dir)
    if pid is None:
        raise DaemonUnavailable(f"no daemon serves the state directory {client.state_dir}, so there is none to stop")
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        pass  # it has just ended
    except PermissionError as exc:
        raise NotPermitted(f"the daemon (pid {pid}) belongs to another user; run the command with sudo") from exc
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while lock_holder(client.state_dir) == pid:
        if time.monotonic() > deadline:
            raise DaemonUnavailable(
                f"the daemon (pid {pid}) has not ended {STOP_TIMEOUT_S:.0f} s after SIGTERM; {log_path_of(client.state_dir)} says why"
            )
        time.sleep(0.02)
    if as_json:
        print_json({"stopped": pid})
    else:
        click.echo(f"snapshotd: daemon {pid} has stopped", err=True)
    return 0
