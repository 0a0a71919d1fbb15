"""Commands that run in the background of a sandbox, without a client.

The keeper is the command's parent and has its pipes, as with an agent, so it outlives the daemon. A file for each holds
all that is known of it, one event per line, which any number of clients can follow:

    <state_dir>/commands/<trajectory>/<command>.ndjson
        started   the intent, written before the command starts
        output    as of a run
        finished  the outcome, written after the snapshot that the command ended with

A daemon that finds a file without an end goes on with the command if it can. Otherwise the outcome is that of the
command's snapshot, if there is one, or unknown.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from snapshotd.engine import requests
from snapshotd.engine.base import CommandInfo, Event, Stream, output_event
from snapshotd.engine.context import Context
from snapshotd.engine.events import EventLog, EventLogs, completed
from snapshotd.engine.sandbox import signals
from snapshotd.engine.sandbox.attach import COMMANDS, record_of
from snapshotd.engine.sandbox.intake import Intake, open_intakes
from snapshotd.engine.sandbox.pump import CommandOutcome, Printed, printed, pump
from snapshotd.engine.sandbox.sandbox import ClientCommand, Sandbox
from snapshotd.engine.sandbox.step import StepListener, commit_step
from snapshotd.engine.sandbox.timeout import Timeout
from snapshotd.errors import Ambiguous, Conflict, NotFound, SandboxFailed, SnapshotdError, UsageError
from snapshotd.failpoints import hit
from snapshotd.kernel.limits import Hits
from snapshotd.kernel.processes import MARK
from snapshotd.runtime.base import STDIN, ExecSpec, Process
from snapshotd.terms import number_of
from snapshotd.types import (
    MIN_PREFIX_CHARS,
    CallID,
    CallStatus,
    ContainerID,
    Snapshot,
    SnapshotID,
    ToolCall,
    Trajectory,
    TrajectoryID,
    new_id,
    short,
)

ENDED_MAX = 32
"""Ended commands of a trajectory that are listed; the oldest are forgotten first. Their snapshots have all of them."""
_NEWEST = 1000
"""Snapshots in which a command's own is looked for. It was the newest one a moment before the daemon died."""
_WRITE_S = 5.0
"""Seconds for which one `write` waits for a command to take its input."""
_END_BYTES = 16 << 10
"""A log's last event, if it is the end, is within its last bytes."""
_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Live:
    """A command that runs. `key`: the keeper's."""

    info: CommandInfo
    sandbox: Sandbox
    command: ClientCommand
    process: Process
    key: str
    log: EventLog
    before: Hits
    stdin_fd: int | None = None
    """The end of its input to write to; None: it has none, or its input has ended. Changed under `writing`."""
    writing: threading.Lock = field(default_factory=threading.Lock)

    def end_input(self) -> None:
        """Caller holds `writing`. Idempotent."""
        if self.stdin_fd is not None:
            os.close(self.stdin_fd)
            self.stdin_fd = None


