"""`snapshotd daemon`."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from snapshotd.api.wire import hook_socket_of, lock_path_of, log_path_of
from snapshotd.cli.command import connect, declare, json_option, refuse
from snapshotd.cli.progress import Meter
from snapshotd.cli.text import print_json, printable
from snapshotd.client.client import Snapshotd
from snapshotd.config import Config, read
from snapshotd.errors import DaemonUnavailable, NotPermitted, SnapshotdError
from snapshotd.terms import number_of

if TYPE_CHECKING:
    from snapshotd.daemon.host import Footing

STOP_TIMEOUT_S = 120.0
"""A last snapshot of every sandbox; with live processes and much changed, seconds each."""


KILL_TIMEOUT_S = 60.0
"""A killed process ends at once, unless the kernel holds it (a disk that does not answer)."""
_EXAMPLES = [
    "sudo snapshotd daemon --foreground",
    "snapshotd daemon --status",
    "snapshotd daemon --stop",
    "snapshotd daemon --restart",
]


@declare("daemon", examples=_EXAMPLES)
@click.option("--foreground", is_flag=True, help="Log to standard error instead of daemon.log in the state directory.")
@click.option(
    "--stop",
    is_flag=True,
    help="Stop the running daemon, after a last snapshot of every sandbox, and wait for its end.",
)
@click.option(
    "--restart",
    is_flag=True,
    help="End the running daemon at once, without a last snapshot, and start one in its place: running agents go on, commands of "
    "`exec` are cut off.",
)
@click.option("--status", is_flag=True, help="Say what the running daemon is and has, and its settings; starts none.")
@click.option(
    "--rebuild-catalog",
    is_flag=True,
    help="Make a damaged catalog.db again from the stored snapshots, and end; the old one is kept beside it.",
)
@click.option("--unit", is_flag=True, help="Print the unit for systemd, with the path of this program, and end.")
@click.option(
    "--isolation",
    type=click.Choice(["none"]),
    help="none: be the daemon also where nothing isolates sandboxes, for those alone that ask for `--isolation none`.",
)
@click.option("--ready-fd", type=int, hidden=True)
@json_option
def command(
    ctx: click.Context,
    foreground: bool,
    stop: bool,
    restart: bool,
    status: bool,
    rebuild_catalog: bool,
    unit: bool,
    isolation: str | None,
    ready_fd: int | None,
    as_json: bool,
) -> int:
    """Be the daemon, ask after it, stop it, or put another in its place.

    Without --stop, --restart or --status this process becomes the daemon until SIGTERM or Ctrl-C. This is seldom
    needed: commands start one. --restart also starts one if none ran; commands that follow a run go on at
    the new one. If systemd keeps the daemon, `systemctl kill --kill-whom=main --signal=KILL snapshotd` does the same. With --json:
    --status and --rebuild-catalog print an object, --stop {"stopped":pid}, --restart {"stopped","started"}: two process
    ids, the first null if none ran.
    """
    if stop + restart + status + rebuild_catalog + unit > 1:
        refuse("--stop, --restart, --status, --rebuild-catalog and --unit exclude each other; choose one")
    if unit:
        _print_unit()
        return 0
    client = connect(ctx, autostart=False)
    if stop:
        _stop(client, as_json)
    elif restart:
        _restart(client, as_json)
    elif status:
        _print_status(client, as_json)
    elif rebuild_catalog:
        _rebuild(client, as_json, isolation)
    else:
        return serve_daemon(client, own_settings, isolation, foreground=foreground, ready_fd=ready_fd)
    return 0


def _print_unit() -> None:
    """Print the package's unit with the program that runs now, which may be in an environment of its own."""
    from snapshotd import daemon

    text = Path(daemon.__file__).with_name("snapshotd.service").read_text()
    program = shutil.which(sys.argv[0]) or "/usr/local/bin/snapshotd"
    click.echo(text.replace("/usr/local/bin/snapshotd", os.path.abspath(program)), nl=False)


def _rebuild(client: Snapshotd, as_json: bool, isolation: str | None) -> None:
    """Rebuild the catalog without a daemon, which cannot start on a damaged one."""
    from snapshotd.daemon import server, wiring
    from snapshotd.daemon.host import footing_of

    config = own_settings(client)
    with Meter("rebuilding the catalog", quiet=as_json) as meter:
        report = server.run_alone(
            footing_of(config, isolation),
            client.state_dir,
            lambda footing: wiring.rebuild_catalog(config, meter.line, footing),
        )
    if as_json:
        print_json(
            {
                "image_count": report.images,
                "trajectory_count": report.trajectories,
                "snapshot_count": report.snapshots,
                "tag_count": report.tags,
                "lost": report.lost,
                "left_out": [{"snapshot": item.snapshot, "reason": item.reason} for item in report.left_out],
            }
        )
        return
    for item in report.left_out:
        click.echo(f"snapshot {item.snapshot} could not be brought back: {printable(item.reason)}", err=True)
    for lost in report.lost:
        click.echo(f"snapshot {lost} came back without its files", err=True)
    lines, taken = number_of(report.trajectories, "trajectory"), number_of(report.snapshots, "snapshot")
    counts = f"{lines} with {taken}, {number_of(report.images, 'image')}, {number_of(report.tags, 'tag')}"
    click.echo(f"brought back {counts}")


