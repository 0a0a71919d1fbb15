"""Counts of a container's hits at the limits of its cgroup. Works on version 1, version 2 and the hybrid of both.

Source: Documentation/admin-guide/cgroup-v2.rst (`memory.events`, `pids.events`) and cgroup-v1/memory.rst
(`memory.oom_control`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


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
    try:
        lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    except (FileNotFoundError, ProcessLookupError):
        return Hits()
    found = {
        controller: _ROOT / controller / path.lstrip("/")
        for _, names, path in lines
        for controller in names.split(",")
        if controller
    }
    unified = next((_ROOT / path.lstrip("/") for _, names, path in lines if not names), _ROOT)
    memory = found["memory"] / "memory.oom_control" if "memory" in found else unified / "memory.events"
    return Hits(_count(memory, "oom_kill"), _count(found.get("pids", unified) / "pids.events", "max"))


def _count(file: Path, key: str) -> int:
    try:
        facts = dict(line.split() for line in file.read_text().splitlines())
        return int(facts.get(key, 0))
    except (OSError, ValueError):
        return 0
