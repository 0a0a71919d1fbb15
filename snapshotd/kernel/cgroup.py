"""A container's cgroup: its processes, freezing and thawing. Works on version 1, version 2 and the hybrid of both. And the
tree of processes that stands for one where there is none."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field

from snapshotd.errors import SandboxFailed
from snapshotd.kernel.processes import ancestry, descendants, in_own_namespace, runs, start_time, stat_fields

_ROOT = "/sys/fs/cgroup"
_FREEZE_DEADLINE_S = 10.0
"""A task in uninterruptible sleep cannot be frozen; longer than this means something is stuck."""

_STOP_DEADLINE_S = 10.0
_VFORK_S = 0.05
"""A process that waits in the kernel for longer, above one that is stopped, waits for that (vfork(2)): it runs only after
it."""
_STOPPED, _GONE, _IN_KERNEL = (b"T", b"t"), (b"Z", b"X"), b"D"


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The freezer cgroup of a container. `version` is 1 (freezer controller) or 2 (unified)."""

    directory: str
    version: int

    def processes(self) -> list[int]:
        """The container's own processes, zombies included: not those of this process's pid namespace, which start its
        commands. SandboxFailed when the cgroup is gone."""
        return [pid for pid in self.members() if not in_own_namespace(pid)]

    def members(self) -> list[int]:
        """All process ids in the daemon's pid namespace, zombies included. SandboxFailed when the cgroup is gone."""
        try:
            with open(f"{self.directory}/cgroup.procs", "rb") as f:
                return [int(line) for line in f.read().split()]
        except FileNotFoundError as exc:
            raise SandboxFailed(f"the sandbox's cgroup {self.directory} is gone: its container died") from exc

    def freeze(self) -> None:
        """Stop every task and return when all have stopped. SandboxFailed after 10 s (thawed again)."""
        self._write("FROZEN" if self.version == 1 else "1")
        deadline = time.monotonic() + _FREEZE_DEADLINE_S
        delay = 0.00005
        while not self._frozen():
            if time.monotonic() > deadline:
                self.thaw()
                raise SandboxFailed(
                    f"a process in {self.directory} cannot be frozen (stuck in the kernel); nothing was captured"
                )
            time.sleep(delay)  # the kernel offers no blocking wait on version 1; 50 us doubles to 2 ms
            delay = min(delay * 2, 0.002)
            if self.version == 1:
                self._write("FROZEN")  # version 1 retries only when asked again

    def thaw(self) -> None:
        """Let every task go on. Not an error when nothing was frozen or the cgroup is gone."""
        try:
            self._write("THAWED" if self.version == 1 else "0")
        except SandboxFailed:
            pass  # gone: nothing left to thaw

    def _write(self, value: str) -> None:
        name = "freezer.state" if self.version == 1 else "cgroup.freeze"
        try:
            with open(f"{self.directory}/{name}", "w") as f:
                f.write(value)
        except OSError as exc:
            raise SandboxFailed(
                f"cannot write {name} of {self.directory}: {exc.strerror}; its container may have died"
            ) from exc

    def _frozen(self) -> bool:
        try:
            if self.version == 1:
                with open(f"{self.directory}/freezer.state") as f:
                    return f.read().strip() == "FROZEN"
            with open(f"{self.directory}/cgroup.events") as f:
                return "frozen 1" in f.read()
        except FileNotFoundError as exc:
            raise SandboxFailed(f"the sandbox's cgroup {self.directory} is gone: its container died") from exc


def of_process(pid: int) -> Cgroup:
    """The cgroup that freezes `pid`'s container. Raises SandboxFailed when the process is gone or has no freezer."""
    try:
        with open(f"/proc/{pid}/cgroup") as f:
            lines = [line.rstrip("\n").split(":", 2) for line in f]
    except FileNotFoundError as exc:
        raise SandboxFailed(f"process {pid} is gone: its container died") from exc
    unified = ""
    for _, controllers, path in lines:
        if "freezer" in controllers.split(","):
            directory = f"{_ROOT}/freezer{path}"
            if os.path.exists(f"{directory}/freezer.state"):
                return Cgroup(directory, 1)
        if not controllers:
            unified = path
    for base in (_ROOT, f"{_ROOT}/unified"):
        directory = f"{base}{unified}"
        if unified and os.path.exists(f"{directory}/cgroup.freeze"):
            return Cgroup(directory, 2)
    raise SandboxFailed(f"process {pid} is in no cgroup with a freezer; `snapshotd doctor` says what is missing")


def path_of(pid: int) -> str | None:
    """The whole text of /proc/PID/cgroup, to compare with another process's; None when the process is gone."""
    try:
        with open(f"/proc/{pid}/cgroup") as f:
            return f.read()
    except (FileNotFoundError, ProcessLookupError):
        return None


@dataclass(slots=True)
class ProcessTree:
    """The processes below one that adopts their orphans (a child subreaper), as `Cgroup`.

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
        while running := self._running(patient=time.monotonic() - began < _VFORK_S):
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
