"""The processes of a container that is a plain folder (runtime/folder.py): those below its first process, stopped and let
go on by signals."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field

from snapshotd.errors import SandboxFailed
from snapshotd.kernel.processes import ancestry, descendants, runs, start_time, stat_fields

_STOP_DEADLINE_S = 10.0
VFORK_S = 0.05
"""A process that waits in the kernel for longer, above one that is stopped, waits for that (vfork(2)): it runs only after
it."""
_STOPPED, _GONE, _IN_KERNEL = (b"T", b"t"), (b"Z", b"X"), b"D"


@dataclass(slots=True)
class ProcessTree:
    """The processes below one that adopts their orphans (a child subreaper), as `Members`.

    None gets out of the tree as long as its first process lives. It is stopped by signals, one process after the other,
    until a look finds none that runs; a stopped process sees nothing of it, but a shell may that waits for its jobs. The
    caller of `freeze` and `thaw` sees to it that they come in turns.
    """

    first: int
    started: int = 0
    _stopped: dict[int, int] = field(default_factory=dict)
    """Processes stopped by `freeze`, in order, and when each was started."""

    def __post_init__(self) -> None:
        self.started = start_time(self.first)

    def processes(self) -> list[int]:
        """As `members`."""
        return self.members()

    def members(self) -> list[int]:
        """The first process and all below it, zombies included. SandboxFailed when it is gone."""
        if not runs((self.first, self.started)):
            raise SandboxFailed(f"process {self.first}, which started the commands of a sandbox, was killed")
        return [self.first, *descendants(self.first)]

    def admits(self, pid: int) -> bool:
        """True for a process of the tree."""
        try:
            return (self.first, self.started) in ancestry(pid)
        except (FileNotFoundError, ProcessLookupError):
            return False

    def freeze(self) -> None:
        """Stop every process but the first, and return when all stand still. SandboxFailed after 10 s (thawed again)."""
        began, delay = time.monotonic(), 0.00005
        while running := self._running(patient=time.monotonic() - began < VFORK_S):
            if time.monotonic() - began > _STOP_DEADLINE_S:
                self.thaw()
                raise SandboxFailed(
                    f"process {running[0]} cannot be stopped (stuck in the kernel); nothing was captured"
                )
            for pid in running:
                self._stopped.setdefault(pid, start_time(pid))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            time.sleep(delay)  # no event tells that a process has stopped, but to its parent
            delay = min(delay * 2, 0.002)

    def thaw(self) -> None:
        """Let those go on that `freeze` has stopped: children before their parents, who then see nothing of it."""
        while self._stopped:
            pid, started = self._stopped.popitem()
            with contextlib.suppress(ProcessLookupError):
                if start_time(pid) == started:
                    os.kill(pid, signal.SIGCONT)

    def _running(self, *, patient: bool) -> list[int]:
        states, parents = dict[int, bytes](), dict[int, int]()
        for pid in descendants(self.first):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                fields = stat_fields(pid)
                states[pid], parents[pid] = fields[0], int(fields[1])
        waited_for = {parents[pid] for pid, state in states.items() if state in _STOPPED}
        return [
            pid
            for pid, state in states.items()
            if state not in (*_STOPPED, *_GONE) and (patient or state != _IN_KERNEL or pid not in waited_for)
        ]
