"""Commands in the background: following one on the terminal, and the options that declare one to be a service."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import click

from snapshotd.cli.command import join_options, refuse
from snapshotd.cli.follow import BetweenLines, note, show_event
from snapshotd.cli.text import printable
from snapshotd.cli.values import Count, Name, Seconds
from snapshotd.client.client import Snapshotd
from snapshotd.client.feeding import Readable
from snapshotd.client.results import CommandInfo, ServiceOptions
from snapshotd.errors import SandboxFailed, SnapshotdError
from snapshotd.terms import READY_TIMEOUT_S, RESTARTS_MAX, short

_PIECE_BYTES = 64 << 10
_NAMES = ("ready", "port", "ready_timeout", "required", "restarts")


def command_logs(client: Snapshotd, trajectory: str, ref: str, *, as_json: bool, following: bool) -> None:
    """Show what a command has printed so far; with `following`, until it has ended."""
    found = client.command(trajectory, ref)
    events = client.command_events(found.trajectory, found.id, follow=following)
    _show_events(events, BetweenLines(), as_json=as_json)


def attach_command(
    client: Snapshotd, trajectory: str, ref: str, source: Readable | None, *, as_json: bool, quiet: bool
) -> int:
    """Show a command from its beginning to its end, and send it `source`. Returns its exit code."""
    found = client.command(trajectory, ref)
    events = client.command_events(
        found.trajectory, found.id, on_lost=lambda: note("the daemon went away; following its successor")
    )
    if source is not None:
        threading.Thread(target=_feed, args=(client, found, source), name="stdin", daemon=True).start()
    lines = BetweenLines()
    _show_events(events, lines, as_json=as_json)
    done = client.command(found.trajectory, found.id)
    if not quiet and not as_json:
        taken = "no snapshot" if done.snapshot is None else f"snapshot {short(done.snapshot)}"
        code = "" if done.exit_code is None else f", exit code {done.exit_code}"
        lines.line(f"■ {done.status}{code}, {taken}", at_once=True)
    return exit_code_of(done)


def wait_for_command(client: Snapshotd, trajectory: str, ref: str) -> CommandInfo:
    """Wait until a command has ended, and return it."""
    found = client.command(trajectory, ref)
    for _ in client.command_events(found.trajectory, found.id):
        pass
    return client.command(found.trajectory, found.id)


def exit_code_of(done: CommandInfo) -> int:
    """Return the exit code of a command that has ended. SandboxFailed: it is not known."""
    if done.exit_code is None:
        raise SandboxFailed(
            f"the exit code of command {short(done.id)} is not known: {done.error or 'its sandbox ended under it'}"
        )
    return done.exit_code


def _show_events(events: Iterator[dict[str, Any]], lines: BetweenLines, *, as_json: bool) -> None:
    for event in events:
        if not show_event(event, lines, as_json=as_json) and event["event"] == "warning":
            lines.line(f"snapshotd: {printable(event['message'])}", at_once=True)


def _feed(client: Snapshotd, found: CommandInfo, source: Readable) -> None:
    try:
        while data := source.read(_PIECE_BYTES):
            client.write_command(found.trajectory, found.id, data)
        client.write_command(found.trajectory, found.id, b"", end=True)
    except SnapshotdError as exc:
        with contextlib.suppress(SnapshotdError):
            if client.command(found.trajectory, found.id).status == "running":
                note(exc.message)


service_options = join_options(
    click.option(
        "--service",
        metavar="NAME",
        type=Name(),
        help="With --detach: a service, which comes back in forks, rewinds and starts of later snapshots.",
    ),
    click.option("--ready", metavar="CMD", help="The service is ready once this line of the shell succeeds there."),
    click.option(
        "--port",
        metavar="PORT",
        type=Count(1, 65535),
        help="The service is ready once it listens there; `snapshotd port` takes its name.",
    ),
    click.option(
        "--ready-timeout",
        metavar="SECONDS",
        type=Seconds(),
        help=f"A service that is not ready after so long is ended.  [default: {READY_TIMEOUT_S:g}]",
    ),
    click.option("--required", is_flag=True, help="A sandbox does not start if the service does not come back."),
    click.option(
        "--restarts",
        metavar="N",
        type=Count(0, RESTARTS_MAX),
        help="Start the service again when it has ended by itself, so often in one sandbox.  [default: 0]",
    ),
)
"""The options of a service; `service_of` takes them."""


def service_of(options: dict[str, Any]) -> ServiceOptions | None:
    """Take the options of a service out of a command's. Returns the service; None: the command is none."""
    name = options.pop("service")
    given = {key: value for key in _NAMES if (value := options.pop(key)) not in (None, False)}
    if name is None:
        if given:
            refuse(
                f"--{next(iter(given)).replace('_', '-')} is for a service; give it a name with --service, or leave it out"
            )
        return None
    if "ready_timeout" in given:
        given["ready_timeout_s"] = given.pop("ready_timeout")
    return ServiceOptions(name, **given)
