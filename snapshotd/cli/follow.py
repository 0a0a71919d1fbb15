"""Following a run on the terminal: its output as raw bytes, one line per snapshot on standard error, Ctrl-C stops
it."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, TextIO

import click

from snapshotd.cli.command import drop_output
from snapshotd.cli.snapshots import wait_for_counts
from snapshotd.cli.text import printable, snapshot_line
from snapshotd.cli.waiting import Wait, wait_for_head
from snapshotd.client.client import Snapshotd
from snapshotd.client.results import FileCounts
from snapshotd.errors import BY_CODE, DaemonUnavailable, SandboxFailed, SnapshotdError, UsageError
from snapshotd.terms import number_of, short

INTERRUPTED = 128 + signal.SIGINT
_PATIENCE_S = 3.0
_CLEAR = "\x1b[K"
"""Clears a terminal's line from here on."""


class RawOutput:
    """Writes a program's output where it belongs."""

    def write(self, stream: str, data: bytes) -> None:
        """BrokenPipeError when the stream's reader has gone away; later output to it is dropped."""
        target = sys.stdout if stream == "stdout" else sys.stderr
        try:
            target.buffer.write(data)
            target.buffer.flush()
        except BrokenPipeError:
            drop_output(target)
            raise


class BetweenLines:
    """Writes our lines on standard error between the lines of a program's output, and none in the middle of one."""

    def __init__(self) -> None:
        self._raw = RawOutput()
        self._beside = {"stderr", *({"stdout"} if _one_place(sys.stdout, sys.stderr) else ())}
        """Streams of the program that go where our lines go."""
        self._within = False
        """A line of theirs has begun there."""
        self._add_state: list[str] = []

    def output(self, stream: str, data: bytes) -> None:
        """Write the program's output, and at the end of its line the lines of ours that wait for it. BrokenPipeError as
        `RawOutput.write`."""
        if stream not in self._beside:
            self._raw.write(stream, data)
            return
        if self._add_state and b"\n" in data:
            end = data.index(b"\n") + 1
            self._raw.write(stream, data[:end])
            self._within = False
            self.end()
            data = data[end:]
        if data:
            self._raw.write(stream, data)
            self._within = not data.endswith(b"\n")

    def line(self, text: str, *, at_once: bool = False) -> None:
        """Write a line of ours when the program's present line has ended; `at_once`: now, below it."""
        self._add_state.append(text)
        if at_once or not self._within:
            self.end()

    def end(self) -> None:
        """Write all lines that wait, below the output so far."""
        waiting, self._add_state = self._add_state, []
        if waiting and self._within:
            click.echo(err=True)
            self._within = False
        for text in waiting:
            click.echo(text, err=True)


def _one_place(a: TextIO, b: TextIO) -> bool:
    try:
        return os.path.sameopenfile(a.fileno(), b.fileno())
    except OSError:
        return False  # one is closed


class Interruption:
    """Within its block, the first SIGINT or SIGTERM stops the run, in a thread of its own; a second one leaves at once."""

    def __init__(self, client: Snapshotd, trajectory: str) -> None:
        self._client = client
        self._trajectory = trajectory
        self._before: dict[int, Any] = {}
        self.signal: int | None = None

    def __enter__(self) -> Interruption:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
        note(f"stopping {short(self._trajectory)} after a last snapshot; interrupt again to leave at once")
        threading.Thread(target=self._stop, name="stop", daemon=True).start()

    def _stop(self) -> None:
        try:
            self._client.stop(self._trajectory)
        except SnapshotdError as exc:
            note(f"the run could not be stopped: {exc.message}")


