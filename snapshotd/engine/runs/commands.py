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

from snapshotd.api.commands import BackgroundRequest, CommandFields
from snapshotd.engine import requests
from snapshotd.engine.base import CommandInfo, Event, ExecResult, OutputSink
from snapshotd.engine.caller import Caller
from snapshotd.engine.context import Context
from snapshotd.engine.events import EventLog, Wait
from snapshotd.engine.runs.command_records import CommandRecords, with_outcome
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
from snapshotd.service import DeclaredService
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

Ended = Callable[[Sandbox, CommandInfo], object]
"""Told of a service that has ended by itself, in a thread of its own."""
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
    ended: Ended = lambda *_: None


class KnownCommands:
    """The running commands, and the newest ended ones of each trajectory. Thread-safe."""

    def __init__(self, records: CommandRecords) -> None:
        self._records = records
        self._live: dict[CallID, _Live] = {}
        self._lock = threading.Lock()

    def add(self, live: _Live) -> None:
        """Add a command that runs from now on."""
        with self._lock:
            self._live[live.info.id] = live

    def forget(self, live: _Live) -> None:
        """Forget a command that has ended."""
        with self._lock:
            self._live.pop(live.info.id, None)

    def all_of(self, trajectory: TrajectoryID) -> list[CommandInfo]:
        """The commands of a trajectory that run, and the newest that have ended, in the order in which they began. Commands
        in the foreground are among them: their clients may have gone away."""
        with self._lock:
            live = list(self._live.values())
        foreground = (
            one.info
            for one in live
            if one.info.trajectory == trajectory and not one.info.background and _is_running(one.process)
        )
        ready = {one.info.id for one in live if one.command.ready}
        known = [replace(info, ready=info.id in ready) for info in self._records.all_of(trajectory)]
        return sorted([*known, *foreground], key=lambda info: info.began_at_ns)

    def find(self, trajectory: Trajectory, ref: str) -> CommandInfo:
        """The command with this unique prefix of its id, or the newest command of the service of this name. NotFound,
        Ambiguous."""
        known = self.all_of(trajectory.id)
        served = [info for info in known if info.service == ref]
        if served:
            return served[-1]
        found = [info for info in known if info.id.startswith(ref)]
        if len(ref) >= MIN_PREFIX_CHARS and len(found) == 1:
            return found[0]
        name = trajectory.shown_name
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
                raise _already_ended(info)
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

    def events(self, trajectory: Trajectory, ref: str, *, follow: Wait) -> Iterator[Event]:
        """See `RunService.command_events`."""
        return self._records.follow(self._find_in_background(trajectory, ref), wait=follow)

    def _running(self, info: CommandInfo) -> _Live:
        """The command as it runs. Conflict: it has ended."""
        with self._lock:
            live = self._live.get(info.id)
        if live is None:
            raise _already_ended(info)
        return live


