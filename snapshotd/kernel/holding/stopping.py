"""Processes that are stopped and let go on by signals, where no cgroup freezes them."""

from __future__ import annotations

import os
import signal
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field

from snapshotd.errors import SandboxFailed
from snapshotd.kernel.files import closing_fd
from snapshotd.kernel.holding.attempts import attempts
from snapshotd.kernel.processes import is_ending, start_time, stat_fields

_STOP_DEADLINE_S = 10.0
_VFORK_S = 0.05
"""A process that waits in the kernel for longer, above one that is stopped, waits for that (vfork(2)): it runs only after
it."""
_STOPPED, _IN_KERNEL = (b"T", b"t", b"Z", b"X"), b"D"


@dataclass(slots=True)
class StoppedBySignals(ABC):
    """The processes of a sandbox, as `Members`. `first` does nothing but start commands, or reap, and is never stopped.

    They are stopped one after the other, until two looks find none that runs. A stopped process sees nothing of it, but a
    shell may that waits for its jobs. The caller of `freeze` and `thaw` sees to it that they come in turns.
    """

    first: int
    _stopped: dict[int, int] | None = field(default=None, init=False, compare=False)
    """Processes that `freeze` has stopped, with their start time; None: it is not in use."""

    @abstractmethod
    def processes(self) -> list[int]:
        """See `Members`."""

    @abstractmethod
    def has(self, pid: int) -> bool:
        """True for a process of the sandbox."""

    def members(self) -> list[int]:
        """See `Members`."""
        return self.processes()

    def freeze(self) -> None:
        """By SIGSTOP, which no process can keep off. Processes that had stopped before stay so in `thaw`."""
        self._stopped = {}
        began = time.monotonic()
        # No event tells that a process has stopped, but to its parent.
        for _ in attempts(_STOP_DEADLINE_S, 0.00005, 0.002):
            found = self._others()
            moving = {pid for pid in found if not _stands_still(pid)}
            if time.monotonic() - began > _VFORK_S:
                moving -= _waiting_for(found - moving, moving)
            for pid in moving:
                self._stop(pid)
            if not moving and self._others() <= found:
                return  # none of them was running since the look before, so none has made another
        self.thaw()
        raise SandboxFailed(
            f"processes {sorted(moving)} of the sandbox cannot be stopped (stuck in the kernel); nothing was captured"
        )

    def thaw(self) -> None:
        """Children go on before their parents, which would otherwise be told that these have stopped. Without a `freeze`
        before: everything goes on, since an earlier daemon may have stopped it."""
        if self._stopped is None:
            self._stopped = {}
            with suppress(SandboxFailed):
                self._stopped = {pid: start_time(pid) for pid in self._others() if _stands_still(pid)}
        for pid, started in sorted(self._stopped.items(), key=lambda item: -item[1]):
            with suppress(OSError), closing_fd(os.pidfd_open(pid)) as pidfd:
                if start_time(pid) == started:
                    signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        self._stopped = None

    def _others(self) -> set[int]:
        return set(self.processes()) - {self.first}

    def _stop(self, pid: int) -> None:
        assert self._stopped is not None
        with suppress(OSError), closing_fd(os.pidfd_open(pid)) as pidfd:  # else it has ended
            if self.has(pid):  # else the number was given to another process
                self._stopped[pid] = start_time(pid)
                signal.pidfd_send_signal(pidfd, signal.SIGSTOP)


def _waiting_for(still: set[int], moving: set[int]) -> set[int]:
    """Processes of `moving` that are in the kernel, but for threads that have stopped, and have a child among `still`: see
    `_VFORK_S`."""
    parents = set()
    for pid in still:
        with suppress(FileNotFoundError, ProcessLookupError):
            parents.add(int(stat_fields(pid)[1]))
    return {pid for pid in moving & parents if _stands_still(pid, (*_STOPPED, _IN_KERNEL))}


def _stands_still(pid: int, states: tuple[bytes, ...] = _STOPPED) -> bool:
    """True if all threads of a process have stopped or ended, or are in one of `states`."""
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/stat", "rb") as f:
                fields = f.read().rpartition(b")")[2].split()
            if fields[0] not in states and not is_ending(fields):
                return False
    except (FileNotFoundError, ProcessLookupError):
        return not os.path.exists(f"/proc/{pid}")  # a thread has ended meanwhile: look again
    return True
