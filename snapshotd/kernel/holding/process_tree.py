"""The processes of a container that is a plain folder (runtime/folder.py): those below its first process."""

from __future__ import annotations

from dataclasses import dataclass, field

from snapshotd.errors import SandboxFailed
from snapshotd.kernel.holding.stopping import StoppedBySignals
from snapshotd.kernel.processes import ancestry, descendants, runs, start_time


@dataclass(slots=True)
class ProcessTree(StoppedBySignals):
    """The processes below one that adopts their orphans (a child subreaper). None gets out of the tree as long as that
    lives."""

    started: int = field(init=False)

    def __post_init__(self) -> None:
        self.started = start_time(self.first)

    def processes(self) -> list[int]:
        """The first process and all below it, zombies included. SandboxFailed when it is gone."""
        if not runs((self.first, self.started)):
            raise SandboxFailed(f"process {self.first}, which started the commands of a sandbox, was killed")
        return [self.first, *descendants(self.first)]

    def has(self, pid: int) -> bool:
        try:
            return (self.first, self.started) in ancestry(pid)
        except (FileNotFoundError, ProcessLookupError):
            return False

    def thaw(self) -> None:
        """Let every process go on. Does nothing without a `freeze` before: no earlier daemon has left stopped
        processes."""
        if self._stopped is not None:
            StoppedBySignals.thaw(self)