class Commands:
    """See the module's text. Thread-safe."""

    def __init__(
        self, context: Context, execution: Execution, stepped: StepListener, check_place: Callable[[Sandbox], object]
    ) -> None:
        """`check_place`: raises Conflict if no command can be run in a sandbox now."""
        self._context, self._execution, self._stepped, self._check_place = context, execution, stepped, check_place
        self._records = CommandRecords(context)
        self.known = KnownCommands(self._records)
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
            self.known.add(live)
            try:
                call, _ = self._follow(live, sink=sink, caller=caller, abandon=not record, save=record or save)
                for sentence in (*sandbox.use.ended_for, *(sandbox.use.take_notices() if record else ())):
                    sink("stderr", f"snapshotd: {sentence}\n".encode())
                snapshot = None
                if record:
                    snapshot = commit_step(
                        self._context.catalog, sandbox, call, self._stepped, request=requests.present()
                    )
            finally:
                self.known.forget(live)
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
        info, _ = self._begin(sandbox, request, stdin=request.stdin)
        hit("engine.command.started")
        return info

    def serve(
        self, sandbox: Sandbox, service: DeclaredService, restarts: int, ended: Ended
    ) -> tuple[CommandInfo, ClientCommand]:
        """Start a service as `begin` does. It is no tool call: it leaves no snapshot. `restarts`: as in `CommandInfo`."""
        return self._begin(sandbox, _fields(service), service=service, restarts=restarts, ended=ended)

    def serve_unrecorded(self, sandbox: Sandbox, service: DeclaredService, sink: OutputSink) -> ClientCommand:
        """Start a service in a throw-away sandbox, with which it ends."""
        with contextlib.ExitStack() as scope:
            command = scope.enter_context(sandbox.use.command(background=True, service=service.name))
            info, spec = self._describe(sandbox, command, _fields(service), stdin=False)
            process, before = self._execution.start(sandbox, spec, command=command)
            live = _Live(info, sandbox, command, process, before, None)
            self._in_thread(self._drain, live, sink, scope.pop_all())
        return command

    def _drain(self, live: _Live, sink: OutputSink, scope: contextlib.ExitStack) -> None:
        with scope, contextlib.suppress(SnapshotdError, OSError):  # its sandbox has ended
            self._follow(live, sink=sink, save=False)

    def _begin(
        self,
        sandbox: Sandbox,
        request: CommandFields,
        *,
        stdin: bool = False,
        service: DeclaredService | None = None,
        restarts: int = 0,
        ended: Ended = lambda *_: None,
    ) -> tuple[CommandInfo, ClientCommand]:
        with contextlib.ExitStack() as scope:
            name = "" if service is None else service.name
            command = scope.enter_context(sandbox.use.command(background=True, service=name))
            info, spec = self._describe(sandbox, command, request, stdin)
            if service is not None:
                info = replace(info, service=service.name, port=service.port, restarts=restarts)
            outlive(self._context, sandbox)
            log = scope.enter_context(self._records.open(info, afresh=True))
            if service is None:
                self._context.catalog.requests.add(requests.present(), [info.id])  # before it starts: it starts once
            hit("engine.command.begun")
            kept = self._kept_process(sandbox, info.id)
            try:
                kept.open()
                process, before = self._execution.start(sandbox, spec, command=command, keep=kept.key)
            except BaseException:
                kept.close()
                kept.drop()
                self._records.end(log, replace(info, status=CallStatus.FAILED, error="it could not be started"))
                self._records.remove(info)
                raise
            live = _Live(info, sandbox, command, process, before, info.timeout_s, kept, ended)
            self._follow_in_thread(live, kept, log, scope.pop_all())
        return info, command

    def go_on(self, sandbox: Sandbox, kept: Mapping[CallID, Process], ended: Ended = lambda *_: None) -> None:
        """Go on with the commands of an earlier daemon in a sandbox that it left."""
        known = {info.id: info for info in self._records.all_of(sandbox.trajectory.id) if info.running}
        gone_on_with = set()
        for command_id, process in kept.items():
            try:
                if command_id in known:
                    self._go_on_with(sandbox, known[command_id], process, ended)
                    gone_on_with.add(command_id)
                    continue
            except (SnapshotdError, OSError):
                _log.warning("command %s of %s is not gone on with", command_id, sandbox.trajectory.id, exc_info=True)
                process.kill()
            os.close(process.stdout_fd)
            os.close(process.stderr_fd)
            self._kept_process(sandbox, command_id).drop()  # else its end was recorded just before
        self._records.settle(sandbox.trajectory.id, spared=gone_on_with)

    def _go_on_with(self, sandbox: Sandbox, info: CommandInfo, process: Process, ended: Ended) -> None:
        with contextlib.ExitStack() as scope:
            command = scope.enter_context(sandbox.use.command(background=True, service=info.service or ""))
            command.process, command.mark, command.alone = process, info.id, False
            log = scope.enter_context(self._records.open(info))
            kept = self._kept_process(sandbox, info.id)
            kept.open()
            live = _Live(info, sandbox, command, process, sandbox.hits(), _left_s(info), kept, ended)
            self._follow_in_thread(live, kept, log, scope.pop_all())
        _log.info("going on with command %s of %s", short(info.id), short(sandbox.trajectory.id))

    def _kept_process(self, sandbox: Sandbox, command: CallID) -> KeptProcess:
        return KeptProcess(self._context.keeper, f"{sandbox.container.id}.{COMMANDS}.{command}", sandbox.survival.kept)

    def _follow_in_thread(self, live: _Live, kept: KeptProcess, log: EventLog, scope: contextlib.ExitStack) -> None:
        if live.info.stdin:
            kept.open_input()
        self.known.add(live)
        self._in_thread(self._follow_to_record, live, kept, log, scope)

    def _in_thread(self, work: Callable[..., None], *told: object) -> None:
        thread = threading.Thread(target=work, args=told, name="command")
        with self._lock:
            self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        thread.start()

    def _follow_to_record(self, live: _Live, kept: KeptProcess, log: EventLog, scope: contextlib.ExitStack) -> None:
        info = live.info
        with scope:
            ended = replace(info, status=CallStatus.UNKNOWN)
            try:
                call, outcome = self._follow(live, log=log, save=info.service is None)
                ended = (
                    self._commit(live, call, outcome, log) if info.service is None else _end_service(live, call, log)
                )
            except (SnapshotdError, OSError) as exc:  # OSError: the disk of the records is full
                gone = live.command.cut_off or live.sandbox.closed
                ended = replace(info, status=CallStatus.INTERRUPTED if gone else CallStatus.UNKNOWN, error=str(exc))
                _log.warning("command %s of %s is ended: %s", short(info.id), short(info.trajectory), exc)
            finally:
                kept.close()
                self.known.forget(live)
                self._records.end(log, replace(ended, ended_at_ns=time.time_ns()))
                kept.drop()
        _log.info("command %s of %s ended: %s", short(info.id), short(info.trajectory), ended.status)
        if not live.command.cut_off:
            live.ended(live.sandbox, info)

    def _commit(self, live: _Live, call: ToolCall, outcome: CommandOutcome, log: EventLog) -> CommandInfo:
        """Take the snapshot of a command that has ended, unless an earlier daemon has."""
        taken = self._records.find_snapshot(live.info)
        if taken is None:
            taken = commit_step(self._context.catalog, live.sandbox, call, self._stepped)
        hit("engine.command.committed")
        if log.full:
            log.append({"event": "rest", "snapshot": taken.id})
            log.left_out.update(outcome.lost_bytes)
        _tell_left_out(log)
        return with_outcome(live.info, taken)

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
        """Pass on the command's output until it has ended. Returns the call that it was, and its outcome."""
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

    def close(self) -> None:
        """Return when the ends of all commands are recorded. Called when all sandboxes have ended."""
        with self._lock:
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.join()