class Commands:
    """See the module's text. Thread-safe."""

    def __init__(
        self,
        context: Context,
        start: Callable[[Sandbox, ExecSpec, ClientCommand, str], Process],
        show_in_log: Callable[[Sandbox, bytes], object],
        ended_as: Callable[[Sandbox, ClientCommand, CommandOutcome, Hits, float | None], Mapping[str, Any]],
        stepped: StepListener,
        sandbox_of: Callable[[TrajectoryID], Sandbox | None],
    ) -> None:
        """`start`: starts a command under a key of the keeper. `show_in_log`: see `Runtime.log`. `ended_as`: the
        outcome of a command as fields of its `ToolCall`."""
        self._context, self._start, self._show_in_log = context, start, show_in_log
        self._ended_as, self._stepped, self._sandbox_of = ended_as, stepped, sandbox_of
        self._logs = EventLogs(context.state_dir / "commands", context.config.followed_bytes)
        self._live: dict[CallID, _Live] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    # -- starting ------------------------------------------------------------------------------------------------------

    def begin(self, sandbox: Sandbox, spec: ExecSpec, *, timeout_s: float | None) -> CommandInfo:
        """Start a command. LimitExceeded: too many run in the sandbox; and the errors of `Runtime.exec`, which leave
        nothing."""
        trajectory = sandbox.trajectory
        shown = self._context.secrecy.of(trajectory).conceal({"argv": list(spec.argv), "cwd": spec.cwd})
        info = CommandInfo(
            CallID(new_id()),
            trajectory.id,
            tuple(shown["argv"]),
            shown["cwd"],
            began_at_ns=time.time_ns(),
            stdin=spec.stdin,
            timeout_s=timeout_s,
        )
        key = _key(sandbox.container.id, info.id)
        with contextlib.ExitStack() as scope:
            command = scope.enter_context(sandbox.use.command(background=True))
            command.mark = info.id
            spec = replace(spec, env={**spec.env, MARK: info.id})
            timeout = Timeout(sandbox, command, timeout_s)
            self._outlive(sandbox)
            self._context.command_logs(trajectory.id).mkdir(mode=0o700, parents=True, exist_ok=True)
            log = self._logs.begin(_name(info))
            scope.callback(self._logs.let_go, _name(info))
            log.append(_started(info))
            self._context.catalog.requests.add(requests.present(), [info.id])  # before it starts: it starts once
            hit("engine.command.begun")
            sandbox.survival.kept.append(key)
            try:
                intakes = open_intakes(self._context.keeper, key, sandbox.survival.kept)
                try:
                    before = sandbox.hits()
                    process = self._start(sandbox, spec, command, key)
                except BaseException:
                    _close(intakes)
                    self._drop(sandbox, key)
                    raise
            except BaseException:
                log.append(_finished(replace(info, status=CallStatus.FAILED, error="it could not be started")))
                self._logs.remove(_name(info))
                raise
            live = _Live(info, sandbox, command, process, key, log, before)
            self._follow_in_thread(live, timeout, intakes, (), scope.pop_all())
        hit("engine.command.started")
        return info

    def go_on(self, sandbox: Sandbox, kept: Mapping[CallID, Process]) -> None:
        """Go on with the commands of an earlier daemon in a sandbox that it left."""
        known = {info.id: info for info in listed(self._context, sandbox.trajectory.id) if info.running}
        gone_on_with = set()
        for command_id, process in kept.items():
            try:
                if command_id in known:
                    self._go_on_with(sandbox, known[command_id], process)
                    gone_on_with.add(command_id)
                    continue
            except (SnapshotdError, OSError):
                _log.warning("command %s of %s is not gone on with", command_id, sandbox.trajectory.id, exc_info=True)
                process.kill()
            os.close(process.stdout_fd)
            os.close(process.stderr_fd)
            self._drop(sandbox, _key(sandbox.container.id, command_id))  # else its end was recorded just before
        settle(self._context, sandbox.trajectory, spared=gone_on_with)

    def _go_on_with(self, sandbox: Sandbox, info: CommandInfo, process: Process) -> None:
        key = _key(sandbox.container.id, info.id)
        sandbox.survival.kept.append(key)
        with contextlib.ExitStack() as scope:
            command = scope.enter_context(sandbox.use.command(background=True))
            command.process, command.mark = process, info.id
            left_s = None if info.timeout_s is None else info.timeout_s - (time.time_ns() - info.began_at_ns) / 1e9
            timeout = Timeout(sandbox, command, None if left_s is None else max(0.001, left_s))
            log = self._logs.begin(_name(info))
            scope.callback(self._logs.let_go, _name(info))
            intakes = open_intakes(self._context.keeper, key, sandbox.survival.kept)
            live = _Live(info, sandbox, command, process, key, log, sandbox.hits())
            self._follow_in_thread(live, timeout, intakes, printed(log.follow(wait=False)), scope.pop_all())
        _log.info("going on with command %s of %s", short(info.id), short(sandbox.trajectory.id))

    def _outlive(self, sandbox: Sandbox) -> None:
        """The next daemon can go on with the sandbox. One with a program does that by itself."""
        with sandbox.lock:
            if sandbox.use.agent_running or sandbox.survival.is_kept:
                return
            if not sandbox.survival.has_record:
                record = record_of(self._context, sandbox.container.id)
                record.open()
                sandbox.survival.use(record)
            facts = {
                "trajectory": sandbox.trajectory.id,
                "started_at_ns": sandbox.started_at_ns,
                "idle_timeout_s": sandbox.use.idle_timeout_s,
            }
            sandbox.outlive(facts)

    # -- the life of one -----------------------------------------------------------------------------------------------

    def _follow_in_thread(
        self,
        live: _Live,
        timeout: Timeout,
        intakes: dict[Stream, Intake],
        earlier: Iterable[Printed],
        scope: contextlib.ExitStack,
    ) -> None:
        if live.info.stdin:
            live.stdin_fd = self._context.keeper.held(live.key + STDIN)
            live.sandbox.survival.kept.append(live.key + STDIN)
        if live.stdin_fd is not None:
            os.set_blocking(live.stdin_fd, False)
        thread = threading.Thread(target=self._follow, args=(live, timeout, intakes, earlier, scope), name="command")
        with self._lock:
            self._live[live.info.id] = live
            self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        thread.start()

    def _follow(
        self,
        live: _Live,
        timeout: Timeout,
        intakes: dict[Stream, Intake],
        earlier: Iterable[Printed],
        scope: contextlib.ExitStack,
    ) -> None:
        info, sandbox = live.info, live.sandbox

        def show(stream: Stream, data: bytes, shown_bytes: int) -> None:
            self._show_in_log(sandbox, data)
            live.log.append({**output_event(stream, data), "shown_bytes": shown_bytes})

        with scope:
            ended = replace(info, status=CallStatus.UNKNOWN)
            try:
                with timeout.over(live.process):
                    outcome = pump(
                        live.process,
                        self._context.secrecy.of(sandbox.trajectory),
                        show,
                        spool=self._context.spool,
                        max_bytes=self._context.config.output_bytes,
                        intakes=intakes,
                        earlier=earlier,
                    )
                ended = self._ended(live, outcome)
            except (SnapshotdError, OSError) as exc:  # OSError: the disk of the logs is full
                gone = live.command.cut_off or sandbox.closed
                ended = replace(info, status=CallStatus.INTERRUPTED if gone else CallStatus.UNKNOWN, error=str(exc))
                _log.warning("command %s of %s is ended: %s", short(info.id), short(info.trajectory), exc)
            finally:
                _close(intakes)
                with live.writing:
                    live.end_input()
                with self._lock:
                    self._live.pop(info.id, None)
                self._record_end(live, replace(ended, ended_at_ns=time.time_ns()))
                self._drop(sandbox, live.key)
                self._forget_oldest(info.trajectory)
        _log.info("command %s of %s ended: %s", short(info.id), short(info.trajectory), ended.status)

    def _record_end(self, live: _Live, ended: CommandInfo) -> None:
        try:
            live.log.append(_finished(ended))
        except OSError:
            _log.exception("the end of command %s is not recorded, so it is not listed any more", short(ended.id))
            self._logs.remove(_name(ended))

    def _ended(self, live: _Live, outcome: CommandOutcome) -> CommandInfo:
        """Take the snapshot of a command that has ended, unless an earlier daemon has."""
        info, sandbox = live.info, live.sandbox
        fields = self._ended_as(sandbox, live.command, outcome, live.before, info.timeout_s)
        now = time.time_ns()
        call = ToolCall(
            info.id,
            "exec",
            {"argv": list(info.argv), "cwd": info.cwd, "background": True},
            started_at_ns=info.began_at_ns,
            duration_ns=now - info.began_at_ns,
            stdout=outcome.stdout,
            stderr=outcome.stderr,
            **fields,
        )
        taken = _taken(self._context, info)
        if taken is None:
            taken = commit_step(self._context.catalog, sandbox, call, self._stepped)
        hit("engine.command.committed")
        if live.log.full:
            live.log.append({"event": "rest", "snapshot": taken.id})
            live.log.left_out.update(outcome.lost_bytes)
        for stream, count in (+live.log.left_out).items():
            live.log.append(
                {
                    "event": "warning",
                    "message": f"neither shown nor recorded: {number_of(count, 'byte')} of its {stream}",
                }
            )
        return _as_taken(info, taken)

    def _drop(self, sandbox: Sandbox, key: str) -> None:
        """Have the keeper let go of all that belongs to a command."""
        for name in (key, f"{key}.stdout", f"{key}.stderr", key + STDIN):
            self._context.keeper.drop(name)
            with contextlib.suppress(ValueError):
                sandbox.survival.kept.remove(name)

    def _forget_oldest(self, trajectory: TrajectoryID) -> None:
        ended = [info for info in listed(self._context, trajectory) if not info.running]
        for info in ended[: max(0, len(ended) - ENDED_MAX)]:
            self._logs.remove(_name(info))

    # -- verbs ---------------------------------------------------------------------------------------------------------

    def all_of(self, trajectory: TrajectoryID) -> list[CommandInfo]:
        """The running ones, and the newest of the ended ones, in the order in which they began. Also those that run in the
        foreground: their clients may have gone away."""
        foreground = (one.info for one in self._in_foreground(trajectory) if one.info is not None)
        return sorted([*listed(self._context, trajectory), *foreground], key=lambda info: info.began_at_ns)

    def _in_foreground(self, trajectory: TrajectoryID) -> list[ClientCommand]:
        sandbox = self._sandbox_of(trajectory)
        if sandbox is None:
            return []
        with sandbox.lock:
            return [one for one in sandbox.use.commands if one.process is not None and _runs(one.process)]

    def find(self, trajectory: Trajectory, ref: str) -> CommandInfo:
        """By unique prefix of its id. NotFound, Ambiguous."""
        found = [info for info in self.all_of(trajectory.id) if info.id.startswith(ref)]
        if len(ref) >= MIN_PREFIX_CHARS and len(found) == 1:
            return found[0]
        name = trajectory.name or short(trajectory.id)
        if len(found) > 1:
            raise Ambiguous(
                f"{number_of(len(found), 'command')} of {name} begin with {ref!r}: {', '.join(short(info.id) for info in found[:5])}; "
                "name more of the id"
            )
        raise NotFound(
            f"{name} has no command {ref!r} that runs, or ran in the background; `snapshotd ps {name}` lists them, by ids of which "
            f"{MIN_PREFIX_CHARS} characters are enough"
        )

    def _find_in_background(self, trajectory: Trajectory, ref: str) -> CommandInfo:
        info = self.find(trajectory, ref)
        if not info.background:
            raise UsageError(
                f"command {short(info.id)} runs in the foreground, so its client has its input and output; `snapshotd kill` ends "
                f"it, and `snapshotd log {short(info.trajectory)}` shows its snapshot then"
            )
        return info

    def signal(self, trajectory: Trajectory, ref: str, number: int) -> CommandInfo:
        """See `RunService.signal_command`."""
        info = self.find(trajectory, ref)
        sandbox, command, process = self._process_of(info)
        with sandbox.lock:
            if sandbox.closed or not signals.send(sandbox, command, process, number):
                raise _ended_already(info)
        return info

    def _process_of(self, info: CommandInfo) -> tuple[Sandbox, ClientCommand, Process]:
        """Conflict: it has ended."""
        if info.background:
            live = self._running(info)
            return live.sandbox, live.command, live.process
        sandbox = self._sandbox_of(info.trajectory)
        for one in self._in_foreground(info.trajectory):
            if sandbox is not None and one.process is not None and one.info is not None and one.info.id == info.id:
                return sandbox, one, one.process
        raise _ended_already(info)

    def write(self, trajectory: Trajectory, ref: str, data: bytes, *, end: bool) -> int:
        """See `RunService.write_command`."""
        info = self._find_in_background(trajectory, ref)
        if not info.stdin:
            raise UsageError(
                f"command {short(info.id)} was started without an input; start it with one (`snapshotd exec --detach -i`, stdin=True)"
            )
        live = self._running(info)
        with live.writing:
            count = self._write(live, data)
            if end and count == len(data):
                self._context.keeper.drop(live.key + STDIN)
                live.end_input()
            return count

    def _write(self, live: _Live, data: bytes) -> int:
        """Bytes that the command takes within a time."""
        count, deadline = 0, time.monotonic() + _WRITE_S
        view = memoryview(data)
        while count < len(data):
            if live.stdin_fd is None:
                raise Conflict(
                    f"the input of command {short(live.info.id)} has ended; nothing more can be written to it"
                )
            try:
                count += os.write(live.stdin_fd, view[count:])
            except BlockingIOError:
                left_s = deadline - time.monotonic()
                poller = select.poll()
                poller.register(live.stdin_fd, select.POLLOUT)
                if left_s <= 0 or not poller.poll(left_s * 1000):
                    return count
            except OSError as exc:
                if exc.errno != errno.EPIPE:
                    raise
                raise Conflict(
                    f"command {short(live.info.id)} reads no more input: it has ended, or closed its standard input"
                ) from None
        return count

    def events(self, trajectory: Trajectory, ref: str, *, follow: bool) -> Iterator[Event]:
        """See `RunService.command_events`."""
        info = self._find_in_background(trajectory, ref)
        return completed(self._logs.follow(_name(info), wait=follow), self._recorded)

    def _recorded(self, snapshot: str, stream: Stream) -> Iterator[bytes]:
        taken = self._context.catalog.get_snapshot(SnapshotID(snapshot))
        return self._context.recorded(taken, stream) or iter(())

    def _running(self, info: CommandInfo) -> _Live:
        with self._lock:
            live = self._live.get(info.id)
        if live is None:
            raise _ended_already(info)
        return live

    def close(self) -> None:
        """All sandboxes have ended: return when all is recorded."""
        with self._lock:
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.join()


