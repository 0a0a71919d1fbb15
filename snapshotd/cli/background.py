"""Following a command in the background on the terminal."""

from __future__ import annotations

import base64
import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

import click

from snapshotd.cli.follow import BetweenLines, note
from snapshotd.cli.text import printable
from snapshotd.client.client import Snapshotd
from snapshotd.client.feeding import Readable
from snapshotd.client.results import CommandInfo
from snapshotd.errors import SandboxFailed, SnapshotdError
from snapshotd.terms import short

_PIECE_BYTES = 64 << 10


def command_logs(client: Snapshotd, trajectory: str, ref: str, *, as_json: bool, following: bool) -> None:
    """Show what a command has printed so far; with `following`, until it has ended."""
    found = client.command(trajectory, ref)
    events = client.command_events(found.trajectory, found.id, follow=following)
    for _ in _shown(events, BetweenLines(), as_json=as_json):
        pass


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
    for _ in _shown(events, lines, as_json=as_json):
        pass
    done = client.command(found.trajectory, found.id)
    if not quiet and not as_json:
        taken = "no snapshot" if done.snapshot is None else f"snapshot {short(done.snapshot)}"
        code = "" if done.exit_code is None else f", exit code {done.exit_code}"
        lines.line(f"■ {done.status}{code}, {taken}", at_once=True)
    return exit_code_of(done)


def wait_for_command(client: Snapshotd, trajectory: str, ref: str) -> CommandInfo:
    """The command when it has ended."""
    found = client.command(trajectory, ref)
    for _ in client.command_events(found.trajectory, found.id):
        pass
    return client.command(found.trajectory, found.id)


def exit_code_of(done: CommandInfo) -> int:
    """SandboxFailed: it is not known."""
    if done.exit_code is None:
        raise SandboxFailed(
            f"the exit code of command {short(done.id)} is not known: {done.error or 'its sandbox ended under it'}"
        )
    return done.exit_code


def _shown(events: Iterator[dict[str, Any]], lines: BetweenLines, *, as_json: bool) -> Iterator[dict[str, Any]]:
    """The same events, each once it is on the terminal."""
    for event in events:
        if as_json:
            click.echo(json.dumps(event))
            sys.stdout.flush()
        elif event["event"] == "output":
            lines.output(event["stream"], base64.b64decode(event["data_b64"]))
        elif event["event"] == "warning":
            lines.line(f"snapshotd: {printable(event['message'])}", at_once=True)
        yield event


def _feed(client: Snapshotd, found: CommandInfo, source: Readable) -> None:
    try:
        while data := source.read(_PIECE_BYTES):
            client.write_command(found.trajectory, found.id, data)
        client.write_command(found.trajectory, found.id, b"", end=True)
    except SnapshotdError as exc:
        with contextlib.suppress(SnapshotdError):
            if client.command(found.trajectory, found.id).status == "running":
                note(exc.message)