def _end_service(live: _Live, call: ToolCall, log: EventLog) -> CommandInfo:
    """Tell what the log left out, and return the facts about a service that has ended."""
    _tell_left_out(log)
    status, failure = call.status, live.command.failure
    if live.command.cut_off:  # the exit code is that of the signal
        status = CallStatus.INTERRUPTED
    if failure is not None:
        status = CallStatus.FAILED
    return replace(live.info, status=status, exit_code=call.exit_code, error=failure or call.error)


def _tell_left_out(log: EventLog) -> None:
    for stream, count in (+log.left_out).items():
        message = f"neither shown nor recorded: {number_of(count, 'byte')} of its {stream}"
        log.append({"event": "warning", "message": message})


def _fields(service: DeclaredService) -> CommandFields:
    return CommandFields(service.argv, service.cwd, dict(service.env), service.user)


def _check_argv(request: CommandFields) -> None:
    if not request.argv:
        raise UsageError("there is no command to run: the list of its words is empty")


def _left_s(info: CommandInfo) -> float | None:
    """Seconds until the timeout of a command ends it."""
    if info.timeout_s is None:
        return None
    return max(0.001, info.timeout_s - (time.time_ns() - info.began_at_ns) / 1e9)


def _call_of(live: _Live, outcome: CommandOutcome) -> ToolCall:
    """The record of a command that has ended, as a tool call."""
    info, status, exit_code = live.info, status_of(outcome), outcome.exit_code
    error = None if exit_code == 0 else reached_limit(live.sandbox, live.before)
    if live.command.timed_out and exit_code == KILLED:  # else it had ended before
        status, exit_code = CallStatus.TIMED_OUT, TIMED_OUT
        error = f"the command was ended with all that it started, since it took longer than its timeout of {info.timeout_s:g} s"
    elif live.command.cut_off and exit_code == KILLED:
        status = CallStatus.INTERRUPTED
    return ToolCall(
        info.id,
        "exec",
        {"argv": list(info.argv), "cwd": info.cwd, **({"background": True} if info.background else {})},
        status=status,
        started_at_ns=info.began_at_ns,
        duration_ns=time.time_ns() - info.began_at_ns,
        exit_code=exit_code,
        error=error,
        stdout=outcome.stdout,
        stderr=outcome.stderr,
    )


def _is_running(process: Process) -> bool:
    try:
        return process.wait(0) is None
    except SandboxFailed:  # it has ended, and its exit code is lost
        return False


def _already_ended(info: CommandInfo) -> Conflict:
    return Conflict(f"command {short(info.id)} has ended already; `snapshotd ps {short(info.trajectory)}` shows how")
