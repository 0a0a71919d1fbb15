"""Ends a command that takes longer than its caller allows, with everything that it started.

A process was started by the command if it is in the command's session, if it has the command's id in its environment,
or if it is below such a process, whichever of them called setsid(2). The kernel cannot tell who started a process that
has left both session and parent (a daemon) and has another environment. It is ended if only the command can have
started it: nothing but init was alive when the command began, and no other command and no agent ran since. All
processes stand still meanwhile, so that none slips away. Their files are captured like any others.
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


@contextlib.contextmanager
def end_after(timeout_s: float | None, sandbox: Sandbox, command: ClientCommand, process: Process) -> Iterator[None]:
    """End a command that still runs after `timeout_s` seconds in the block; None: it may take any time. When the block is
    left, the processes that were to be ended have ended."""
    if timeout_s is None:
        yield
        return
    timer = threading.Timer(timeout_s, _end, (sandbox, command, process))
    timer.name = "command-timeout"
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def is_empty(sandbox: Sandbox) -> bool:
    """True if no process but init is alive."""
    return all(pid == sandbox.container.pid or is_zombie(pid) for pid in sandbox.cgroup.processes())


def _end(sandbox: Sandbox, command: ClientCommand, process: Process) -> None:
    def choose(pids: list[int]) -> set[int]:
        if command.alone and not sandbox.use.agent_running:
            return set(pids)
        return started_by(process.pid, pids, command.mark)

    try:
        with sandbox.lock:
            if sandbox.closed or process.wait(0) is not None:
                return
            command.timed_out = True
            killed = sandbox.kill(choose)
    except SandboxFailed as exc:  # its container is ending, or something cannot be frozen
        _log.warning("a command at its timeout is ended alone: %s", exc)
        process.kill()
        return
    wait_until_gone(killed)
