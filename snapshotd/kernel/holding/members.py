"""The processes of a container, which the engine lists, stops and lets go on: by a cgroup of their own (cgroup.py), or,
where this process may make none, by their pid namespace, with signals.

In a pid namespace every process of a container is a member for good: only the container's init can have made it, or a
command that was started in it from outside, and its system call filter keeps it from making another one. When init ends,
the kernel ends all.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Protocol

from snapshotd.errors import SandboxFailed
from snapshotd.kernel.holding import cgroup
from snapshotd.kernel.holding.stopping import StoppedBySignals

_NS_GET_TGID_FROM_PIDNS = 2 << 30 | 4 << 16 | 0xB7 << 8 | 7
"""linux/nsfs.h, from Linux 6.11: the number that a process of that namespace has in this one."""


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
class PidNamespace(StoppedBySignals):
    """The members of a pid namespace below this process's own. `first`: its init, which does nothing but reap."""

    inode: int

    def processes(self) -> list[int]:
        """See `Members`. Cost: before Linux 6.11 a look at every process of the machine."""
        try:
            found = self._listed()
        except OSError:
            found = [
                int(name) for name in os.listdir("/proc") if name.isdigit() and _namespace(int(name)) == self.inode
            ]
        if self.first not in found:
            raise SandboxFailed(f"process {self.first} is gone: its container died")
        return found

    def _listed(self) -> list[int]:
        """As the container's own /proc lists them, which nothing in there can cover or move. OSError: the kernel does not
        translate its numbers, or the container is gone."""
        with ExitStack() as opened:
            listing = os.open(f"/proc/{self.first}/root/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, listing)
            if os.stat("1/ns/pid", dir_fd=listing).st_ino != self.inode:
                raise OSError(errno.ESTALE, "another namespace is listed there")
            namespace = os.open(f"/proc/{self.first}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, namespace)
            found = []
            for name in os.listdir(listing):
                if name.isdigit():
                    with suppress(ProcessLookupError):
                        found.append(fcntl.ioctl(namespace, _NS_GET_TGID_FROM_PIDNS, int(name)))
            return found

    def has(self, pid: int) -> bool:
        return _namespace(pid) == self.inode


def _namespace(pid: int) -> int | None:
    """The pid namespace of a process; None: it is gone, or another user's."""
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return None


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
