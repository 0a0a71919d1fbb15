"""The live sandboxes of the daemon, each with the recorder and the program that run in it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from snapshotd.catalog.base import Catalog
from snapshotd.engine.context import Context
from snapshotd.engine.events import EventLog
from snapshotd.engine.journal.approval.gate import Gate
from snapshotd.engine.journal.gateways import Gateways
from snapshotd.engine.journal.idempotency import Keys
from snapshotd.engine.journal.keyvalue import KeyValueStore
from snapshotd.engine.journal.pipeline import Journal
from snapshotd.engine.journal.replay import Resumption
from snapshotd.engine.journal.reuse import reuse_count
from snapshotd.engine.protocol.agent_handler import HandlerSlot
from snapshotd.engine.runs.commands import Commands
from snapshotd.engine.runs.execution import Execution
from snapshotd.engine.runs.launch import Launcher, is_alive
from snapshotd.engine.runs.launched import Adoption, ThrowAways, renew_network
from snapshotd.engine.runs.running_program import Program
from snapshotd.engine.runs.services.starts import SandboxServices
from snapshotd.engine.sandbox.attach import Survivor
from snapshotd.engine.sandbox.background import Background
from snapshotd.engine.sandbox.places import Places
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.engine.sandbox.step import StepListener, commit_step, marker
from snapshotd.engine.storage.cold import Cold, gone_error
from snapshotd.errors import Conflict, OutOfSpace, SnapshotdError, UsageError
from snapshotd.types import (
    FOLDER,
    AgentSpec,
    Snapshot,
    SnapshotID,
    SnapshotState,
    Trajectory,
    TrajectoryID,
    TrajectoryStatus,
    short,
)

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Live:
    """A registered sandbox."""

    sandbox: Sandbox
    journal: Journal
    program: Program | None = None


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
        self._context, self._launcher, self._background = context, launcher, background
        self._execution = Execution(context, gateways)
        self.commands = Commands(context, self._execution, background.submit, self.check_place)
        self.services = SandboxServices(context, self.commands, background.submit, self.start_lock)
        own = (Places(context, cold.take), gate, store, gateways, self.services.start)
        self._adoption = Adoption(context, background.submit, *own)
        self._live: dict[TrajectoryID, _Live] = {}
        self._launched: list[Sandbox] = []
        self.throw_aways = ThrowAways(context, self.launch, self.discard)
        self._lock = threading.RLock()
        self._starting: WeakValueDictionary[TrajectoryID, threading.Lock] = WeakValueDictionary()
        """Each lock exists as long as a thread holds or awaits it."""

    # -- the set of live sandboxes -------------------------------------------------------------------------------------

    def live(self) -> list[Sandbox]:
        with self._lock:
            return [one.sandbox for one in self._live.values()]

    def find(self, trajectory: TrajectoryID) -> Sandbox | None:
        with self._lock:
            live = self._live.get(trajectory)
            return None if live is None else live.sandbox

    def used_snapshots(self) -> set[SnapshotID]:
        """The snapshots that live sandboxes began from, or on which they build their next one."""
        found = {snapshot for sandbox in self.live() for snapshot in (sandbox.root.base, sandbox.head)}
        return {snapshot for snapshot in found if snapshot is not None}

    def launch(
        self, trajectory: Trajectory, snapshot: Snapshot, head: Snapshot | None = None
    ) -> tuple[Sandbox, HandlerSlot]:
        """A sandbox that is not registered yet: the caller either adopts or ends it. `head`: as `Launcher.launch`."""
        if snapshot.state is SnapshotState.LOST:
            raise gone_error(snapshot)
        sandbox, calls = self._launcher.launch(trajectory, snapshot, head)
        with self._lock:
            self._launched = [*(one for one in self._launched if not one.closed), sandbox]
        renew_network(self._context.catalog, [sandbox], self._launcher.end)  # since its rules were read
        return sandbox, calls

    def launched(self) -> list[Sandbox]:
        """Every sandbox in which a process may run, throw-away ones among them."""
        with self._lock:
            return list({id(one): one for one in (*self.live(), *self._launched) if not one.closed}.values())

    def adopt(
        self, sandbox: Sandbox, calls: HandlerSlot, resumption: Resumption | None = None, keys: Keys | None = None
    ) -> None:
        """Register a launched sandbox: from now on its steps are recorded, by it alone. Else as `Adoption.adopt`."""
        self._register(sandbox, self._adoption.adopt(sandbox, calls, resumption, keys))

    def _register(self, sandbox: Sandbox, journal: Journal) -> None:
        with self._lock:
            self._live[sandbox.trajectory.id] = _Live(sandbox, journal)

    def go_on(self, survivors: Iterable[Survivor]) -> None:
        """Go on with the sandboxes of an earlier daemon, whose agents do not notice."""
        for survivor in survivors:
            try:
                self._attach(survivor)
            except Exception:  # noqa: BLE001 - one of them must not keep the daemon from starting
                _log.warning("the run of %s cannot be gone on with", survivor.trajectory.id, exc_info=True)
                with contextlib.suppress(Exception):
                    survivor.give_up(self._context)

    def _attach(self, survivor: Survivor) -> None:
        trajectory = survivor.trajectory
        sandbox, calls = self._launcher.attach(survivor, self._context.catalog.snapshots.get(trajectory.head))
        try:
            journal = self._adoption.go_on(sandbox, calls, survivor)
            program = None
            if survivor.process is not None:
                program = self._program(sandbox, journal, survivor.facts["began_at_ns"])
                program.attach(survivor.process, self._context.events.begin(trajectory.id))
                self._background.tell_missed(trajectory.id, survivor.facts["began_at_ns"])
        except BaseException:
            with sandbox.lock:
                sandbox.use.close()
            calls.open.set()
            sandbox.server.close()
            raise
        self._register(sandbox, journal)
        if program is not None:
            self._follow(sandbox, program)
        self.commands.go_on(sandbox, survivor.commands, self.services.restart)
        self.services.go_on(sandbox)
        calls.open.set()
        _log.info("going on with the run of %s", trajectory.id)

    def discard(self, sandbox: Sandbox) -> None:
        """End a sandbox that was never adopted, or whose trajectory is to be forgotten."""
        try:
            self._launcher.end(sandbox)
        finally:
            self._unregister(sandbox)

    def _unregister(self, sandbox: Sandbox) -> None:
        """Does nothing if another sandbox has been started for its trajectory meanwhile: that one stays registered."""
        trajectory = sandbox.trajectory.id
        with self._lock:
            if self.find(trajectory) is sandbox:
                del self._live[trajectory]

    def start_lock(self, trajectory: TrajectoryID) -> threading.Lock:
        """The lock under which a trajectory's sandbox is started, so that there is only one."""
        with self._lock:
            return self._starting.setdefault(trajectory, threading.Lock())

    def ensure_running(
        self, trajectory: Trajectory, idle_timeout_s: float | None = None, *, services: bool = True
    ) -> Sandbox:
        """The trajectory's sandbox. It is started from the head if it is not up, by default with its services.
        `idle_timeout_s`: how long it may idle from now on. UsageError: it is a folder; SandboxFailed, as `start`."""
        if trajectory.spec.runtime == FOLDER:
            raise UsageError(
                f"{trajectory.shown_name} is a folder of this machine, in which no sandbox runs: fork a snapshot of it"
            )
        self._context.ownership.check(trajectory.id)
        with self.start_lock(trajectory.id):
            sandbox = self.find(trajectory.id)
            if sandbox is not None and not is_alive(sandbox):
                self.discard(sandbox)
                sandbox = None
            if sandbox is None:
                sandbox = self._start_from_head(trajectory, services=services)
            if idle_timeout_s is not None:
                sandbox.use.end_when_idle(idle_timeout_s)
            return sandbox

    def _start_from_head(self, trajectory: Trajectory, *, services: bool) -> Sandbox:
        current = self._context.catalog.trajectories.get(trajectory.id)
        sandbox, calls = self.launch(current, self._context.catalog.snapshots.get(current.head))
        try:
            self._context.catalog.trajectories.set_status(trajectory.id, TrajectoryStatus.RUNNING)
            sandbox.use.end_when_idle(self._context.config.idle_timeout_s)
            self.adopt(sandbox, calls)
            if services:
                self.services.start(sandbox, strict=True)
        except BaseException:
            self.discard(sandbox)  # the disk may be full
            self._context.catalog.trajectories.set_status(trajectory.id, current.status)
            raise
        return sandbox

    @contextlib.contextmanager
    def start_for_change(self, trajectory: Trajectory) -> Iterator[Sandbox]:
        """Have the trajectory's sandbox run for a change in the block. If that fails, a sandbox that was started for it ends,
        and the status is what it was, unless a client has begun to use it. Services come back after the block."""
        before, known = self._context.catalog.trajectories.get(trajectory.id).status, self.find(trajectory.id)
        sandbox = self.ensure_running(trajectory, services=False)
        try:
            yield sandbox
        except BaseException:
            if sandbox is not known:
                with contextlib.suppress(Conflict):
                    self.stop(trajectory, only=sandbox)
                    self._context.catalog.trajectories.set_status(trajectory.id, before)
            self.services.revive(sandbox)
            raise
        self.services.revive(sandbox)

    def stop(self, trajectory: Trajectory, *, keep: bool = True, only: Sandbox | None = None) -> None:
        """End a sandbox, with a last snapshot if something changed and `keep`. Commands of clients are cut off and
        recorded. Not an error when it is not running, or not `only`. Conflict: `only` belongs to a command."""
        with self._lock:
            live = self._live.get(trajectory.id)
        if live is None or (only is not None and live.sandbox is not only):
            return
        sandbox = live.sandbox
        with sandbox.lock:
            if only is not None and sandbox.use.commands and not sandbox.closed:
                name = short(trajectory.id)
                raise Conflict(
                    f"a command in {name} has not ended: wait for it, or cut it off (`snapshotd stop {name}`)"
                )
            keep = keep and is_alive(sandbox)
            if keep:
                sandbox.use.cut_off_commands()
            if not sandbox.closed:
                self._close(trajectory, sandbox, keep=keep and not self._is_replaying(trajectory))
        self._launcher.end(sandbox)
        if live.program is not None:
            live.program.join()
        self._unregister(sandbox)

    def _close(self, trajectory: Trajectory, sandbox: Sandbox, *, keep: bool) -> None:
        """Take the last snapshot, and let no step follow. The caller holds the sandbox's lock. On an error the sandbox goes on."""
        try:
            if keep and sandbox.root.changed:
                _take_last(self._context.catalog, sandbox, self._background.submit)
            self._context.catalog.trajectories.set_status(trajectory.id, TrajectoryStatus.STOPPED)
        except BaseException:
            sandbox.use.carry_on()
            raise
        sandbox.use.close()

    def _is_replaying(self, trajectory: Trajectory) -> bool:
        """True if the trajectory's program is being replayed: the sandbox's files are then recorded already."""
        journal = self._find_journal(trajectory)
        return journal is not None and (journal.replay.replaying or journal.recorder.diverged is not None)

    def _find_journal(self, trajectory: Trajectory) -> Journal | None:
        live = self._live.get(trajectory.id)
        return None if live is None else live.journal

    # -- commands ------------------------------------------------------------------------------------------------------

    def check_place(self, sandbox: Sandbox) -> None:
        """Check that a command can run now. Conflict: a replay gives the sandbox one root after another."""
        journal = self._find_journal(sandbox.trajectory)
        if journal is not None and journal.replay.retraces:
            name = short(sandbox.trajectory.id)
            raise Conflict(
                f"no command can be run in {name} now: its program is being replayed up to the head; try again when that is "
                f"done (`snapshotd attach {name}`), or fork a snapshot"
            )

    def open_calls(self, sandbox: Sandbox) -> list[str]:
        """The names of the tool calls that the sandbox's program has begun and not ended."""
        journal = self._find_journal(sandbox.trajectory)
        return [] if journal is None else journal.recorder.pending.open_tools()

    def start_agent(self, sandbox: Sandbox, agent: AgentSpec, *, first: Snapshot | None = None) -> None:
        """Start a trajectory's program from the top; a thread follows it to its end. `first`: its start snapshot, if it has
        one of its own. Errors, such as CommandNotFound, leave the sandbox as it was."""
        program = self._program(sandbox, self._live[sandbox.trajectory.id].journal, time.time_ns())
        program.start(agent)
        if first is not None:
            self._background.submit(first)
        self._follow(sandbox, program)

    def _program(self, sandbox: Sandbox, journal: Journal, began_at_ns: int) -> Program:
        return Program(
            self._context, self._execution, self._background.submit, self._finish, sandbox, journal, began_at_ns
        )

    def _follow(self, sandbox: Sandbox, program: Program) -> None:
        with self._lock:
            live = self._live.get(sandbox.trajectory.id)
            if live is not None and live.sandbox is sandbox:
                live.program = program
        program.follow()

    def _finish(self, sandbox: Sandbox, log: EventLog, exit_code: int | None, status: TrajectoryStatus) -> None:
        trajectory = sandbox.trajectory
        with sandbox.lock:
            sandbox.use.cut_off_commands()
        if sandbox.closed:
            status = TrajectoryStatus.STOPPED
        reused: dict[str, Any] = {}
        try:
            try:
                with self.start_lock(trajectory.id):
                    # else the status is that of another sandbox, started meanwhile
                    if (self.find(trajectory.id) or sandbox) is sandbox:
                        self._context.catalog.trajectories.set_status(trajectory.id, status, exit_code)
            finally:
                self._launcher.end(sandbox)
            self._background.wait()
            count = self._context.catalog.snapshots.count(trajectory.id)
            reused = reuse_count(self._context.catalog, trajectory)
        except SnapshotdError as exc:
            log.append({"event": "warning", "message": exc.message})
            count = sandbox.writer.seq
        finally:
            self._unregister(sandbox)
        log.append(
            {
                "event": "finished",
                "trajectory": trajectory.id,
                "exit_code": exit_code,
                "snapshots": count,
                "status": status,
                **reused,
            }
        )

    def close(self) -> None:
        """Stop all sandboxes, each with a last snapshot, and end throw-away ones. Errors are logged, and stop nothing."""
        self.throw_aways.end(self._launcher.end)
        for sandbox in self.live():
            _stop_or_end(sandbox, self.stop, self._launcher.end)
        self.throw_aways.wait_until_gone()
        self.commands.close()


