"""Ends a command that takes longer than its caller allows, with everything that it started.

A process was started by the command if it is in the command's session, if it has the command's id in its environment,
or below one that is such, however its processes called setsid(2). One that has left both its session and its parent (a
daemon), and has another environment, belongs to nobody that the kernel could name: it is ended if it can be of nobody
else, because nothing but init was alive when the command began and no other command and no agent ran since. All of them
stand still while they are looked at, so that none slips away. Their files are captured like any others.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from snapshotd.engine.sandbox.quiesce import is_zombie
from snapshotd.engine.sandbox.sandbox import ClientCommand, Sandbox
from snapshotd.engine.sandbox.signals import wait_until_gone
from snapshotd.errors import SandboxFailed
from snapshotd.kernel.processes import started_by
from snapshotd.runtime.base import Process

EXIT_CODE = 124
"""Exit code of a command that was ended, as timeout(1) has it."""
_log = logging.getLogger(__name__)


class Timeout:
    """The timeout of one command. To be made before the command starts; without `timeout_s` it does nothing."""

    def __init__(self, sandbox: Sandbox, command: ClientCommand, timeout_s: float | None) -> None:
        self._sandbox, self._command, self._timeout_s = sandbox, command, timeout_s
        self._empty = timeout_s is not None and not _alive(sandbox)

    @contextlib.contextmanager
    def over(self, process: Process) -> Iterator[None]:
        """The command may run for so long inside. On leaving, what was to be ended has ended."""
        if self._timeout_s is None:
            yield
            return
        timer = threading.Timer(self._timeout_s, self._end, (process,))
        timer.name = "command-timeout"
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def _end(self, process: Process) -> None:
        try:
            with self._sandbox.lock:
                if self._sandbox.closed or process.wait(0) is not None:
                    return
                self._command.timed_out = True
                killed = self._sandbox.kill(lambda pids: self._started(process.pid, pids))
        except SandboxFailed as exc:  # its container is ending, or something cannot be frozen
            _log.warning("a command at its timeout is ended alone: %s", exc)
            process.kill()
            return
        wait_until_gone(killed)

    def _started(self, command: int, pids: list[int]) -> set[int]:
        """The processes among `pids` that the command started, and the command itself."""
        if self._empty and self._command.alone and not self._sandbox.use.agent_running:
            return set(pids)
        return started_by(command, pids, self._command.mark)


def _alive(sandbox: Sandbox) -> bool:
    """True if any process but init is alive."""
    return any(pid != sandbox.container.pid and not is_zombie(pid) for pid in sandbox.cgroup.processes())
