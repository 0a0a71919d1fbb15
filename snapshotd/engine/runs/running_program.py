"""A running program of a trajectory: its start, its output, and its end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from snapshotd.engine.context import Context
from snapshotd.engine.events import EventLog
from snapshotd.engine.journal.pipeline import Journal
from snapshotd.engine.journal.reuse import reuse_count
from snapshotd.engine.runs.execution import KILLED, Execution, reached_limit, status_of
from snapshotd.engine.sandbox.kept import KeptProcess
from snapshotd.engine.sandbox.pump import CommandOutcome
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.engine.sandbox.step import StepListener, commit_step, marker
from snapshotd.errors import SandboxFailed, SnapshotdError
from snapshotd.kernel.limits import Hits
from snapshotd.runtime.base import Process
from snapshotd.terms import number_of
from snapshotd.types import AgentSpec, TrajectoryStatus

_log = logging.getLogger(__name__)
_LEFT_OUT = {
    "stdout": "neither shown nor recorded: {} of the program's standard output",
    "stderr": "neither shown nor recorded: {} of the program's standard error",
    "calls": "not shown: {} that tool calls printed; `snapshotd show --output` has all, call by call",
}

Finish = Callable[[Sandbox, EventLog, int | None, TrajectoryStatus], None]
"""Called at the end of a program, with its exit code and status: ends the sandbox."""


class Program:
    """The program of one sandbox. `start` or `attach` it, then `follow` it: a thread records its output and its end."""

    def __init__(
        self,
        context: Context,
        execution: Execution,
        listener: StepListener,
        finish: Finish,
        sandbox: Sandbox,
        journal: Journal,
        began_at_ns: int,
    ) -> None:
        self._context, self._execution, self._listener, self._finish = context, execution, listener, finish
        self._sandbox, self._journal, self._began_at_ns = sandbox, journal, began_at_ns
        self._kept = KeptProcess(context.keeper, sandbox.container.id, sandbox.survival.kept)
        self._process: Process
        self._log: EventLog
        self._thread = threading.Thread(target=self._follow, name="run")

    def start(self, agent: AgentSpec) -> None:
        """Start it from the top. Errors: as `Sessions.start_agent`."""
        sandbox, trajectory = self._sandbox, self._sandbox.trajectory
        argv = tuple(map(self._context.secrecy.of(trajectory).reveal_text, agent.argv))
        spec = self._execution.spec(sandbox, argv, agent.cwd, agent.env, agent.user)
        self._journal.replay.call_when_live(self._outlive)
        try:
            self._kept.open()
            self._process, _ = self._execution.start(sandbox, spec, keep=self._kept.key)
        except BaseException:
            self._kept.close()
            raise
        sandbox.use.mark_program_running()
        self._log = self._context.events.begin(trajectory.id, afresh=True)
        image = self._context.image(trajectory.spec.image)
        self._log.append(
            {
                "event": "started",
                "trajectory": trajectory.id,
                "snapshot": sandbox.head,
                "runtime": trajectory.spec.runtime,
                "image": image.name if image else trajectory.spec.image,
            }
        )
        for sentence in sandbox.use.take_notices():
            self._log.append({"event": "warning", "message": sentence})

    def attach(self, process: Process, log: EventLog) -> None:
        """Take a process that an earlier daemon started. SandboxFailed."""
        self._process, self._log = process, log
        self._kept.open()

    def follow(self) -> None:
        """Follow it in a thread, to its end."""
        self._thread.start()

    def join(self) -> None:
        """Return when it has ended and is recorded; at once in its own thread."""
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _outlive(self) -> None:
        """Let the next daemon go on with the sandbox, once its program is live."""
        if self._journal.replay.settled:
            self._sandbox.outlive(
                {
                    "trajectory": self._sandbox.trajectory.id,
                    "started_at_ns": self._sandbox.started_at_ns,
                    "began_at_ns": self._began_at_ns,
                }
            )

    def _follow(self) -> None:
        sandbox, log = self._sandbox, self._log
        exit_code: int | None = None
        status = TrajectoryStatus.INTERRUPTED
        try:
            outcome = self._execution.follow(sandbox, self._process, log=log, kept=self._kept)
            exit_code = outcome.exit_code
            reached = reached_limit(sandbox, Hits()) if exit_code == KILLED else None  # the sandbox is this program's
            if reached is not None:
                log.append({"event": "warning", "message": reached})
            status = self._take_exit_snapshot(outcome, reached)
        except SnapshotdError as exc:
            if not sandbox.closed:
                log.append({"event": "warning", "message": exc.message, "code": exc.code})
        finally:
            self._kept.close()
            for source, count in (+log.left_out).items():
                log.append(
                    {
                        "event": "warning",
                        "message": _LEFT_OUT[source].format(number_of(count, "byte")),
                        "left_out_bytes": count,
                    }
                )
            self._finish(sandbox, log, exit_code, status)
        _log.info("run of %s ended: %s, exit code %s", sandbox.trajectory.id, status, exit_code)

    def _take_exit_snapshot(self, outcome: CommandOutcome, reached: str | None) -> TrajectoryStatus:
        """Take the exit snapshot of a program that has ended, unless a `stop` has ended the sandbox. `reached`: the message
        about a limit that was reached."""
        sandbox, log = self._sandbox, self._log
        with sandbox.lock:
            sandbox.use.cut_off_commands()
        diverged = None if sandbox.closed else self._journal.replay.finish()
        if diverged is not None:
            raise diverged
        with sandbox.lock:
            if sandbox.closed:
                return TrajectoryStatus.STOPPED
            agent = sandbox.trajectory.agent
            call = marker(
                "exit",
                {
                    "argv": list(agent.argv if agent is not None else ()),
                    **reuse_count(self._context.catalog, sandbox.trajectory),
                },
                status=status_of(outcome),
                exit_code=outcome.exit_code,
                stdout=outcome.stdout,
                stderr=outcome.stderr,
                started_at_ns=self._began_at_ns,
                error=reached,
            )
            last = self._context.catalog.snapshots.get(sandbox.head).call
            if (last.name, last.started_at_ns) != (
                call.name,
                self._began_at_ns,
            ):  # else an earlier daemon died just after this
                commit_step(self._context.catalog, sandbox, call, self._listener)
            if log.full:
                log.append({"event": "rest", "snapshot": sandbox.head})
                log.left_out.update(outcome.lost_bytes)
        if outcome.exit_code is None:
            raise SandboxFailed(
                "its program has ended and its exit code is lost, because the keeper was killed; its output and files "
                "are with the last snapshot"
            )
        return TrajectoryStatus.FINISHED if outcome.exit_code == 0 else TrajectoryStatus.FAILED
