"""Commands in live sandboxes: one model for those that a client waits for and those in the background.

A command is started under an id of its own, its output is passed on until it has ended, its end becomes that of a tool
call, and its snapshot is taken. In the foreground the caller's thread does that, and shows the output to the caller. In
the background a thread of its own does, and writes the output to the command's record (command_records.py); besides,
the keeper is the command's parent and has its pipes, as with an agent. So it outlives the daemon, and the next one goes
on with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from snapshotd.api.commands import BackgroundRequest, CommandFields
from snapshotd.engine import requests
from snapshotd.engine.base import CommandInfo, Event, ExecResult, OutputSink
from snapshotd.engine.caller import Caller
from snapshotd.engine.context import Context
from snapshotd.engine.events import EventLog
from snapshotd.engine.runs.command_records import CommandRecords, ended_with
from snapshotd.engine.runs.execution import KILLED, Execution, reached_limit, status_of
from snapshotd.engine.sandbox import signals
from snapshotd.engine.sandbox.attach import COMMANDS, outlive
from snapshotd.engine.sandbox.kept import KeptProcess
from snapshotd.engine.sandbox.pump import CommandOutcome
from snapshotd.engine.sandbox.sandbox import ClientCommand, Sandbox
from snapshotd.engine.sandbox.step import StepListener, commit_step
from snapshotd.engine.sandbox.timeout import EXIT_CODE as TIMED_OUT
from snapshotd.engine.sandbox.timeout import end_after, is_empty
from snapshotd.errors import Ambiguous, Conflict, NotFound, SandboxFailed, SnapshotdError, UsageError
from snapshotd.failpoints import hit
from snapshotd.kernel.limits import Hits
from snapshotd.kernel.processes import MARK
from snapshotd.runtime.base import ExecSpec, Process
from snapshotd.terms import number_of
from snapshotd.types import (
    MIN_PREFIX_CHARS,
    CallID,
    CallStatus,
    SnapshotID,
    ToolCall,
    Trajectory,
    TrajectoryID,
    new_id,
    short,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, slots=True)
class _Live:
    """A command that runs. `before`: the hits at the sandbox's limits when it began. `timeout_s`: it may run for so long
    from now on. `kept`: None in the foreground."""

    info: CommandInfo
    sandbox: Sandbox
    command: ClientCommand
    process: Process
    before: Hits
    timeout_s: float | None
    kept: KeptProcess | None = None


class Commands:
    """See the module's text. Thread-safe."""

    def __init__(
        self, context: Context, execution: Execution, stepped: StepListener, check_place: Callable[[Sandbox], object]
    ) -> None:
        """`check_place`: raises Conflict if no command can be run in a sandbox now."""
        self._context, self._execution, self._stepped, self._check_place = context, execution, stepped, check_place
        self._records = CommandRecords(context)
        self._live: dict[CallID, _Live] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    # -- in the foreground ---------------------------------------------------------------------------------------------

    def exec(
        self,
        sandbox: Sandbox,
        request: CommandFields,
        *,
        sink: OutputSink,
        record: bool,
        save: bool = False,
        expected_head: SnapshotID | None = None,
        caller: Caller | None = None,
    ) -> ExecResult:
        """Run one command to its end. With `record` it is a tool call and gets its snapshot, also when its caller is
        gone; without, it ends with its caller. With `save` its output is kept all the same, for a step of the caller's.
        `expected_head`: see `if_head`."""
        _check_argv(request)
        if record:
            self._check_place(sandbox)
        with sandbox.use.command() as command, sandbox.writer.claim(sandbox.lock, sandbox.trajectory.id, expected_head):
            sandbox.use.ended_for.clear()
            gives_input = caller is not None and caller.gives_input
            terminal = None if caller is None else caller.terminal
            info, spec = self._describe(sandbox, command, request, gives_input, terminal)
            process, before = self._execution.start(sandbox, spec, command=command)
            live = _Live(info, sandbox, command, process, before, info.timeout_s)
            with self._lock:
                self._live[info.id] = live
            try:
                call, _ = self._follow(live, sink=sink, caller=caller, abandon=not record, save=record or save)
                for sentence in sandbox.use.ended_for:
                    sink("stderr", f"snapshotd: {sentence}\n".encode())
                snapshot = None
                if record:
                    snapshot = commit_step(
                        self._context.catalog, sandbox, call, self._stepped, request=requests.present()
                    )
            finally:
                self._forget(live)
        if call.exit_code is None:
            raise SandboxFailed(
                "the command has ended and its exit code is lost; its output and files are with its snapshot"
            )
        return ExecResult(call.exit_code, snapshot, call)

    # -- in the background ---------------------------------------------------------------------------------------------

    def begin(self, sandbox: Sandbox, request: BackgroundRequest) -> CommandInfo:
        """Start a command and return; see `RunService.exec_in_background`. LimitExceeded: too many run in the sandbox; and
        the errors of `Runtime.exec`, which leave nothing."""
        _check_argv(request)
        self._check_place(sandbox)
        with contextlib.ExitStack() as scope:
            command = scope.enter_context(sandbox.use.command(background=True))
            info, spec = self._describe(sandbox, command, request, request.stdin)
            outlive(self._context, sandbox)
            log = scope.enter_context(self._records.opened(info, afresh=True))
            self._context.catalog.requests.add(requests.present(), [info.id])  # before it starts: it starts once
            hit("engine.command.begun")
            kept = self._kept(sandbox, info.id)
            try:
                kept.open()
                process, before = self._execution.start(sandbox, spec, command=command, keep=kept.key)
            except BaseException:
                kept.close()
                kept.drop()
                self._records.end(log, replace(info, status=CallStatus.FAILED, error="it could not be started"))
                self._records.remove(info)
                raise
            live = _Live(info, sandbox, command, process, before, info.timeout_s, kept)
            self._follow_in_thread(live, kept, log, scope.pop_all())
        hit("engine.command.started")
        return info

    def go_on(self, sandbox: Sandbox, kept: Mapping[CallID, Process]) -> None:
        """Go on with the commands of an earlier daemon in a sandbox that it left."""
        known = {info.id: info for info in self._records.all_of(sandbox.trajectory.id) if info.running}
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
            self._kept(sandbox, command_id).drop()  # else its end was recorded just before
        self._records.settle(sandbox.trajectory.id, spared=gone_on_with)

    def _go_on_with(self, sandbox: Sandbox, info: CommandInfo, process: Process) -> None:
        with contextlib.ExitStack() as scope:
            command = scope.enter_context(sandbox.use.command(background=True))
            command.process, command.mark, command.alone = process, info.id, False
            log = scope.enter_context(self._records.opened(info))
            kept = self._kept(sandbox, info.id)
            kept.open()
            live = _Live(info, sandbox, command, process, sandbox.hits(), _left_s(info), kept)
            self._follow_in_thread(live, kept, log, scope.pop_all())
        _log.info("going on with command %s of %s", short(info.id), short(sandbox.trajectory.id))

    def _kept(self, sandbox: Sandbox, command: CallID) -> KeptProcess:
        return KeptProcess(self._context.keeper, f"{sandbox.container.id}.{COMMANDS}.{command}", sandbox.survival.kept)

    def _follow_in_thread(self, live: _Live, kept: KeptProcess, log: EventLog, scope: contextlib.ExitStack) -> None:
        if live.info.stdin:
            kept.open_input()
        thread = threading.Thread(target=self._follow_to_record, args=(live, kept, log, scope), name="command")
        with self._lock:
            self._live[live.info.id] = live
            self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        thread.start()

    def _follow_to_record(self, live: _Live, kept: KeptProcess, log: EventLog, scope: contextlib.ExitStack) -> None:
        info = live.info
        with scope:
            ended = replace(info, status=CallStatus.UNKNOWN)
            try:
                call, outcome = self._follow(live, log=log)
                ended = self._commit(live, call, outcome, log)
            except (SnapshotdError, OSError) as exc:  # OSError: the disk of the records is full
                gone = live.command.cut_off or live.sandbox.closed
                ended = replace(info, status=CallStatus.INTERRUPTED if gone else CallStatus.UNKNOWN, error=str(exc))
                _log.warning("command %s of %s is ended: %s", short(info.id), short(info.trajectory), exc)
            finally:
                kept.close()
                self._forget(live)
                self._records.end(log, replace(ended, ended_at_ns=time.time_ns()))
                kept.drop()
        _log.info("command %s of %s ended: %s", short(info.id), short(info.trajectory), ended.status)

    def _commit(self, live: _Live, call: ToolCall, outcome: CommandOutcome, log: EventLog) -> CommandInfo:
        """Take the snapshot of a command that has ended, unless an earlier daemon has."""
        taken = self._records.find_snapshot(live.info)
        if taken is None:
            taken = commit_step(self._context.catalog, live.sandbox, call, self._stepped)
        hit("engine.command.committed")
        if log.full:
            log.append({"event": "rest", "snapshot": taken.id})
            log.left_out.update(outcome.lost_bytes)
        for stream, count in (+log.left_out).items():
            log.append(
                {
                    "event": "warning",
                    "message": f"neither shown nor recorded: {number_of(count, 'byte')} of its {stream}",
                }
            )
        return ended_with(live.info, taken)

    def _describe(
        self,
        sandbox: Sandbox,
        command: ClientCommand,
        request: CommandFields,
        stdin: bool,
        terminal: tuple[int, int] | None = None,
    ) -> tuple[CommandInfo, ExecSpec]:
        """The facts about a command that a client asks for, and its specification. Errors: as `Execution.spec`."""
        agent = sandbox.trajectory.agent
        cwd = request.cwd or ("/workspace" if agent is None else agent.cwd)
        shown = self._context.secrecy.of(sandbox.trajectory).conceal({"argv": list(request.argv), "cwd": cwd})
        info = CommandInfo(
            CallID(new_id()),
            sandbox.trajectory.id,
            tuple(shown["argv"]),
            shown["cwd"],
            time.time_ns(),
            stdin=stdin,
            timeout_s=request.timeout_s,
            background=command.background,
        )
        command.mark = info.id
        if request.timeout_s is not None and not is_empty(sandbox):
            command.alone = False
        env = {**({} if terminal is None else {"TERM": "xterm"}), **request.env, MARK: info.id}
        spec = self._execution.spec(sandbox, request.argv, cwd, tuple(env.items()), request.user)
        return info, replace(spec, stdin=stdin, terminal=terminal)

    def _follow(
        self,
        live: _Live,
        *,
        sink: OutputSink | None = None,
        log: EventLog | None = None,
        caller: Caller | None = None,
        abandon: bool = False,
        save: bool = True,
    ) -> tuple[ToolCall, CommandOutcome]:
        """Pass on its output until it has ended: the call that it was then."""
        process = live.process
        with end_after(live.timeout_s, live.sandbox, live.command, process):
            outcome = self._execution.follow(
                live.sandbox,
                process,
                sink=sink,
                log=log,
                kept=live.kept,
                caller=caller,
                abandon=abandon or process.terminal,
                save=save,
            )
        return _call_of(live, outcome), outcome

    def _forget(self, live: _Live) -> None:
        """It has ended."""
        with self._lock:
            self._live.pop(live.info.id, None)

    # -- verbs ---------------------------------------------------------------------------------------------------------

    def all_of(self, trajectory: TrajectoryID) -> list[CommandInfo]:
        """The running ones, and the newest of the ended ones, in the order in which they began. Also those that run in the
        foreground: their clients may have gone away."""
        with self._lock:
            live = list(self._live.values())
        foreground = (
            one.info
            for one in live
            if one.info.trajectory == trajectory and not one.info.background and _runs(one.process)
        )
        return sorted([*self._records.all_of(trajectory), *foreground], key=lambda info: info.began_at_ns)

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
        live = self._running(info)
        with live.sandbox.lock:
            if live.sandbox.closed or not signals.send(live.sandbox, live.command, live.process, number):
                raise _ended_already(info)
        return info

    def write(self, trajectory: Trajectory, ref: str, data: bytes, *, end: bool) -> int:
        """See `RunService.write_command`."""
        info = self._find_in_background(trajectory, ref)
        if not info.stdin:
            raise UsageError(
                f"command {short(info.id)} was started without an input; start it with one (`snapshotd exec --detach -i`, stdin=True)"
            )
        kept = self._running(info).kept
        assert kept is not None
        return kept.write(data, short(info.id), end=end)

    def events(self, trajectory: Trajectory, ref: str, *, follow: bool) -> Iterator[Event]:
        """See `RunService.command_events`."""
        return self._records.follow(self._find_in_background(trajectory, ref), wait=follow)

    def _running(self, info: CommandInfo) -> _Live:
        """Conflict: it has ended."""
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