@contextlib.contextmanager
def catch_signals() -> Iterator[queue.SimpleQueue[int]]:
    """Within the block, SIGINT and SIGTERM do nothing but come into this queue."""
    caught = queue.SimpleQueue[int]()
    before = {one: signal.signal(one, lambda number, _: caught.put(number)) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@contextlib.contextmanager
def patience() -> Iterator[None]:
    """Print the likely reason when the block takes long."""
    timer = threading.Timer(
        _PATIENCE_S,
        lambda: note(
            "still starting; what is used for the first time, such as an agent's packages, is made now, which can take a minute"
        ),
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def note(text: str) -> None:
    """Print one line for people on standard error."""
    click.echo(f"snapshotd: {printable(text)}", err=True)


def note_warnings(warnings: Iterable[str]) -> None:
    for warning in warnings:
        note(f"warning: {warning}")


def follow(
    client: Snapshotd, trajectory: str, *, as_json: bool, quiet: bool, stop_on_interrupt: bool, wait: Wait | None = None
) -> int:
    """Show a run until it has finished. Returns the command's exit code: the agent's, 130 when interrupted.

    With `wait`, `finished` comes after that, and has `state`. BrokenPipeError when the output's reader has gone away:
    with `stop_on_interrupt` the run was stopped before.
    """
    replay = ReplayLine()
    events = client.events(trajectory, on_lost=None if quiet else lambda: _tell_lost(replay))
    if as_json or not quiet:
        events = _add_counts(client, trajectory, events)
    if wait is not None:
        events = _add_state(events, client, trajectory, wait)
    if not stop_on_interrupt:
        return _show(events, trajectory, replay, as_json=as_json, quiet=quiet)
    with Interruption(client, trajectory) as interruption:
        try:
            code = _show(events, trajectory, replay, as_json=as_json, quiet=quiet)
        except BrokenPipeError:
            client.stop(trajectory)
            raise
    return code if interruption.signal is None else 128 + interruption.signal


def _add_counts(client: Snapshotd, trajectory: str, events: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Add the counts of changed files to the events of snapshots, which come before the daemon has counted. No line waits for
    them once the daemon did not keep up with its agent, or while it is away."""
    known: dict[str, FileCounts] | None = None
    waits = True
    for event in events:
        if event["event"] == "snapshot" and event["files"] is None:
            with contextlib.suppress(SnapshotdError):
                if known is None:  # all that are counted so far, in one request
                    known = {one.id: one.files for one in client.log(trajectory) if one.files is not None}
                files = known.get(event["id"])
                if files is None:
                    taken = client.snapshot(event["id"])
                    files = (wait_for_counts(client, taken) if waits else taken).files
                    waits = files is not None
                event = {**event, "files": None if files is None else dataclasses.asdict(files)}
        yield event


def _tell_lost(replay: ReplayLine) -> None:
    replay.clear()
    note("the daemon went away; following its successor")


def _add_state(
    events: Iterator[dict[str, Any]], client: Snapshotd, trajectory: str, wait: Wait
) -> Iterator[dict[str, Any]]:
    for event in events:
        yield {**event, "state": wait_for_head(client, trajectory, wait)} if event["event"] == "finished" else event


class ReplayLine:
    """Counts the calls that a resumed program gets from the journal: in one line on a terminal, and in one at their end."""

    def __init__(self) -> None:
        self._count = 0
        self._show_events = False

    def line(self, event: dict[str, Any]) -> str | None:
        """Return the line to print for an event: None for a replayed call; the number of replayed calls once the program is
        live or has ended."""
        if event["event"] == "replayed":
            self._count += 1
            if sys.stderr.isatty():
                click.echo(f"\r{_CLEAR}↻ {number_of(self._count, 'call')} replayed", err=True, nl=False)
                self._show_events = True
            return None
        self.clear()
        count, self._count = (event["replayed"] if event["event"] == "live" else self._count), 0
        if event["event"] == "live":
            return f"↻ {number_of(count, 'call')} replayed; live from {short(event['snapshot'])}"
        return f"↻ {number_of(count, 'call')} replayed" if count else None

    def clear(self) -> None:
        """Make room on the terminal for something else."""
        if self._show_events:
            click.echo(f"\r{_CLEAR}", err=True, nl=False)
            self._show_events = False


def _show(events: Iterable[dict[str, Any]], trajectory: str, replay: ReplayLine, *, as_json: bool, quiet: bool) -> int:
    return end_of_run(_show_events(events, replay, as_json=as_json, quiet=quiet), trajectory)


def logs(client: Snapshotd, trajectory: str, *, as_json: bool, following: bool) -> None:
    """Show what a run has printed so far; with `following`, until it has finished."""
    events = client.events(trajectory, follow=following)
    if as_json:
        events = _add_counts(client, trajectory, events)
    if not sum(1 for _ in _show_events(events, ReplayLine(), as_json=as_json, quiet=True)):
        raise _no_agent(trajectory)


def _no_agent(trajectory: str) -> UsageError:
    return UsageError(
        f"no agent ever ran in {short(trajectory)}, so it has no run; `snapshotd log {short(trajectory)}` shows its "
        f"snapshots, `snapshotd ps {short(trajectory)}` its background commands"
    )


def end_of_run(events: Iterable[dict[str, Any]], trajectory: str) -> int:
    """Read a run's events to their end. Returns the agent's exit code. An error: it has none, or no agent ever ran."""
    seen, warning = False, None
    for event in events:
        seen = True
        if event["event"] == "warning" and "code" in event:
            warning = event
        if event["event"] == "finished":
            return _exit_code(event, trajectory, warning)
    if not seen:
        raise _no_agent(trajectory)
    raise DaemonUnavailable(
        f"the daemon ended the events of {short(trajectory)} before the run did; its snapshots are safe: `snapshotd log "
        f"{short(trajectory)}` lists them, `snapshotd attach {short(trajectory)}` follows again"
    )


def _show_events(
    events: Iterable[dict[str, Any]], replay: ReplayLine, *, as_json: bool, quiet: bool
) -> Iterator[dict[str, Any]]:
    """Show the events, and yield each once it is on the terminal."""
    lines = BetweenLines()
    for event in events:
        if event["event"] == "output":
            replay.clear()
        if not show_event(event, lines, as_json=as_json) and (not quiet or "left_out_bytes" in event):
            for line in (replay.line(event), _line(event)):
                if line:
                    lines.line(line, at_once=event["event"] in ("approval", "finished"))
        yield event
    lines.end()


def show_event(event: dict[str, Any], lines: BetweenLines, *, as_json: bool) -> bool:
    """Print an event as JSON, or the output that it carries. False: it has to be told in another way."""
    if as_json:
        click.echo(json.dumps(event))
        sys.stdout.flush()
    elif event["event"] == "output":
        lines.output(event["stream"], base64.b64decode(event["data_b64"]))
    else:
        return False
    return True


def _line(event: dict[str, Any]) -> str | None:
    kind = event["event"]
    if kind == "started":
        return f"▶ trajectory {short(event['trajectory'])}  {event['runtime']}  {printable(str(event['image_name']))}"
    if kind == "snapshot":
        return snapshot_line(
            seq=event["seq"],
            snapshot_id=event["id"],
            tool=event["name"],
            status=event["status"],
            files=event.get("files"),
            pause_ms=event["pause_ms"],
            method=event.get("method", "pivot"),
            reused=event.get("reused"),
            argument=event.get("argument", ""),
        )
    if kind == "approval":
        which, tool = short(event["id"]), printable(str(event["name"]))
        if event["status"] == "pending":
            return f"⏸ {tool} waits for approval: `snapshotd approval {which}` shows it, `snapshotd approve {which}` lets it run"
        return f"⏵ {tool}: approval {which} is {event['status']}"
    if kind == "warning":
        return f"snapshotd: warning: {printable(event['message'])}"
    if kind == "finished":
        code = event["exit_code"]
        how = event.get("status", "finished") if code is None else f"exit code {code}"
        state = f", {event['state']}" if "state" in event else ""
        reused = _reuse_text(event["reuse"]) if "reuse" in event else ""
        taken = number_of(event["snapshot_count"], "snapshot")
        return f"■ {how}, {taken}{reused}{state}; `snapshotd log {short(event['trajectory'])}` lists them"
    return None


def _reuse_text(count: dict[str, int]) -> str:
    replies = f", {count['replies']} of {count['replies_of']} replies" if "replies" in count else ""
    return f", reused {count['calls']} of {count['of']} calls{replies}"


def _exit_code(event: dict[str, Any], trajectory: str, warning: dict[str, Any] | None) -> int:
    """Return the agent's exit code. It is an error when the run failed although the agent ended well: a program may diverge, and
    catch the error."""
    code = event["exit_code"]
    if code == 0 and event.get("status") == "interrupted" and warning is not None:
        kind = BY_CODE.get(warning["code"], SandboxFailed)
        raise kind(
            f"the agent of {short(trajectory)} ended with exit code 0, and its run did not: {warning['message']}"
        )
    if code is not None:
        return int(code)
    if event.get("status") == "interrupted" and warning is not None:
        raise SandboxFailed(
            f"the run of {short(trajectory)} is interrupted: {warning['message']}; `snapshotd resume {short(trajectory)}` goes on from its "
            "last snapshot"
        )
    if event.get("status") in ("finished", "stopped"):
        return 0
    raise SandboxFailed(
        f"the sandbox of {short(trajectory)} went away before its agent ended ({event.get('status', 'no status')}); its snapshots are "
        f"safe: `snapshotd log {short(trajectory)}` lists them, `snapshotd resume {short(trajectory)}` goes on from the last"
    )
