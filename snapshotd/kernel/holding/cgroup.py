"""Cgroups, which hold the processes of a sandbox together: to look at, to stop, to limit and to end. They are of version
1, of version 2, or of the hybrid of both, in which version 1 has the controllers."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from snapshotd.errors import SandboxFailed
from snapshotd.kernel import mounts
from snapshotd.kernel.files import closing_fd
from snapshotd.kernel.holding import bpf
from snapshotd.kernel.holding.attempts import attempts
from snapshotd.kernel.processes import in_own_namespace

_FREEZE_DEADLINE_S = 10.0
"""A task in uninterruptible sleep cannot be frozen; longer than this means something is stuck."""
_EMPTY_DEADLINE_S = 10.0
_CONTROLLERS = ("cpu", "memory", "pids")
_ROUNDS_MAX = 10
"""Processes that are moved may just be forking."""
_BESIDE = "daemon"
"""The group of processes that are in no sandbox. Not "snapshotd-...", which tells a sandbox (daemon/http/peer.py)."""
_SHARED_SETTINGS = ("cpuset.cpus", "cpuset.mems", "cgroup.subtree_control")
"""Files of the group that all sandboxes share, in either version."""
_SETTINGS = (
    "cpuset.cpus",
    "cpuset.mems",
    "memory.limit_in_bytes",
    "memory.memsw.limit_in_bytes",
    "cpu.cfs_period_us",
    "cpu.cfs_quota_us",
    "pids.max",
    "memory.max",
    "memory.swap.max",
    "cpu.max",
    "devices.list",
)
"""Files of a sandbox's own group, in either version, in the order in which they can be set."""


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The settings of a sandbox's cgroup. `levels`: for each hierarchy its mount point, and what is written to files of
    the shared group and of the sandbox's own; `programs`: those that allow devices, in version 2."""

    levels: Sequence[tuple[str, list[tuple[str, str]], list[tuple[str, str]]]]
    programs: Sequence[bpf.DeviceProgram]