def settle(context: Context, trajectory: Trajectory, spared: Iterable[CallID] = ()) -> None:
    """Give commands that no daemon can go on with, but those `spared`, the outcome that is known."""
    for info in listed(context, trajectory.id):
        if not info.running or info.id in spared:
            continue
        taken = _taken(context, info)
        ended = replace(
            info,
            status=CallStatus.UNKNOWN,
            ended_at_ns=time.time_ns(),
            error="its sandbox ended with the daemon or the machine, so its end is not known",
        )
        logs = EventLogs(context.state_dir / "commands", context.config.followed_bytes)
        logs.begin(_name(info)).append(_finished(ended if taken is None else _as_taken(info, taken)))


def listed(context: Context, trajectory: TrajectoryID) -> list[CommandInfo]:
    """The commands of a trajectory that are not forgotten, in the order in which they began."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for path in context.command_logs(trajectory).iterdir():
            with contextlib.suppress(FileNotFoundError, ValueError, KeyError, IndexError):
                found.append(_read(path))
    return sorted(found, key=lambda info: info.began_at_ns)


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
    )


def _started(info: CommandInfo) -> Event:
    return {
        "event": "started",
        "command": info.id,
        "trajectory": info.trajectory,
        "argv": list(info.argv),
        "cwd": info.cwd,
        "began_at_ns": info.began_at_ns,
        "stdin": info.stdin,
        "timeout_s": info.timeout_s,
    }


def _finished(info: CommandInfo) -> Event:
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


def _taken(context: Context, info: CommandInfo) -> Snapshot | None:
    """The snapshot that a command ended with; None if there is none."""
    newest = reversed(context.catalog.snapshots(info.trajectory, _NEWEST))
    return next((snapshot for snapshot in newest if snapshot.call.id == info.id), None)


def _as_taken(info: CommandInfo, taken: Snapshot) -> CommandInfo:
    call = taken.call
    ended_at_ns = call.started_at_ns + call.duration_ns
    return replace(
        info, status=call.status, exit_code=call.exit_code, ended_at_ns=ended_at_ns, snapshot=taken.id, error=call.error
    )


def _runs(process: Process) -> bool:
    try:
        return process.wait(0) is None
    except SandboxFailed:  # it has ended, and its exit code is lost
        return False


def _name(info: CommandInfo) -> str:
    """Name of its log below the logs' directory."""
    return f"{info.trajectory}/{info.id}"


def _key(container: ContainerID, command: CallID) -> str:
    return f"{container}.{COMMANDS}.{command}"


def _ended_already(info: CommandInfo) -> Conflict:
    return Conflict(f"command {short(info.id)} has ended already; `snapshotd ps {short(info.trajectory)}` shows how")


def _close(intakes: Mapping[Stream, Intake]) -> None:
    for intake in intakes.values():
        intake.close()
