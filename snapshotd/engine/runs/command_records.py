"""The records of commands in the background: a file for each, which holds all that is known of it, one event per line, and
which any number of clients can follow.

    <state_dir>/commands/<trajectory>/<command>.ndjson
        started   the intent, written before the command starts
        output    as of a run
        finished  the outcome, written after the snapshot that the command ended with

A record without an end is that of a command that runs, or of one that no daemon could go on with: the outcome is then
that of the command's snapshot, if there is one, or unknown.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from snapshotd.engine.base import CommandInfo, Event, Stream
from snapshotd.engine.context import Context
from snapshotd.engine.events import EventLog, EventLogs, Wait, with_whole_output
from snapshotd.types import CallID, CallStatus, Snapshot, SnapshotID, TrajectoryID, short

ENDED_MAX = 32
"""Ended commands of a trajectory that are listed; the oldest are forgotten first. Their snapshots have all of them."""
_NEWEST = 1000
"""Snapshots in which a command's own is looked for. It was the newest one a moment before the daemon died."""
_END_BYTES = 16 << 10
"""A record's last event, if it is the end, is within its last bytes."""
_log = logging.getLogger(__name__)


class CommandRecords:
    """See the module's text. Thread-safe."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._logs = EventLogs(context.state_dir / "commands", context.config.followed_bytes)

    @contextlib.contextmanager
    def open(self, info: CommandInfo, *, afresh: bool = False) -> Iterator[EventLog]:
        """Open the record of a command for the block. `afresh`: a new record, which begins with `started`."""
        self._context.command_logs(info.trajectory).mkdir(mode=0o700, parents=True, exist_ok=True)
        log = self._logs.begin(_name(info))
        try:
            if afresh:
                log.append(
                    {
                        "event": "started",
                        "command": info.id,
                        "trajectory": info.trajectory,
                        "argv": list(info.argv),
                        "cwd": info.cwd,
                        "began_at_ns": info.began_at_ns,
                        "stdin": info.stdin,
                        "timeout_s": info.timeout_s,
                        **_of_service(info),
                    }
                )
            yield log
        finally:
            self._logs.let_go(_name(info))

    def end(self, log: EventLog, ended: CommandInfo) -> None:
        """Record the end, and forget the oldest ended commands of the trajectory."""
        try:
            log.append(_finished_event(ended))
        except OSError:
            _log.exception("the end of command %s is not recorded, so it is not listed any more", short(ended.id))
            self.remove(ended)
        known = [info for info in self.all_of(ended.trajectory) if not info.running]
        for info in known[: max(0, len(known) - ENDED_MAX)]:
            self.remove(info)

    def remove(self, info: CommandInfo) -> None:
        """Forget a command."""
        self._logs.remove(_name(info))

    def all_of(self, trajectory: TrajectoryID) -> list[CommandInfo]:
        """The commands of a trajectory that are not forgotten, in the order in which they began."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for path in self._context.command_logs(trajectory).iterdir():
                with contextlib.suppress(FileNotFoundError, ValueError, KeyError, IndexError):
                    found.append(_read(path))
        return sorted(found, key=lambda info: info.began_at_ns)

    def follow(self, info: CommandInfo, *, wait: Wait) -> Iterator[Event]:
        """The events of a command, its whole output among them; with `wait`, until `finished`."""
        return with_whole_output(self._logs.follow(_name(info), wait=wait), self._output)

    def _output(self, snapshot: str, stream: Stream) -> Iterator[bytes]:
        taken = self._context.catalog.snapshots.get(SnapshotID(snapshot))
        return self._context.recorded_output(taken, stream) or iter(())

    def find_snapshot(self, info: CommandInfo) -> Snapshot | None:
        """The snapshot that a command ended with; None if there is none."""
        newest = reversed(self._context.catalog.snapshots.of_trajectory(info.trajectory, _NEWEST))
        return next((snapshot for snapshot in newest if snapshot.call.id == info.id), None)

    def settle(self, trajectory: TrajectoryID, spared: Collection[CallID] = ()) -> None:
        """Write an end into the record of every command that has none, except those in `spared`, which this daemon goes on
        with: the outcome that its snapshot has, else that its end is not known."""
        for info in self.all_of(trajectory):
            if not info.running or info.id in spared:
                continue
            taken = self.find_snapshot(info)
            ended = replace(
                info,
                status=CallStatus.UNKNOWN,
                ended_at_ns=time.time_ns(),
                error="its sandbox ended with the daemon or the machine, so its end is not known",
            )
            with self.open(info) as log:
                log.append(_finished_event(ended if taken is None else with_outcome(info, taken)))


def with_outcome(info: CommandInfo, taken: Snapshot) -> CommandInfo:
    """The facts about a command that ended with a snapshot."""
    call = taken.call
    ended_at_ns = call.started_at_ns + call.duration_ns
    return replace(
        info, status=call.status, exit_code=call.exit_code, ended_at_ns=ended_at_ns, snapshot=taken.id, error=call.error
    )


def _read(path: Path) -> CommandInfo:
    """ValueError, KeyError or IndexError: the file was cut off before the command began."""
    with open(path, "rb") as file:
        began = json.loads(file.readline())
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _END_BYTES))
        last = file.read().splitlines()[-1]
    ended: Event = {}
    if last.startswith(b'{"event":"finished"'):
        with contextlib.suppress(ValueError):  # half a line
            ended = json.loads(last)
    return CommandInfo(
        CallID(began["command"]),
        TrajectoryID(began["trajectory"]),
        tuple(began["argv"]),
        began["cwd"],
        began["began_at_ns"],
        began["stdin"],
        began["timeout_s"],
        CallStatus(ended["status"]) if ended else None,
        ended.get("exit_code"),
        ended.get("ended_at_ns"),
        None if ended.get("snapshot") is None else SnapshotID(ended["snapshot"]),
        ended.get("error"),
        service=began.get("service"),
        port=began.get("port"),
        restarts=began.get("restarts", 0),
    )


def _of_service(info: CommandInfo) -> Event:
    if info.service is None:
        return {}
    return {"service": info.service, "port": info.port, "restarts": info.restarts}


def _finished_event(info: CommandInfo) -> Event:
    return {
        "event": "finished",
        "command": info.id,
        "trajectory": info.trajectory,
        "status": info.status,
        "exit_code": info.exit_code,
        "ended_at_ns": info.ended_at_ns,
        "snapshot": info.snapshot,
        "error": None if info.error is None else info.error[:1000],
    }


def _name(info: CommandInfo) -> str:
    """The name of a command's record below the records' directory."""
    return f"{info.trajectory}/{info.id}"