def _check_argv(request: CommandFields) -> None:
    if not request.argv:
        raise UsageError("there is no command to run: the list of its words is empty")


def _left_s(info: CommandInfo) -> float | None:
    """Seconds until the timeout of a command ends it."""
    if info.timeout_s is None:
        return None
    return max(0.001, info.timeout_s - (time.time_ns() - info.began_at_ns) / 1e9)


def _call_of(live: _Live, outcome: CommandOutcome) -> ToolCall:
    """The tool call that a command was, which has ended."""
    info = live.info
    return ToolCall(
        info.id,
        "exec",
        {"argv": list(info.argv), "cwd": info.cwd, **({"background": True} if info.background else {})},
        started_at_ns=info.began_at_ns,
        duration_ns=time.time_ns() - info.began_at_ns,
        stdout=outcome.stdout,
        stderr=outcome.stderr,
        **_end_of(live, outcome),
    )


def _end_of(live: _Live, outcome: CommandOutcome) -> dict[str, Any]:
    """The `status`, `exit_code` and `error` of its call."""
    status, exit_code = status_of(outcome), outcome.exit_code
    error = None if exit_code == 0 else reached_limit(live.sandbox, live.before)
    if live.command.timed_out and exit_code == KILLED:  # else it had ended before
        status, exit_code = CallStatus.TIMED_OUT, TIMED_OUT
        error = f"the command was ended with all that it started, since it took longer than its timeout of {live.info.timeout_s:g} s"
    elif live.command.cut_off and exit_code == KILLED:
        status = CallStatus.INTERRUPTED
    return {"status": status, "exit_code": exit_code, "error": error}


def _runs(process: Process) -> bool:
    try:
        return process.wait(0) is None
    except SandboxFailed:  # it has ended, and its exit code is lost
        return False


def _ended_already(info: CommandInfo) -> Conflict:
    return Conflict(f"command {short(info.id)} has ended already; `snapshotd ps {short(info.trajectory)}` shows how")