def _stop_or_end(sandbox: Sandbox, stop: Callable[[Trajectory], object], end: Callable[[Sandbox], object]) -> None:
    """Stop a sandbox, or end it if that fails. Errors are logged: a defect with one sandbox must not cost the others what they
    hold."""
    try:
        stop(sandbox.trajectory)
    except Exception:  # noqa: BLE001 - see above
        _log.exception("what %s changed since its head is lost", sandbox.trajectory.id)
        try:
            end(sandbox)
        except Exception:  # noqa: BLE001 - see above
            _log.exception("the sandbox of %s is left behind", sandbox.trajectory.id)


def _take_last(catalog: Catalog, sandbox: Sandbox, listener: StepListener) -> None:
    try:
        commit_step(catalog, sandbox, marker("stop", {}), listener)
    except OutOfSpace as exc:
        trajectory = sandbox.trajectory
        raise OutOfSpace(
            f"{exc.message}; `snapshotd stop --discard {trajectory.shown_name}` ends it without a last "
            f"snapshot, and loses what changed since {short(sandbox.head)}"
        ) from exc


def check_not_running(sandbox: Sandbox | None, trajectory: Trajectory) -> None:
    if sandbox is not None and not sandbox.closed:
        raise Conflict(
            f"trajectory {short(trajectory.id)} is running; stop it first (`snapshotd stop`), or remove it by force (`snapshotd rm "
            "--force`)"
        )