class Cgroup(ABC):
    """The cgroup `path` ("/a/b"): a directory in each hierarchy. One of them can freeze. It need not be there. Errors:
    SandboxFailed when it is gone and has to be there."""

    version: int
    freezer: str
    """The file that freezes."""
    _stop: str
    _go: str
    """Its texts that stop the tasks and let them go on."""
    _stopped: tuple[str, str]
    """The file that tells whether all have stopped, and its line then."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.directory = f"{_layout()[1]}{path}"

    def processes(self) -> list[int]:
        """See `members.Members`."""
        return [pid for pid in self.members() if not in_own_namespace(pid)]

    def members(self) -> list[int]:
        """All process ids in the daemon's pid namespace; zombies may be among them."""
        return [int(word) for word in self._read("cgroup.procs").split()]

    def freeze(self) -> None:
        """Stop every task and return when all have stopped. SandboxFailed after 10 s (thawed again)."""
        self._write(self.freezer, self._stop)
        # Version 1 has no event for it, and that of version 2 comes up to 10 ms late (CGROUP_FILE_NOTIFY_MIN_INTV).
        for _ in attempts(_FREEZE_DEADLINE_S, 0.00005, 0.002):
            if self._is_frozen():
                return
            if self.version == 1:
                self._write(self.freezer, self._stop)  # version 1 retries only when asked again
        self.thaw()
        raise SandboxFailed(
            f"a process in {self.directory} cannot be frozen (stuck in the kernel); nothing was captured"
        )

    def thaw(self) -> None:
        """Let every task go on. Not an error when nothing was frozen or it is gone."""
        try:
            self._write(self.freezer, self._go)
        except SandboxFailed:
            pass  # gone: nothing left to thaw

    @abstractmethod
    def kill(self) -> set[int]:
        """SIGKILL to every process, which are returned, perhaps before they have ended. Call it until none is left: some
        may just be starting. Not an error when it is gone."""

    def remove(self) -> None:
        """Kill the remaining processes, and remove its directories. SandboxFailed when some are still there after 10 s
        (stuck in the kernel)."""
        for _ in attempts(_EMPTY_DEADLINE_S, 0.0005, 0.02):  # there is no event for "empty" that both versions have
            left = [place for place in self._places() if not _remove_directory(place)]
            if not left:
                return
            self.kill()
        pids = sorted({pid for place in left for pid in _processes(place)})
        raise SandboxFailed(
            f"the cgroup {left[0]} cannot be removed: processes {pids} do not end (stuck in the kernel); try again"
        )

    def remove_if_empty(self) -> None:
        """Remove its own directories where nothing is in them."""
        for place in self._places():
            try:
                os.rmdir(place)
            except OSError as exc:
                if exc.errno not in (errno.EBUSY, errno.ENOTEMPTY, errno.ENOENT):
                    raise

    def children(self) -> set[str]:
        """Names of the cgroups right below, over all hierarchies."""
        return {
            entry.name for place in self._places() for entry in _entries(place) if entry.is_dir(follow_symlinks=False)
        }

    # -- one like another ----------------------------------------------------------------------------------------------

    def settings(self) -> GroupSettings | None:
        """Its settings, for others like it; None: it may use every device. OSError."""
        places = [(point, f"{point}{self.path}") for point in hierarchies() if os.path.isdir(f"{point}{self.path}")]
        levels = [
            (point, _values(os.path.dirname(place), _SHARED_SETTINGS), _values(place, _SETTINGS))
            for point, place in places
        ]
        programs = self._programs()
        limited = programs or any(name == "devices.deny" for _, _, own in levels for name, _ in own)
        return GroupSettings(levels, programs) if limited else None

    def make(self, settings: GroupSettings) -> None:
        """Make its directories as another's are, and those that sandboxes share where they are missing. FileExistsError:
        it is there; OSError."""
        for point, shared, own in settings.levels:
            place = f"{point}{self.path}"
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.dirname(place), 0o755)
                _set(os.path.dirname(place), shared)
            os.mkdir(place, 0o755)
            _set(place, own)
        self._use(settings.programs)

    def doors(self) -> list[str]:
        """The files to which a process writes "0" to enter."""
        return [f"{place}/cgroup.procs" for place in self._places() if os.path.isdir(place)]

    def birthplace(self) -> int | None:
        """A descriptor for CLONE_INTO_CGROUP, for the caller to close, where that takes the place of the doors.
        FileNotFoundError: it is gone."""
        return None

    def _programs(self) -> list[bpf.DeviceProgram]:
        return []

    def _use(self, programs: Sequence[bpf.DeviceProgram]) -> None:  # noqa: B027 - nothing to do is right for version 1
        """Have programs allow devices. Version 1 has a list for it, one of the settings."""

    # -- pieces --------------------------------------------------------------------------------------------------------

    def cpu_ns(self) -> int | None:
        """Processor time of all processes that are, or were, in it. None: no controller counts it."""
        used = self._count("cpuacct.usage")
        if used is not None:
            return used
        micros = self._count("cpu.stat", "usage_usec")
        return None if micros is None else micros * 1000

    def memory_bytes(self) -> int | None:
        """Memory in use, without what the kernel keeps of files and can drop. None: no controller counts it."""
        for total, stat in (("memory.current", "inactive_file"), ("memory.usage_in_bytes", "total_inactive_file")):
            used = self._count(total)
            if used is not None:
                return max(0, used - (self._count("memory.stat", stat) or 0))
        return None

    def _count(self, name: str, word: str | None = None) -> int | None:
        """The number in one of its files, behind a word; None where no hierarchy has it."""
        for place in self._places():
            try:
                with open(f"{place}/{name}") as file:
                    for line in file:
                        *key, value = line.split()
                        if word is None or key == [word]:
                            return int(value)
            except OSError:
                continue
        return None

    def _places(self) -> list[str]:
        return [f"{point}{self.path}" for point in hierarchies()]

    def _is_frozen(self) -> bool:
        name, line = self._stopped
        return line in self._read(name).splitlines()

    def _read(self, name: str) -> str:
        try:
            with open(f"{self.directory}/{name}") as f:
                return f.read()
        except OSError as exc:
            if exc.errno not in (errno.ENOENT, errno.ENODEV):
                raise
            raise SandboxFailed(f"the sandbox's cgroup {self.directory} is gone: its container died") from exc

    def _write(self, name: str, value: str) -> None:
        try:
            _set(self.directory, [(name, value)])
        except OSError as exc:
            raise SandboxFailed(
                f"cannot write {name} of {self.directory}: {exc.strerror}; its container may have died"
            ) from exc