def serve_daemon(
    client: Snapshotd,
    settings: Callable[[Snapshotd], Config],
    isolation: str | None,
    *,
    foreground: bool = False,
    ready_fd: int | None = None,
) -> int:
    """Be the daemon at the client's places until told to stop. Returns the exit code. `settings` may raise."""
    from snapshotd.daemon.importing import pause_collection

    with pause_collection():
        from snapshotd.daemon.access.address import parse_listen
        from snapshotd.daemon.host import footing_of
        from snapshotd.daemon.server import ServerOptions, report_failures, serve

    with report_failures(ready_fd):
        config = settings(client)
        footing = footing_of(config, isolation)
        listen = parse_listen(config.listen) if config.listen else None

    def open_engine(ground: Footing) -> Any:
        with pause_collection():
            from snapshotd.daemon import wiring  # only when this process has the rights that it is to have
        return wiring.open_engine(config, ground)

    options = ServerOptions(
        client.state_dir,
        client.socket_path,
        foreground=foreground,
        ready_fd=ready_fd,
        hook_socket=hook_socket_of(client.state_dir, footing.places),
        footing=footing,
        listen=listen,
        certificate=tuple(Path(path).absolute() if path else None for path in (config.tls_cert, config.tls_key)),
    )
    code = 1
    try:
        code = serve(options, open_engine)
    except SnapshotdError as exc:
        code = exc.exit_code
        raise
    finally:
        if _has_threads():  # an engine that failed to open or to close leaves some, which keep the process alive
            _leave(code)
    return code


def _leave(code: int) -> None:
    """End this process, and say what it fails with."""
    failure = sys.exc_info()[1]
    if isinstance(failure, SnapshotdError):
        click.echo(f"snapshotd: {printable(failure.message)}", err=True)
    elif failure is not None:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _has_threads() -> bool:
    """True if a thread runs that the interpreter would wait for."""
    return any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())


def own_settings(client: Snapshotd) -> Config:
    """The settings of a daemon in this process."""
    return replace(read(), state_dir=str(client.state_dir), socket=str(client.socket_path))


def _print_status(client: Snapshotd, as_json: bool) -> None:
    facts = client.status()
    if as_json:
        print_json(facts)
        return
    settings = facts.pop("settings", {})
    for found, absent in ((facts, "-"), (settings, "default")):
        for key, value in found.items():
            shown = absent if value is None or value == "" else str(value)
            click.echo(click.style(f"{printable(key):27}", bold=True) + printable(shown))


def _stop(client: Snapshotd, as_json: bool) -> None:
    """Stop by a signal, not through the API, so that a daemon of any version can be stopped."""
    pid = _end(client.state_dir, signal.SIGTERM, STOP_TIMEOUT_S)
    if pid is None:
        raise DaemonUnavailable(f"no daemon serves the state directory {client.state_dir}, so there is none to stop")
    if as_json:
        print_json({"stopped": pid})
    else:
        click.echo(f"snapshotd: daemon {pid} has stopped", err=True)


def _restart(client: Snapshotd, as_json: bool) -> None:
    """Restart without a request to the old daemon, so that a hanging one can be replaced, too."""
    from snapshotd.client.autostart import start_daemon

    stopped = _end(client.state_dir, signal.SIGKILL, KILL_TIMEOUT_S)
    start_daemon(client.state_dir, client.socket_path)
    started = client.version().pid
    if as_json:
        print_json({"stopped": stopped, "started": started})
    else:
        before = "" if stopped is None else f" in place of {stopped}"
        click.echo(f"snapshotd: daemon {started} ready on {client.socket_path}{before}", err=True)


def _end(state_dir: Path, number: signal.Signals, timeout_s: float) -> int | None:
    """Send the daemon of a state directory a signal, and wait until its process is gone, and its mounts with it. Returns its process
    id; None: no daemon ran."""
    from snapshotd.daemon.lock import lock_holder

    pid = lock_holder(state_dir)
    if pid is None:
        return None
    pidfd: int | None = None
    try:
        if _has_open(pid, lock_path_of(state_dir)):
            pidfd = os.pidfd_open(pid)
            signal.pidfd_send_signal(pidfd, number)
        elif lock_holder(state_dir) == pid:
            raise DaemonUnavailable(
                f"the daemon of {state_dir} calls itself process {pid}, but process {pid} here is another: it runs in a container; run the "
                f"command there"
            )
    except ProcessLookupError:
        pass  # it has just ended
    except PermissionError as exc:
        raise NotPermitted(f"the daemon (pid {pid}) belongs to another user; run the command with sudo") from exc
    deadline = time.monotonic() + timeout_s
    while lock_holder(state_dir) == pid or (pidfd is not None and not select.select([pidfd], [], [], 0)[0]):
        if time.monotonic() > deadline:
            raise DaemonUnavailable(
                f"the daemon (pid {pid}) has not ended {timeout_s:.0f} s after {number.name}; {log_path_of(state_dir)} says why"
            )
        time.sleep(0.02)
    if pidfd is not None:
        os.close(pidfd)
    return pid


def _has_open(pid: int, path: Path) -> bool:
    """True if a process of this machine has a file open. A process id from a container means another process here."""
    wanted = path.stat()
    folder = Path(f"/proc/{pid}/fd")
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return False
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(wanted, (folder / name).stat()):
                return True
    return False
