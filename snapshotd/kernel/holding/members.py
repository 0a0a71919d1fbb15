"""The processes of a container as the engine handles them: all of them found, stopped and let go on. By a cgroup of their
own (cgroup.py), or, where this process may make none, by their pid namespace, with signals.

In a pid namespace every process of a container is a member for good: only the container's init can have made it, or a
command that was started in it from outside, and its system call filter keeps it from making another one. When init ends,
the kernel ends all.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Protocol

from snapshotd.errors import SandboxFailed
from snapshotd.kernel.holding import cgroup
from snapshotd.kernel.holding.process_tree import VFORK_S
from snapshotd.kernel.processes import is_ending, start_time, stat_fields

_FREEZE_DEADLINE_S = 10.0
_NS_GET_TGID_FROM_PIDNS = 2 << 30 | 4 << 16 | 0xB7 << 8 | 7
"""linux/nsfs.h, from Linux 6.11: the number that a process of that namespace has in this one."""
_STOPPED, _IN_KERNEL = (b"T", b"t", b"Z", b"X"), b"D"


class Members(Protocol):
    """A container's processes. Errors: SandboxFailed when it is gone."""

    def processes(self) -> list[int]:
        """The container's own processes, zombies included: not those of this process's pid namespace, which start its
        commands."""

    def members(self) -> list[int]:
        """All process ids in the daemon's pid namespace, zombies included."""

    def freeze(self) -> None:
        """Stop every process and return when all have stopped. SandboxFailed after 10 s (they go on then)."""

    def thaw(self) -> None:
        """Let every process go on. Not an error when none was stopped or the container is gone."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """The way in which processes belong to containers here."""

    of_process: Callable[[int], Members]
    """The container that a process is in, all of it. SandboxFailed: the process is gone."""
    name_of: Callable[[int], str | None]
    """A name of the container that a process is in, to compare with another process's; None when the process is gone."""
    limits: bool
    """True if a container can be given limits of memory, processors and processes."""


@dataclass(slots=True)
class PidNamespace:
    """The members of a pid namespace below this process's own. `init`: its first process."""

    init: int
    inode: int
    _stopped: dict[int, int] | None = field(default=None, compare=False)
    """Processes that `freeze` has stopped, with their start time; None: it is not in use."""

    def processes(self) -> list[int]:
        """See `Members`. Cost: before Linux 6.11 a look at every process of the machine."""
        try:
            found = self._listed()
        except OSError:
            found = [
                int(name) for name in os.listdir("/proc") if name.isdigit() and _namespace(int(name)) == self.inode
            ]
        if self.init not in found:
            raise SandboxFailed(f"process {self.init} is gone: its container died")
        return found

    def _listed(self) -> list[int]:
        """As the container's own /proc lists them, which nothing in there can cover or move. OSError: the kernel does not
        translate its numbers, or the container is gone."""
        with ExitStack() as opened:
            listing = os.open(f"/proc/{self.init}/root/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, listing)
            if os.stat("1/ns/pid", dir_fd=listing).st_ino != self.inode:
                raise OSError(errno.ESTALE, "another namespace is listed there")
            namespace = os.open(f"/proc/{self.init}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, namespace)
            found = []
            for name in os.listdir(listing):
                if name.isdigit():
                    with suppress(ProcessLookupError):
                        found.append(fcntl.ioctl(namespace, _NS_GET_TGID_FROM_PIDNS, int(name)))
            return found

    def members(self) -> list[int]:
        return self.processes()

    def freeze(self) -> None:
        """By SIGSTOP, which no process can keep off. The init does nothing but reap, and goes on. Processes that had
        stopped before stay so in `thaw`."""
        self._stopped = {}
        began = time.monotonic()
        seen: set[int] = set()
        delay = 0.00005
        while True:
            found = set(self.processes()) - {self.init}
            moving = {pid for pid in found if not _stands_still(pid)}
            if time.monotonic() - began > VFORK_S:
                moving -= _waiting_for(found - moving, moving)
            for pid in moving:
                self._stop(pid)
            if not moving and found <= seen:
                return  # none of them was running since the last look, so none has made another
            if not moving:
                seen = found
                continue
            if time.monotonic() - began > _FREEZE_DEADLINE_S:
                self.thaw()
                raise SandboxFailed(
                    f"processes {sorted(moving)} of the sandbox cannot be stopped (stuck in the kernel); nothing was captured"
                )
            time.sleep(delay)  # no event tells that the last thread of another's process has stopped
            delay = min(delay * 2, 0.002)

    def thaw(self) -> None:
        """Children go on before their parents, which would otherwise be told that these have stopped. Without a `freeze`
        before: everything goes on, since an earlier daemon may have stopped it."""
        if self._stopped is None:
            self._stopped = {}
            with suppress(SandboxFailed):
                for pid in set(self.processes()) - {self.init}:
                    if _stands_still(pid):
                        self._note(pid)
        for pid, started in sorted(self._stopped.items(), key=lambda item: -item[1]):
            with suppress(OSError):
                pidfd = os.pidfd_open(pid)
                try:
                    if start_time(pid) == started:
                        signal.pidfd_send_signal(pidfd, signal.SIGCONT)
                finally:
                    os.close(pidfd)
        self._stopped = None

    def _stop(self, pid: int) -> None:
        with suppress(OSError):  # it has ended
            pidfd = os.pidfd_open(pid)
            try:
                if _namespace(pid) == self.inode:  # else the number was given to another process
                    self._note(pid)
                    signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
            finally:
                os.close(pidfd)

    def _note(self, pid: int) -> None:
        assert self._stopped is not None
        with suppress(OSError):
            self._stopped[pid] = start_time(pid)


def _namespace(pid: int) -> int | None:
    """The pid namespace of a process; None: it is gone, or another user's."""
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return None


def _waiting_for(still: set[int], moving: set[int]) -> set[int]:
    """Processes of `moving` that are in the kernel, but for threads that have stopped, and have a child among `still`: see
    `VFORK_S`."""
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


def _namespace_of(pid: int) -> Members:
    inode = _namespace(pid)
    if inode is None:
        raise SandboxFailed(f"process {pid} is gone: its container died")
    return PidNamespace(pid, inode)


def _name_of_namespace(pid: int) -> str | None:
    inode = _namespace(pid)
    return None if inode is None else str(inode)


BY_CGROUP = Grouping(cgroup.of_process, cgroup.path_of, limits=True)
BY_NAMESPACE = Grouping(_namespace_of, _name_of_namespace, limits=False)