class _Version1(Cgroup):
    version = 1
    freezer, _stop, _go = "freezer.state", "FROZEN", "THAWED"
    _stopped = ("freezer.state", "FROZEN")

    def kill(self) -> set[int]:
        found = {pid for place in self._places() for pid in _processes(place)}
        for pid in found:
            self._kill_member(pid)
        return found

    def _kill_member(self, pid: int) -> None:
        """Kill `pid` if it still is a member, so that a reused number hits no other process."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return  # ended
        try:
            if any(self.path == group.path for group in all_of_process(pid)):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            pass  # ended
        finally:
            os.close(pidfd)


class _Version2(Cgroup):
    version = 2
    freezer, _stop, _go = "cgroup.freeze", "1", "0"
    _stopped = ("cgroup.events", "frozen 1")

    def kill(self) -> set[int]:
        found = set(_processes(self.directory))
        if found:
            try:
                _set(self.directory, [("cgroup.kill", "1")])
            except OSError as exc:
                if exc.errno not in (errno.ENOENT, errno.ENODEV):
                    raise
        return found

    def doors(self) -> list[str]:
        return []

    def birthplace(self) -> int:
        return os.open(self.directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def _programs(self) -> list[bpf.DeviceProgram]:
        with closing_fd(self._open()) as group:
            return bpf.device_programs(group)

    def _use(self, programs: Sequence[bpf.DeviceProgram]) -> None:
        with closing_fd(self._open()) as group:
            for program in programs:
                bpf.attach(program, group)

    def _open(self) -> int:
        return os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


# -- which ones --------------------------------------------------------------------------------------------------------


def at(path: str) -> Cgroup:
    """The cgroup of this path below the hierarchies' mount points."""
    return (_Version1 if _layout()[0] == 1 else _Version2)(path)


def all_of_process(pid: int) -> list[Cgroup]:
    """The cgroups of a process but for the roots. Each may have directories in several hierarchies.
    FileNotFoundError, ProcessLookupError: it is gone."""
    with open(f"/proc/{pid}/cgroup") as f:
        paths = [line.rstrip("\n").split(":", 2)[2] for line in f]
    return [at(path) for path in dict.fromkeys(paths) if path != "/"]


def of_process(pid: int) -> Cgroup:
    """The group that holds the processes of `pid`'s container together. Raises SandboxFailed when the process is gone
    or cannot be frozen."""
    version, point = _layout()
    lines = [line.split(":", 2) for line in (path_of(pid) or "").splitlines()]
    if not lines:
        raise SandboxFailed(f"process {pid} is gone: its container died")
    wanted = "freezer" if version == 1 else ""
    path = next((path for _, controllers, path in lines if wanted in controllers.split(",")), "/")
    if path == "/" or not os.path.exists(f"{point}{path}/{at(path).freezer}"):
        raise SandboxFailed(f"process {pid} is in no cgroup with a freezer; `snapshotd doctor` says what is missing")
    return at(path)


def path_of(pid: int) -> str | None:
    """The whole text of /proc/PID/cgroup, to compare with another process's; None when the process is gone."""
    try:
        with open(f"/proc/{pid}/cgroup") as f:
            return f.read()
    except (FileNotFoundError, ProcessLookupError):
        return None


@cache
def hierarchies() -> tuple[str, ...]:
    """Mount points of all cgroup hierarchies, in mount order, each hierarchy once."""
    found: dict[str, str] = {}
    for m in mounts.read_mountinfo():
        if m.fs_type in ("cgroup", "cgroup2"):
            found.setdefault(m.device, os.fsdecode(m.point))
    return tuple(found.values())


