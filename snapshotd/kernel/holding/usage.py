"""The processor time and memory that a container takes. From its cgroup where it has one; else, without the processes that
have ended and were waited for by one outside, from each of its processes."""

from __future__ import annotations

import os
from dataclasses import dataclass

from snapshotd.kernel.holding.cgroup import Cgroup
from snapshotd.kernel.holding.held import HeldMembers
from snapshotd.kernel.holding.members import Members
from snapshotd.kernel.processes import stat_fields

_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class ContainerUse:
    """`memory_bytes`: without files that the kernel only keeps in memory, as `docker stats` counts."""

    cpu_ns: int
    memory_bytes: int
    processes: int


def measure(members: Members) -> ContainerUse:
    """The processor time and memory of a container. SandboxFailed: it is gone."""
    pids = members.members()
    if isinstance(members, HeldMembers):
        members = members.inner
    if isinstance(members, Cgroup):
        cpu_ns, memory_bytes = members.cpu_ns(), members.memory_bytes()
        if cpu_ns is not None and memory_bytes is not None:
            return ContainerUse(cpu_ns, memory_bytes, len(pids))
    found = [used for used in map(_of_process, pids) if used is not None]
    return ContainerUse(sum(cpu for cpu, _ in found), sum(memory for _, memory in found), len(found))


def _of_process(pid: int) -> tuple[int, int] | None:
    """Processor time, with that of its children that have ended, and memory (proc_pid_stat(5)). None: it is gone."""
    try:
        fields = stat_fields(pid)
    except OSError:
        return None
    return sum(map(int, fields[11:15])) * _TICK_NS, int(fields[21]) * _PAGE_BYTES
