"""Containers: the specification of a driver. Three drivers stand behind this: `runc` (no engine needed), `docker`, and
`none`, which is no container at all (folder.py says where it differs).

Model. A *container* is namespaces, a cgroup and an init process, and nothing else of interest: it starts on a tiny,
read-only stub root and knows no image. The engine then pivots it into a stack of layers (`layers/pivot.py`), so a
container can be prepared before its content is known. Drivers never see layers; they share with `layers` only the
init's process id and the id map.

Lifecycle. create -> (pivoted by the engine) -> exec, any number, in parallel -> destroy.

Isolation, the same for the first two: own pid, mount, uts, ipc, net and cgroup namespaces (runc: user namespace too);
memory, cpu and pids limits; `CAPABILITIES` only; no-new-privileges; default seccomp; masked and read-only proc paths.

Paths inside every container: `SHARE_DIR` (read-only: `init`, and `lib/` with the in-sandbox library) and `SOCKET_PATH`
(unix socket to the daemon; it identifies the container).

Concurrency: every method may be called from several threads; calls on one container may overlap.
Errors: `SandboxFailed` when the container cannot be made or is gone; `Unsupported` when the machine lacks the runtime.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from snapshotd.errors import Unsupported
from snapshotd.kernel.holding.members import BY_CGROUP, Grouping, Members
from snapshotd.types import ContainerID, IdMap, Limits, Network

RUN_DIR = "/run/snapshotd"
"""In the container: mount point of the container's own run directory."""
SHARE_DIR = RUN_DIR + "/share"
SOCKET_PATH = RUN_DIR + "/agent.sock"
LIBRARY_DIR = SHARE_DIR + "/lib"

CAPABILITIES: tuple[str, ...] = (
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_NET_BIND_SERVICE",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
)
"""The capabilities for building, installing and testing software. Docker's default set less MKNOD, NET_RAW and
AUDIT_WRITE."""

FIRST_HOSTNAME = "sandbox"
"""Hostname of a container until `Runtime.rename`."""
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """The specification of a new container. `run_dir` is a host directory, made by the caller, that appears as
    `RUN_DIR` in the container.

    `run_dir` and its parents must be searchable by everyone (0711), since container root may be an unprivileged host
    id. `share_dir` is a host directory with `init` and `lib/`, bind-mounted read-only as `SHARE_DIR`.
    `image_name` is for people only: `docker ps` shows it.
    """

    id: ContainerID
    run_dir: Path
    share_dir: Path
    limits: Limits
    network: Network
    """`allow` has no rules here: for the container it is a network in which only its own loopback is."""
    image_name: str = "snapshotd"
    root: Path | None = None
    """Host directory that stands for the root, for the driver without isolation alone."""


