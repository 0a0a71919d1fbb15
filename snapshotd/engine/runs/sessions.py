"""The live sandboxes of the daemon, and running commands and agents in them."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from snapshotd.engine.base import CommandInfo, ExecResult, OutputSink, Stream, output_event
from snapshotd.engine.caller import Caller
from snapshotd.engine.context import Context
from snapshotd.engine.events import EventLog
from snapshotd.engine.mind.approvals import Gate
from snapshotd.engine.mind.calls import AgentCalls
from snapshotd.engine.mind.gateways import Gateways
from snapshotd.engine.mind.idempotency import Keys, cut_off
from snapshotd.engine.mind.keyvalue import KeyValueStore
from snapshotd.engine.mind.recorder import Recorder
from snapshotd.engine.mind.replay import Resumption
from snapshotd.engine.runs.commands import Commands, settle
from snapshotd.engine.runs.launch import Launcher, alive
from snapshotd.engine.sandbox import users
from snapshotd.engine.sandbox.attach import Survivor, record_of
from snapshotd.engine.sandbox.background import Background
from snapshotd.engine.sandbox.intake import Intake, open_intakes
from snapshotd.engine.sandbox.places import Places
from snapshotd.engine.sandbox.pump import CommandOutcome, Printed, Shown, printed, pump
from snapshotd.engine.sandbox.sandbox import Captured, ClientCommand, Sandbox
from snapshotd.engine.sandbox.step import commit_step, marker
from snapshotd.engine.sandbox.timeout import EXIT_CODE as TIMED_OUT
from snapshotd.engine.sandbox.timeout import Timeout
from snapshotd.engine.storing.cold import Cold, gone
from snapshotd.errors import Conflict, LimitExceeded, SandboxFailed, SnapshotdError, UsageError
from snapshotd.kernel import turns
from snapshotd.kernel.limits import Hits, hits
from snapshotd.runtime.base import DEFAULT_PATH, LIBRARY_DIR, ExecSpec, Process
from snapshotd.types import (
    FOLDER,
    AgentSpec,
    CallStatus,
    ContainerID,
    Snapshot,
    SnapshotID,
    SnapshotState,
    Trajectory,
    TrajectoryID,
    TrajectoryStatus,
    short,
)

_log = logging.getLogger(__name__)
_KILLED = 128 + signal.SIGKILL
_END_S = 10.0
_LEFT_OUT = {
    "stdout": "{} bytes of the program's standard output are not shown and not recorded",
    "stderr": "{} bytes of the program's standard error are not shown and not recorded",
    "calls": "{} bytes that tool calls printed are not shown; `snapshotd show --output` has them, call by call",
}


@dataclass(slots=True)
class _Run:
    thread: threading.Thread
    process: Process


class Sessions:
    """See the module's text. Thread-safe."""

    def __init__(
        self,
        context: Context,
        launcher: Launcher,
        background: Background,
        cold: Cold,
        gate: Gate,
        store: KeyValueStore,
        gateways: Gateways,
    ) -> None:
        self._context, self._launcher, self._background, self._cold = context, launcher, background, cold
        self._gate, self._store, self._gateways = gate, store, gateways
        self._places = Places(context, cold.take)
        self.commands = Commands(
            context,
            self._start_in_background,
            lambda sandbox, data: sandbox.runtime.log(sandbox.container, data),
            _ended_as,
            self._stepped,
        )
        self._recorders: dict[TrajectoryID, Recorder] = {}
        self._live: dict[TrajectoryID, Sandbox] = {}
        self._launched: list[Sandbox] = []
        self._runs: dict[TrajectoryID, _Run] = {}
        self._throw_aways: dict[ContainerID, Sandbox] = {}
        self._closed = False
        self._lock = threading.RLock()
        self._thrown_away = threading.Condition(self._lock)
        self._starting: WeakValueDictionary[TrajectoryID, threading.Lock] = WeakValueDictionary()
        """Each lock exists as long as a thread holds or awaits it."""

    # -- the set of live sandboxes -------------------------------------------------------------------------------------

    def live(self) -> list[Sandbox]:
        with self._lock:
            return list(self._live.values())

    def find(self, trajectory: TrajectoryID) -> Sandbox | None:
        with self._lock:
            return self._live.get(trajectory)

    def stood_on(self) -> set[SnapshotID]:
        """The snapshots that live sandboxes began from, or will build their next on."""
        return {snapshot for sandbox in self.live() for snapshot in (sandbox.base, sandbox.head)}

    def launch(
        self, trajectory: Trajectory, snapshot: Snapshot, head: Snapshot | None = None
    ) -> tuple[Sandbox, AgentCalls]:
        """A sandbox that is not registered yet: the caller either adopts or ends it. `head`: as `Launcher.launch`."""
        if snapshot.state is SnapshotState.LOST:
            raise gone(snapshot)
        sandbox, calls = self._launcher.launch(trajectory, snapshot, head)
        with self._lock:
            self._launched = [*(one for one in self._launched if not one.closed), sandbox]
        return sandbox, calls

    def launched(self) -> list[Sandbox]:
        """Every sandbox in which something may run, throw-away ones, too."""
        with self._lock:
            return list({id(one): one for one in (*self._live.values(), *self._launched) if not one.closed}.values())

    def adopt(
        self, sandbox: Sandbox, calls: AgentCalls, resumption: Resumption | None = None, keys: Keys | None = None
    ) -> None:
        """Register a launched sandbox: from now on its steps are recorded, by it alone. With a `resumption` its program
        is replayed first; `keys`: of calls that it makes again."""
        catalog, trajectory = self._context.catalog, sandbox.trajectory.id
        sandbox.fence = catalog.draw_fence(trajectory)
        sandbox.state = catalog.state(sandbox.head if resumption is None else resumption.began.id)
        if sandbox.trajectory.agent is not None:
            sandbox.live = record_of(self._context, sandbox.container.id)
            sandbox.live.open()
        recorder = Recorder(self._context, sandbox, self._stepped, self._places, resumption, keys)
        calls.bind(sandbox, recorder, self._gate, self._store)
        self._gateways.open(sandbox, recorder)
        self._register(sandbox, recorder)

    def _register(self, sandbox: Sandbox, recorder: Recorder) -> None:
        with self._lock:
            self._live[sandbox.trajectory.id] = sandbox
            self._recorders[sandbox.trajectory.id] = recorder

    def go_on(self, survivors: Iterable[Survivor]) -> None:
        """Go on with the sandboxes of an earlier daemon: their agents, which may be waiting for an answer, do not
        notice."""
        for survivor in survivors:
            try:
                self._attach(survivor)
            except (SnapshotdError, OSError):
                _log.warning("the run of %s cannot be gone on with", survivor.trajectory.id, exc_info=True)
                survivor.give_up(self._context)
                settle(self._context, survivor.trajectory)

    def _attach(self, survivor: Survivor) -> None:
        catalog, trajectory = self._context.catalog, survivor.trajectory
        head = catalog.get_snapshot(trajectory.head)
        sandbox, calls = self._launcher.attach(survivor, head)
        try:
            sandbox.fence = catalog.draw_fence(trajectory.id)
            sandbox.state = catalog.state(head.id)
            recorder = Recorder(self._context, sandbox, self._stepped, self._places, keys=cut_off(catalog, trajectory))
            recorder.restore(survivor.record)
            calls.bind(sandbox, recorder, self._gate, self._store)
            calls.restore()
            sandbox.live = survivor.record
            sandbox.live.open()
            sandbox.outlive(survivor.facts)
            sandbox.idle_timeout_s = survivor.facts.get("idle_timeout_s", 0.0)
            self._gateways.open(sandbox, recorder, survivor.record)
            intakes = {} if survivor.process is None else self._intakes(sandbox)
        except BaseException:
            sandbox.closed = True
            calls.open.set()
            sandbox.server.close()
            raise
        self._register(sandbox, recorder)
        if survivor.process is not None:
            log = self._context.events.begin(trajectory.id)
            began_at_ns = survivor.facts["began_at_ns"]
            self._follow_in_thread(
                sandbox, survivor.process, log, began_at_ns, intakes, printed(log.follow(wait=False))
            )
        self.commands.go_on(sandbox, survivor.commands)
        calls.open.set()
        _log.info("going on with the run of %s", trajectory.id)

    def discard(self, sandbox: Sandbox) -> None:
        """End a sandbox that was never adopted, or whose trajectory is to be forgotten."""
        try:
            self._launcher.end(sandbox)
        finally:
            self._unregister(sandbox)

    @contextlib.contextmanager
    def throw_away(self, trajectory: Trajectory, snapshot: Snapshot) -> Iterator[Sandbox]:
        """A temporary sandbox: no catalog row mentions it, nothing of it is recorded. `close` ends it."""
        sandbox, calls = self.launch(trajectory, snapshot)
        try:
            with self._lock:
                if self._closed:
                    raise _stopped()
                self._throw_aways[sandbox.container.id] = sandbox
            calls.bind(sandbox, None)
            yield sandbox
            if sandbox.closed:
                raise _stopped()
        finally:
            try:
                self.discard(sandbox)
            finally:
                with self._thrown_away:
                    self._throw_aways.pop(sandbox.container.id, None)
                    self._thrown_away.notify_all()

    def _unregister(self, sandbox: Sandbox) -> None:
        """Does nothing if another sandbox has been started for its trajectory meanwhile: that one stays registered."""
        trajectory = sandbox.trajectory.id
        with self._lock:
            if self._live.get(trajectory) is sandbox:
                del self._live[trajectory]
                self._recorders.pop(trajectory, None)
                self._runs.pop(trajectory, None)

    def starting(self, trajectory: TrajectoryID) -> threading.Lock:
        """Held while a trajectory's sandbox is started, so that there is one."""
        with self._lock:
            return self._starting.setdefault(trajectory, threading.Lock())

    def running(self, trajectory: Trajectory) -> Sandbox:
        """The trajectory's sandbox, started from its head if it is not up (any more). UsageError: it is a folder."""
        if trajectory.spec.runtime == FOLDER:
            raise UsageError(
                f"{trajectory.name or short(trajectory.id)} is a folder of this machine, in which no sandbox runs: fork a snapshot of it"
            )
        with self.starting(trajectory.id):
            sandbox = self.find(trajectory.id)
            if sandbox is not None and alive(sandbox):
                return sandbox
            if sandbox is not None:
                self.discard(sandbox)
            current = self._context.catalog.get_trajectory(trajectory.id)
            sandbox, calls = self.launch(current, self._context.catalog.get_snapshot(current.head))
            try:
                self._context.catalog.set_status(trajectory.id, TrajectoryStatus.RUNNING)
                sandbox.idle_timeout_s = self._context.config.idle_timeout_s
                self.adopt(sandbox, calls)
            except BaseException:
                self.discard(sandbox)  # the disk may be full
                raise
            return sandbox

    def stop(self, trajectory: Trajectory, *, keep: bool = True, only: Sandbox | None = None) -> None:
        """End a sandbox, with a last snapshot if something changed and `keep`. Commands of clients are cut off and
        recorded. Not an error when it is not running, or not `only`. Conflict: `only` belongs to a command."""
        with self._lock:
            sandbox, run = self._live.get(trajectory.id), self._runs.get(trajectory.id)
        if sandbox is None or (only is not None and sandbox is not only):
            return
        with sandbox.lock:
            if only is not None and sandbox.commands and not sandbox.closed:
                name = short(trajectory.id)
                raise Conflict(
                    f"a command in {name} has not ended: wait for it, or cut it off (`snapshotd stop {name}`)"
                )
            keep = keep and alive(sandbox)
            if keep:
                sandbox.cut_off()
            if not sandbox.closed:
                self._close(trajectory, sandbox, keep=keep and not self._replaying(trajectory))
        self._launcher.end(sandbox)
        if run is not None and run.thread is not threading.current_thread():
            run.thread.join()
        self._unregister(sandbox)

    def _close(self, trajectory: Trajectory, sandbox: Sandbox, *, keep: bool) -> None:
        """Caller holds the sandbox's lock. On an error it goes on."""
        try:
            if keep and sandbox.changed:
                commit_step(self._context.catalog, sandbox, marker("stop", {}), self._stepped)
            self._context.catalog.set_status(trajectory.id, TrajectoryStatus.STOPPED)
        except BaseException:
            sandbox.ending = False
            raise
        sandbox.closed = True

    def _replaying(self, trajectory: Trajectory) -> bool:
        """True if the trajectory's program is being replayed: the sandbox's files are then recorded already."""
        recorder = self._recorders.get(trajectory.id)
        return recorder is not None and (recorder.replaying or recorder.diverged is not None)

    def _stepped(self, snapshot: Snapshot, captured: Captured) -> None:
        self._background.submit(snapshot, captured)

    # -- commands ------------------------------------------------------------------------------------------------------

    def exec(
        self,
        sandbox: Sandbox,
        argv: tuple[str, ...],
        *,
        cwd: str | None,
        env: tuple[tuple[str, str], ...],
        user: str | None,
        sink: OutputSink,
        record: bool,
        expected_head: SnapshotID | None = None,
        caller: Caller | None = None,
        timeout_s: float | None = None,
    ) -> ExecResult:
        """Run one command to its end. With `record` it is a tool call and gets its snapshot, also when its caller is
        gone; without, it ends with its caller. `expected_head`, `timeout_s`: see `Engine.exec`."""
        if not argv:
            raise UsageError("there is no command to run: the list of its words is empty")
        if record:
            self.check_place(sandbox)
        with sandbox.command() as command, self._claimed(sandbox, expected_head):
            return self._exec(
                sandbox,
                command,
                argv,
                cwd=cwd,
                env=env,
                user=user,
                sink=sink,
                record=record,
                caller=caller,
                timeout_s=timeout_s,
            )

    def check_place(self, sandbox: Sandbox) -> None:
        """Conflict: its program is being replayed, which gives it one root after another."""
        recorder = self._recorders.get(sandbox.trajectory.id)
        if recorder is not None and recorder.retraces:
            name = short(sandbox.trajectory.id)
            raise Conflict(
                f"no command can be run in {name} now: its program is being replayed up to the head; try again when that is "
                f"done (`snapshotd attach {name}`), or fork a snapshot"
            )

    @contextlib.contextmanager
    def _claimed(self, sandbox: Sandbox, head: SnapshotID | None) -> Iterator[None]:
        """Lets one of several writers that name the same head go on; the others raise Conflict until it is done."""
        if head is None:
            yield
            return
        name = short(sandbox.trajectory.id)
        with sandbox.lock:
            if sandbox.head != head:
                raise Conflict(
                    f"the head of {name} is {short(sandbox.head)} and not {short(head)}: look at what came since (`snapshotd log {name}`) "
                    f"and go on from there, or fork the other one (`snapshotd fork {short(head)}`)"
                )
            if sandbox.claimed == head:
                raise Conflict(
                    f"another writer is taking the next step of {name} from its head {short(head)}: wait for it and go on from the new "
                    f"head, or fork (`snapshotd fork {short(head)}`)"
                )
            sandbox.claimed = head
        try:
            yield
        finally:
            with sandbox.lock:
                if (
                    sandbox.claimed == head
                ):  # otherwise a writer without a claim moved the head, and another has claimed that
                    sandbox.claimed = None

    def _exec(
        self,
        sandbox: Sandbox,
        command: ClientCommand,
        argv: tuple[str, ...],
        *,
        cwd: str | None,
        env: tuple[tuple[str, str], ...],
        user: str | None,
        sink: OutputSink,
        record: bool,
        caller: Caller | None,
        timeout_s: float | None,
    ) -> ExecResult:
        spec = self._exec_spec(sandbox, argv, cwd or self._workdir(sandbox.trajectory), env, user)
        if caller is not None and caller.gives_input:
            spec = replace(spec, stdin=True)
        if caller is not None and caller.terminal is not None:
            kind = dict(env).get("TERM", "xterm")
            spec = replace(spec, terminal=caller.terminal, env={**spec.env, "TERM": kind})
        funnel = self._context.secrecy.of(sandbox.trajectory)
        call = marker("exec", funnel.conceal({"argv": list(argv), "cwd": spec.cwd}))
        show = self._logging(sandbox, lambda stream, data, _: sink(stream, data))
        sandbox.ended_for.clear()
        timeout = Timeout(sandbox, command, timeout_s)
        process, before = self._start(sandbox, spec, command=command)
        with timeout.over(process):
            outcome = pump(
                process,
                funnel,
                show,
                spool=self._context.spool,
                max_bytes=self._context.config.output_bytes,
                caller=caller,
                abandon=not record or process.terminal,
            )
        for sentence in sandbox.ended_for:
            sink("stderr", f"snapshotd: {sentence}\n".encode())
        call = replace(
            marker(
                call.name,
                call.arguments,
                stdout=outcome.stdout,
                stderr=outcome.stderr,
                started_at_ns=call.started_at_ns,
                **_ended_as(sandbox, command, outcome, before, timeout_s),
            ),
            id=call.id,
        )
        snapshot = commit_step(self._context.catalog, sandbox, call, self._stepped) if record else None
        if call.exit_code is None:
            raise SandboxFailed(
                "the command has ended and its exit code is lost; its output and files are with its snapshot"
            )
        return ExecResult(call.exit_code, snapshot, call)

    def exec_in_background(
        self,
        sandbox: Sandbox,
        argv: tuple[str, ...],
        *,
        cwd: str | None,
        env: tuple[tuple[str, str], ...],
        user: str | None,
        stdin: bool,
        timeout_s: float | None,
    ) -> CommandInfo:
        """See `Engine.exec_in_background`."""
        if not argv:
            raise UsageError("there is no command to run: the list of its words is empty")
        self.check_place(sandbox)
        spec = self._exec_spec(sandbox, argv, cwd or self._workdir(sandbox.trajectory), env, user)
        return self.commands.begin(sandbox, replace(spec, stdin=stdin), timeout_s=timeout_s)

    def _start_in_background(self, sandbox: Sandbox, spec: ExecSpec, command: ClientCommand, key: str) -> Process:
        return self._start(sandbox, spec, command=command, keep=key)[0]

    def _start(
        self, sandbox: Sandbox, spec: ExecSpec, *, command: ClientCommand | None = None, keep: str | None = None
    ) -> tuple[Process, Hits]:
        """Start a command, never in the middle of a step: between the look at the live processes and the pivot none may
        come in. `command`: a client's; `keep`: as `Runtime.exec`. Also the hits at the sandbox's limits before."""
        with sandbox.lock, turns.first():
            if command is not None and command.cut_off:
                raise Conflict(
                    f"the sandbox of {short(sandbox.trajectory.id)} ended before the command began; try again"
                )
            sandbox.revive()
            before = hits(sandbox.container.pid)
            try:
                process = sandbox.runtime.exec(sandbox.container, spec, keep=keep)
            except SandboxFailed as exc:
                reached = _reached(sandbox, before)
                if reached is None:
                    raise
                raise LimitExceeded(
                    f"{spec.argv[0]!r} could not be started in {short(sandbox.trajectory.id)}: {reached}"
                ) from exc
            if command is not None:
                command.process = process
            return process, before

    def _logging(self, sandbox: Sandbox, show: Shown) -> Shown:
        def both(stream: Stream, data: bytes, shown_bytes: int) -> None:
            sandbox.runtime.log(sandbox.container, data)
            show(stream, data, shown_bytes)

        return both

    def _workdir(self, trajectory: Trajectory) -> str:
        return trajectory.agent.cwd if trajectory.agent is not None else "/workspace"

    def _exec_spec(
        self, sandbox: Sandbox, argv: tuple[str, ...], cwd: str, env: tuple[tuple[str, str], ...], user: str | None
    ) -> ExecSpec:
        who = users.look_up(sandbox.container, user) if user else users.ROOT
        image = self._context.image(sandbox.trajectory.spec.image)
        environment = {
            "PATH": DEFAULT_PATH,
            "HOME": who.home,
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "PYTHONUNBUFFERED": "1",
            # Python takes a .pyc for valid by whole seconds and size: a quick patch, or a fork's, would not be seen.
            "PYTHONDONTWRITEBYTECODE": "1",
            "SNAPSHOTD_TRAJECTORY": sandbox.trajectory.id,
            **dict(image.env if image else ()),
            **self._gateways.environment(sandbox),
            **self._context.secrecy.inside(sandbox.trajectory),
            **dict(env),
        }
        paths = [LIBRARY_DIR, "/opt/agent-packages", *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = ":".join(paths)
        environment["PATH"] = (
            f"{environment['PATH']}:{LIBRARY_DIR}/snapshotd/agent/bin"  # last: an image's own programs come first
        )
        return ExecSpec(list(argv), cwd, environment, who.user, who.group, who.groups)

    # -- agents --------------------------------------------------------------------------------------------------------

    def start_agent(self, sandbox: Sandbox, agent: AgentSpec, *, first: Snapshot | None = None) -> None:
        """Start a trajectory's program from the top; a thread follows it to its end. `first` is its start snapshot, if
        it has one of its own.

        CommandNotFound etc. leave the sandbox as it was.
        """
        trajectory = sandbox.trajectory
        argv = tuple(map(self._context.secrecy.of(trajectory).reveal_text, agent.argv))
        spec = self._exec_spec(sandbox, argv, agent.cwd, agent.env, agent.user)
        began_at_ns = time.time_ns()
        recorder = self._recorders[trajectory.id]
        recorder.after_live = lambda: self._outlive(sandbox, recorder, began_at_ns)
        recorder.after_live()
        sandbox.kept.append(sandbox.container.id)
        intakes = self._intakes(sandbox)
        try:
            process, _ = self._start(sandbox, spec, keep=sandbox.container.id)
        except BaseException:
            _close(intakes)
            raise
        sandbox.agent_running = True
        log = self._context.events.begin(trajectory.id, afresh=True)
        image = self._context.image(trajectory.spec.image)
        log.append(
            {
                "event": "started",
                "trajectory": trajectory.id,
                "snapshot": sandbox.head,
                "runtime": trajectory.spec.runtime,
                "image": image.name if image else trajectory.spec.image,
            }
        )
        if first is not None:
            self._background.submit(first)
        self._follow_in_thread(sandbox, process, log, began_at_ns, intakes, [])

    def _intakes(self, sandbox: Sandbox) -> dict[Stream, Intake]:
        """The intakes of a program's streams: the earlier daemon's if the keeper holds them, new ones otherwise.
        SandboxFailed."""
        return open_intakes(self._context.keeper, sandbox.container.id, sandbox.kept)

    def _outlive(self, sandbox: Sandbox, recorder: Recorder, began_at_ns: int) -> None:
        """Once its program is live, the sandbox is there for the next daemon, too."""
        if recorder.settled:
            sandbox.outlive(
                {
                    "trajectory": sandbox.trajectory.id,
                    "started_at_ns": sandbox.started_at_ns,
                    "began_at_ns": began_at_ns,
                }
            )

    def _follow_in_thread(
        self,
        sandbox: Sandbox,
        process: Process,
        log: EventLog,
        began_at_ns: int,
        intakes: dict[Stream, Intake],
        printed: Iterable[Printed],
    ) -> None:
        thread = threading.Thread(
            target=self._follow, args=(sandbox, process, log, began_at_ns, intakes, printed), name="run"
        )
        with self._lock:
            self._runs[sandbox.trajectory.id] = _Run(thread, process)
        thread.start()

    def _follow(
        self,
        sandbox: Sandbox,
        process: Process,
        log: EventLog,
        began_at_ns: int,
        intakes: dict[Stream, Intake],
        printed: Iterable[Printed],
    ) -> None:
        trajectory = sandbox.trajectory

        def show(stream: Stream, data: bytes, shown_bytes: int) -> None:
            log.append({**output_event(stream, data), "shown_bytes": shown_bytes})

        exit_code: int | None = None
        status = TrajectoryStatus.INTERRUPTED
        try:
            funnel = self._context.secrecy.of(trajectory)
            outcome = pump(
                process,
                funnel,
                self._logging(sandbox, show),
                spool=self._context.spool,
                max_bytes=self._context.config.output_bytes,
                intakes=intakes,
                earlier=printed,
            )
            exit_code = outcome.exit_code
            reached = _reached(sandbox, Hits()) if exit_code == _KILLED else None  # the sandbox is this program's
            if reached is not None:
                log.append({"event": "warning", "message": reached})
            status = self._ended(sandbox, outcome, began_at_ns, log, reached)
        except SnapshotdError as exc:
            if not sandbox.closed:
                log.append({"event": "warning", "message": exc.message, "code": exc.code})
        finally:
            _close(intakes)
            for source, count in (+log.left_out).items():
                log.append({"event": "warning", "message": _LEFT_OUT[source].format(count), "left_out_bytes": count})
            self._finish(sandbox, log, exit_code, status)
        _log.info("run of %s ended: %s, exit code %s", trajectory.id, status, exit_code)

    def _ended(
        self, sandbox: Sandbox, outcome: CommandOutcome, began_at_ns: int, log: EventLog, reached: str | None
    ) -> TrajectoryStatus:
        """The agent's process is gone: take the exit snapshot, unless a `stop` has ended the sandbox. `reached`: the
        message about a limit that was reached."""
        with sandbox.lock:
            sandbox.cut_off()
        recorder = self._recorders.get(sandbox.trajectory.id)
        diverged = None if sandbox.closed or recorder is None else recorder.finish()
        if diverged is not None:
            raise diverged
        with sandbox.lock:
            if sandbox.closed:
                return TrajectoryStatus.STOPPED
            agent = sandbox.trajectory.agent
            call = marker(
                "exit",
                {"argv": list(agent.argv if agent is not None else ())},
                status=_status(outcome),
                exit_code=outcome.exit_code,
                stdout=outcome.stdout,
                stderr=outcome.stderr,
                started_at_ns=began_at_ns,
                error=reached,
            )
            last = self._context.catalog.get_snapshot(sandbox.head).call
            if (last.name, last.started_at_ns) != (
                call.name,
                began_at_ns,
            ):  # else an earlier daemon died just after this
                commit_step(self._context.catalog, sandbox, call, self._stepped)
            if log.full:
                log.append({"event": "rest", "snapshot": sandbox.head})
                log.left_out.update(outcome.lost_bytes)
        if outcome.exit_code is None:
            raise SandboxFailed(
                "its program has ended and its exit code is lost, because the keeper was killed; its output and files "
                "are with the last snapshot"
            )
        return TrajectoryStatus.FINISHED if outcome.exit_code == 0 else TrajectoryStatus.FAILED

    def _finish(self, sandbox: Sandbox, log: EventLog, exit_code: int | None, status: TrajectoryStatus) -> None:
        trajectory = sandbox.trajectory
        with sandbox.lock:
            sandbox.cut_off()
        if sandbox.closed:
            status = TrajectoryStatus.STOPPED
        try:
            try:
                with self.starting(trajectory.id):
                    if (
                        self.find(trajectory.id) or sandbox
                    ) is sandbox:  # else the status is that of another one, started meanwhile
                        self._context.catalog.set_status(trajectory.id, status, exit_code)
            finally:
                self._launcher.end(sandbox)
            self._background.wait()
            count = self._context.catalog.count_snapshots(trajectory.id)
        except SnapshotdError as exc:
            log.append({"event": "warning", "message": exc.message})
            count = sandbox.seq
        finally:
            self._unregister(sandbox)
        log.append(
            {
                "event": "finished",
                "trajectory": trajectory.id,
                "exit_code": exit_code,
                "snapshots": count,
                "status": status,
            }
        )

    def close(self) -> None:
        """Stop everything, each with a last snapshot, and end throw-away sandboxes. Errors are logged; the rest is
        stopped all the same."""
        with self._lock:
            self._closed = True
            throw_aways = list(self._throw_aways.values())
        for sandbox in throw_aways:
            try:
                self._launcher.end(sandbox)
            except Exception:  # noqa: BLE001 - as below
                _log.exception("a throw-away sandbox is left behind")
        for sandbox in self.live():
            try:
                self.stop(sandbox.trajectory)
            except Exception:  # noqa: BLE001 - a defect with one must not cost the others what they hold
                _log.exception("what %s changed since its head is lost", sandbox.trajectory.id)
                try:
                    self._launcher.end(sandbox)
                except Exception:  # noqa: BLE001 - as above
                    _log.exception("the sandbox of %s is left behind", sandbox.trajectory.id)
        with self._thrown_away:
            self._thrown_away.wait_for(lambda: not self._throw_aways, _END_S)  # their threads notice the end
        self.commands.close()


def _stopped() -> SandboxFailed:
    return SandboxFailed("the daemon was told to stop, which ended this throw-away sandbox; repeat the command")


def _close(intakes: dict[Stream, Intake]) -> None:
    for intake in intakes.values():
        intake.close()


def _reached(sandbox: Sandbox, before: Hits) -> str | None:
    """The limit of the sandbox that was reached since `before`: how it shows, and the next step. None: no limit was."""
    now, limits = hits(sandbox.container.pid).since(before), sandbox.trajectory.spec.limits
    if now.killed > 0:
        return (
            f"out of memory: the kernel killed {now.killed} of the sandbox's processes at its limit of "
            f"{limits.memory_bytes / 2**20:.0f} MiB; run it in a sandbox with more memory"
        )
    if now.refused > 0:
        return (
            f"the sandbox has reached its limit of {limits.pids} processes; end some of them, end all with `snapshotd stop`, or run it in "
            "a sandbox with more processes"
        )
    return None


def _ended_as(
    sandbox: Sandbox, command: ClientCommand, outcome: CommandOutcome, before: Hits, timeout_s: float | None
) -> dict[str, Any]:
    """The outcome of a client's command, as `status`, `exit_code` and `error` of its call."""
    status, exit_code = _status(outcome), outcome.exit_code
    error = None if exit_code == 0 else _reached(sandbox, before)
    if command.timed_out and exit_code == _KILLED:  # else it had ended before
        status, exit_code = CallStatus.TIMED_OUT, TIMED_OUT
        error = (
            f"the command was ended with all that it started, since it took longer than its timeout of {timeout_s:g} s"
        )
    elif command.cut_off and exit_code == _KILLED:
        status = CallStatus.INTERRUPTED
    return {"status": status, "exit_code": exit_code, "error": error}


def _status(outcome: CommandOutcome) -> CallStatus:
    if outcome.exit_code is None:
        return CallStatus.UNKNOWN
    return CallStatus.DONE if outcome.exit_code == 0 else CallStatus.FAILED


def check_not_running(sandbox: Sandbox | None, trajectory: Trajectory) -> None:
    if sandbox is not None and not sandbox.closed:
        raise Conflict(
            f"trajectory {short(trajectory.id)} is running; stop it first (`snapshotd stop`), or remove it by force"
        )


FORK_INDEX, FORK_COUNT = "SNAPSHOTD_FORK_INDEX", "SNAPSHOTD_FORK_COUNT"


def fork_agent(source: Trajectory | None, args: tuple[str, ...], index: int) -> AgentSpec:
    """The program of a fork: the source's with its arguments replaced, or `args` as a command. Where the source's is a
    command, arguments that begin with an option are its new ones, and everything else is another command. `{index}`
    becomes the fork's number."""
    filled = tuple(arg.replace("{index}", str(index)) for arg in args)
    agent = source.agent if source is not None else None
    if agent is None:
        return AgentSpec(argv=filled, program=0)
    program = agent.program or int(bool(filled) and filled[0].startswith("-"))
    return replace(agent, argv=(*agent.argv[:program], *filled))


def free_bytes(path: Path) -> int:
    """Bytes that a file system still takes from users other than root."""
    st = os.statvfs(path)
    return st.f_bavail * st.f_frsize