@cache
def _layout() -> tuple[int, str]:
    """The version that is used here, and the mount point of the hierarchy that freezes: version 1 has it where it has
    the controller."""
    found = {m.fs_type: os.fsdecode(m.point) for m in reversed(mounts.read_mountinfo()) if _freezes(m)}
    return (1, found["cgroup"]) if "cgroup" in found else (2, found.get("cgroup2", "/sys/fs/cgroup"))


def _freezes(mount: mounts.MountPoint) -> bool:
    return mount.fs_type == "cgroup2" or (mount.fs_type == "cgroup" and b"freezer" in mount.options.split(b","))


def swap_is_counted() -> bool:
    """True if a limit on memory plus swap can be set. False on version 1 without `swapaccount=1`."""
    memory = next((point for point in hierarchies() if os.path.exists(f"{point}/memory.limit_in_bytes")), None)
    return memory is None or os.path.exists(f"{memory}/memory.memsw.limit_in_bytes")


def hand_down_controllers(root: str) -> dict[str, str]:
    """Let the groups below the group `root` of version 2 have limits. Returns the controllers that they cannot have,
    with the reasons.

    No group has both, processes and controllers for groups below, but the one at the top. In a container, `root` is the
    container's own and this process is in it: all that is in there moves to a group beside the sandboxes' then. Before
    any controller: with some of them the kernel allows processes, and takes the groups below for groups of threads.
    """
    with open(f"{root}/cgroup.subtree_control") as f:
        given = f.read().split()
    wanted = [name for name in _CONTROLLERS if name not in given]
    if wanted and os.path.exists(f"{root}/cgroup.type"):  # the one at the top has no such file
        _move_processes(root, f"{root}/{_BESIDE}")
    missing = {}
    for name in wanted:
        try:
            _set(root, [("cgroup.subtree_control", f"+{name}")])
        except OSError as exc:
            missing[name] = exc.strerror or str(exc)
    return missing


def _move_processes(source: str, target: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(target, 0o755)
    for _ in range(_ROUNDS_MAX):
        for pid in filter(None, _processes(source)):  # 0: it is outside of this pid namespace
            with contextlib.suppress(ProcessLookupError):  # ended meanwhile
                _set(target, [("cgroup.procs", str(pid))])


# -- files of a group --------------------------------------------------------------------------------------------------


def _values(place: str, names: Sequence[str]) -> list[tuple[str, str]]:
    """The names of files and their texts that give another group the same settings."""
    found = []
    for name in names:
        if not os.path.exists(f"{place}/{name}"):
            continue
        with open(f"{place}/{name}") as f:
            value = f.read().strip()
        if name == "devices.list":
            found += [("devices.deny", "a"), *(("devices.allow", line) for line in value.splitlines())]
        elif value:
            plus = name == "cgroup.subtree_control"
            found.append((name, " ".join(f"+{one}" for one in value.split()) if plus else value))
    return found


def _set(place: str, values: Sequence[tuple[str, str]]) -> None:
    for name, value in values:
        with closing_fd(os.open(f"{place}/{name}", os.O_WRONLY | os.O_CLOEXEC)) as fd:
            os.write(fd, value.encode())


def _processes(place: str) -> list[int]:
    """Process ids in one cgroup directory; empty when it is gone."""
    try:
        with open(f"{place}/cgroup.procs", "rb", buffering=0) as f:
            return [int(word) for word in f.readall().split()]
    except OSError as exc:
        if exc.errno in (errno.ENOENT, errno.ENODEV):
            return []
        raise


def _remove_directory(place: str) -> bool:
    """Remove a cgroup directory with those in it; False: a process is in one. Most have no other in them."""
    try:
        os.rmdir(place)
    except FileNotFoundError:
        return True
    except OSError as exc:
        if exc.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise
        nested = [entry.path for entry in _entries(place) if entry.is_dir(follow_symlinks=False)]
        return bool(nested) and all(map(_remove_directory, nested)) and _remove_directory(place)
    return True


def _entries(place: str) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(place))
    except FileNotFoundError:
        return []