@dataclass(frozen=True, slots=True)
class Container:
    """A running container. `pid` is its init in the daemon's pid namespace; `id_map` is None without user namespace."""

    id: ContainerID
    pid: int
    id_map: IdMap | None
    root: Path | None = None
    """The host directory that stands for its root; None: it has a root of its own."""

    def open_root(self) -> int:
        """A descriptor (O_PATH) of its present root. OSError when it is gone."""
        return os.open(self.root or f"/proc/{self.pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


@dataclass(frozen=True, slots=True)
class ExecSpec:
    """One command: absolute `cwd`, complete environment (nothing is inherited), numeric `user` and `group` in the
    container, and further `groups`."""

    argv: Sequence[str]
    cwd: str = "/workspace"
    env: Mapping[str, str] = field(default_factory=dict)
    user: int = 0
    group: int = 0
    groups: Sequence[int] = ()
    stdin: bool = False
    """True if the command's standard input is a pipe (`Process.stdin_fd`). Otherwise it is empty."""
    terminal: tuple[int, int] | None = None
    """Rows and columns of a terminal of its own, which is its standard input, output and error, and the controlling one
    of its session. None: it has pipes."""


class Process(ABC):
    """A command that runs in a container.

    `stdout_fd` and `stderr_fd` are readable, blocking file descriptors that the caller owns and must close. They reach
    end of file when the last process that inherited them closes its end, which may be long after the command itself has
    ended.
    """

    pid: int
    """In the daemon's pid namespace."""
    stdout_fd: int
    stderr_fd: int
    terminal: bool = False
    """True if `stdout_fd` is a terminal's master, whose end is EIO; then `stderr_fd` is at its end, and `stdin_fd` is
    there."""
    stdin_fd: int | None = None
    """The end of the pipe to write to, blocking, which the caller owns and must close; None without
    `ExecSpec.stdin`."""

    @abstractmethod
    def end_fd(self) -> int | None:
        """A descriptor that is readable once the command has ended, for select(2) alone; None: it has ended."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> int | None:
        """The exit code (128+N for signal N), or None when `timeout_s` passed. Returns at once if it ended before.

        A command that ended in any way is a result, not an error. Raises SandboxFailed when it has ended
        and no exit code can be had.
        """

    @abstractmethod
    def kill(self) -> None:
        """SIGKILL to the command. Not an error when it has ended."""


STDIN = ".stdin"
"""A kept command's key with this behind it is that of the end of its input to write to."""


class Keeper(Protocol):
    """Keeps descriptors and commands beyond a daemon's life: commands started with `Runtime.exec(..., keep=key)`, their
    pipes, and single descriptors, each under its own key.

    A key is 1 to 128 characters. The keeper starts when the first thing is kept. It goes on as long as a daemon is
    connected or it holds something, and the next daemon finds everything. `SandboxFailed` when the keeper cannot be
    started or was killed meanwhile; looking for a missing key is no error. Thread-safe.
    """

    def process(self, key: str) -> Process | None:
        """A kept command, with duplicates of the read ends of its pipes for the caller to close. Any daemon can wait
        for its end until its key is dropped. None when there is none."""

    def hold(self, key: str, fd: int) -> None:
        """Hold a duplicate of a descriptor, in place of an earlier one under the key."""

    def open_held(self, key: str) -> int | None:
        """A duplicate of the descriptor held under a key, close-on-exec, for the caller to close. None when there is
        none."""

    def keys(self) -> set[str]:
        """Everything that is held, commands that have ended included."""

    def drop(self, key: str) -> None:
        """Close the descriptors under a key. Ends no command; a process already in hand can be waited for and killed as
        before."""

    def close(self) -> None:
        """Tell the keeper that this daemon needs it no more. Returns when the keeper has ended, or at once if it holds
        something."""


class Runtime(ABC):
    """One driver. See the module's text for the contract that all methods share."""

    name: str
    """`runc` or `docker`, the value of `--runtime`; `none`, the value of `--isolation`."""
    grouping: Grouping = BY_CGROUP
    """The way in which processes belong to the driver's containers."""

    @abstractmethod
    def unavailable(self) -> str | None:
        """None if containers can be created here; else one sentence with the reason and the fix. Cheap; no side
        effects."""

    @abstractmethod
    def create(self, spec: ContainerSpec) -> Container:
        """Create and start a container whose only process is its init, on the stub root.

        Raises SandboxFailed (nothing is left behind) or Unsupported. Not idempotent.
        """

    @abstractmethod
    def exec(self, container: Container, spec: ExecSpec, *, keep: str | None = None) -> Process:
        """Start a command in the container's present root and return as soon as it runs.

        With `keep`, the driver's keeper is its parent: under that key the command and its pipes outlive this daemon,
        until the key is dropped (also after `destroy`). With `spec.stdin` the keeper holds the end of its input to write
        to, under the key followed by `STDIN`, and `Process.stdin_fd` is None. Unsupported with `spec.terminal`;
        SandboxFailed when a command runs under that key.

        Raises CommandNotFound (no such program or working directory), CommandNotRunnable (found, but not executable)
        or SandboxFailed (container gone). In each case nothing was started.
        """

    @abstractmethod
    def attach(self, container_id: ContainerID) -> Container | None:
        """A container that an earlier daemon made, if its init still runs; None otherwise; the caller then calls
        `destroy`.

        From now on it is like any other container. Commands of the earlier daemon run on; the keeper has the kept ones.
        """

    @abstractmethod
    def rename(self, container: Container, hostname: str) -> None:
        """Give a container that has run no command yet another hostname, in all places where the driver keeps it.
        OSError when it cannot be set; SandboxFailed."""

    @abstractmethod
    def destroy(self, container_id: ContainerID) -> None:
        """Kill everything in the container and remove every trace of it (cgroup, mounts, network, driver state).

        Idempotent: not an error when it is gone already or was half made.
        """

    @abstractmethod
    def list(self) -> list[ContainerID]:
        """Every container of this daemon instance that the driver still knows, running or not, half made ones
        included."""

    def members(self, container: Container) -> Members:
        """The container's processes, to be listed and stopped. SandboxFailed when it is gone."""
        return self.grouping.of_process(container.pid)

    def admission(self, container: Container) -> Callable[[int], bool]:
        """Returns True for the id of a process in the container."""
        name, name_of = self.grouping.name_of(container.pid), self.grouping.name_of
        return lambda pid: name is not None and name_of(pid) == name

    def check_limits(self, limits: Limits) -> None:
        """Unsupported where nothing can keep a container to the limits that a user asks for."""
        if not self.grouping.limits and replace(limits, disk_bytes=0) != Limits():
            raise Unsupported(
                "this daemon cannot limit the memory, processors and processes of a sandbox, since it may make no cgroups: leave "
                "the limits out, or see `snapshotd doctor`"
            )

    def close(self) -> None:  # noqa: B027 - a driver may hold nothing
        """Let go of what starts commands. Containers stay. Idempotent."""

    def prepare(self, container: Container) -> None:  # noqa: B027 - a driver may have nothing to do
        """Best effort: do ahead what the container's first command would wait for. Never raises for the container."""

    def log(self, container: Container, data: bytes) -> None:  # noqa: B027 - a driver without logs has nothing to do
        """Best effort: make `data` appear where the driver's users look for logs (`docker logs`). Never blocks, never
        raises."""
