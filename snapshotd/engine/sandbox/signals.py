"""Signals to commands in a sandbox, from outside: to those that were started, wherever they are in the sandbox."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable

from snapshotd.engine.sandbox.quiesce import is_zombie
from snapshotd.engine.sandbox.sandbox import CUT_OFF_DEADLINE_S, ClientCommand, Sandbox
from snapshotd.kernel.processes import in_group_of, started_by
from snapshotd.runtime.base import Process

_GONE_S, _LOOK_S = 10.0, 0.002
"""Seconds to wait for killed processes, and between two looks; no event exists for the end of another's child."""


_NOBODY = -1
"""The number of no process: that of one that has ended may be another's by now."""


def send(sandbox: Sandbox, command: ClientCommand, process: Process, number: int) -> bool:
    """Send a signal to a command's process group, as a terminal does; SIGKILL goes to all that the command started. False
    if none of these processes is alive. The caller holds the sandbox's lock. SandboxFailed: its container is ending."""
    return bool(_send(sandbox, command, process, number))


def _send(sandbox: Sandbox, command: ClientCommand, process: Process, number: int) -> list[int]:
    def choose(pids: list[int]) -> set[int]:
        if number == signal.SIGKILL:
            return started_by(process.pid, pids, command.mark)
        return in_group_of(process.pid, pids)

    return sandbox.kill(choose, number)


def wait_until_gone(killed: Iterable[int]) -> None:
    """Return when killed processes have ended, or after a limit: one in uninterruptible sleep ends later."""
    killed, deadline = list(killed), time.monotonic() + _GONE_S
    while not all(map(is_zombie, killed)) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def end_background(sandbox: Sandbox) -> None:
    """Kill the sandbox's background commands with all that they started: it is about to get another past, which they do
    not outlive. Does nothing while other commands run. Returns as `SandboxUse.cut_off_commands`. The caller holds the
    sandbox's lock, which other threads take meanwhile."""
    if all(command.background for command in sandbox.use.commands):
        _end(sandbox, sandbox.use.commands)
        sandbox.use.wait_for_commands(CUT_OFF_DEADLINE_S)


def end_services(sandbox: Sandbox) -> None:
    """Kill the sandbox's services, which leave no snapshot. Otherwise as `end_background`."""
    if not sandbox.use.commands:
        _end(sandbox, sandbox.use.services)
        sandbox.use.wait_for_services(CUT_OFF_DEADLINE_S)


def end_service(sandbox: Sandbox, service: ClientCommand) -> None:
    """End one service with all that it started. Returns as `SandboxUse.cut_off_commands`. The caller holds the sandbox's
    lock, which other threads take meanwhile."""
    _end(sandbox, [service])
    sandbox.use.wait_for_services(CUT_OFF_DEADLINE_S, service)


def end_rest(sandbox: Sandbox, mark: str) -> None:
    """End the processes that a command of this mark has left behind at its end. SandboxFailed: its container is ending."""
    with sandbox.lock:
        killed = sandbox.kill(lambda pids: started_by(_NOBODY, pids, mark))
    wait_until_gone(killed)


def _end(sandbox: Sandbox, commands: Iterable[ClientCommand]) -> None:
    for command in commands:
        command.cut_off = True
        if command.process is not None:
            wait_until_gone(_send(sandbox, command, command.process, signal.SIGKILL))
