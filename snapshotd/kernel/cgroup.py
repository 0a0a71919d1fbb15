"""A container's cgroup: its processes, freezing and thawing. Works on version 1, version 2 and the hybrid of both."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from snapshotd.errors import SandboxFailed
from snapshotd.kernel.processes import in_own_namespace

_ROOT = "/sys/fs/cgroup"
_FREEZE_DEADLINE_S = 10.0
"""A task in uninterruptible sleep cannot be frozen; longer than this means something is stuck."""


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
