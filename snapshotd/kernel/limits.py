"""Counts of a container's hits at the limits of its cgroup. Works on version 1, version 2 and the hybrid of both.

Source: Documentation/admin-guide/cgroup-v2.rst (`memory.events`, `pids.events`) and cgroup-v1/memory.rst
(`memory.oom_control`).
"""

from __future__ import annotations

from dataclasses import dataclass

from snapshotd.kernel.holding.cgroup import path_of

_ROOT = "/sys/fs/cgroup"


@dataclass(frozen=True, slots=True)
class Hits:
    """Counts since the cgroup was made: processes that the kernel killed for want of memory, and processes that it did
    not make."""

    killed: int = 0
    refused: int = 0

    def since(self, earlier: Hits) -> Hits:
        return Hits(self.killed - earlier.killed, self.refused - earlier.refused)


def hits(pid: int) -> Hits:
    """The hits of the cgroup of `pid`. A counter that cannot be read (the process is gone, a controller is off) counts
    as none."""
    text = path_of(pid)
    if text is None:
        return Hits()
    found, unified = dict[str, str](), _ROOT
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            unified = f"{_ROOT}{path}"
        for controller in controllers.split(","):
            found[controller] = f"{_ROOT}/{controller}{path}"
    memory = f"{found['memory']}/memory.oom_control" if "memory" in found else f"{unified}/memory.events"
    return Hits(_count(memory, "oom_kill"), _count(f"{found.get('pids', unified)}/pids.events", "max"))


def _count(file: str, key: str) -> int:
    try:
        with open(file) as f:
            facts = dict(line.split() for line in f)
        return int(facts.get(key, 0))
    except (OSError, ValueError):
        return 0
