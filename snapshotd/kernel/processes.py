"""What /proc says about single processes. Standard library only: the keeper's process imports it."""

from __future__ import annotations

import os

_PF_FORKNOEXEC = 0x40
"""linux/sched.h: forked, but no execve since."""


def stat_fields(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the third (`state`) on, proc_pid_stat(5). Raises FileNotFoundError or ProcessLookupError when the
    process is gone."""
    with open(f"/proc/{pid}/stat", "rb") as f:
        return f.read().rpartition(b")")[2].split()  # the name before it may hold anything


def never_executed(fields: list[bytes]) -> bool:
    """Whether a process has not gone through execve(2) since it was forked; true for ever of one that ended before it.

    The kernel's mark PF_FORKNOEXEC (field 9, `flags`) tells that and, unlike names, cannot be set by a program.
    """
    return bool(int(fields[6]) & _PF_FORKNOEXEC)


def start_time(pid: int) -> int:
    """When a process was started, in ticks since boot; 0 when it is gone. With its number it names one process for good."""
    try:
        return int(stat_fields(pid)[19])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def descendants(pid: int) -> list[int]:
    """Children, their children and so on, parents first."""
    found, todo = [], [pid]
    while todo:
        parent = todo.pop()
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children", "rb") as f:
                    children = [int(word) for word in f.read().split()]
                found += children
                todo += children
        except OSError:
            continue  # it has ended meanwhile: its children are known already or not its any more
    return found
