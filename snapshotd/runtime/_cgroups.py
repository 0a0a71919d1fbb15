"""The cgroup directories of one container in every mounted hierarchy (version 1, version 2, or both): killing and
removing them."""

from __future__ import annotations

import errno
import os
import signal
import time
from functools import cache
from pathlib import Path

from snapshotd.errors import SandboxFailed
from snapshotd.kernel import mounts
from snapshotd.kernel.cgroup import Cgroup

_EMPTY_DEADLINE_S = 10.0


@cache
def hierarchies() -> tuple[Path, ...]:
    """Mount points of all cgroup hierarchies, in mount order, each once."""
    points = [Path(os.fsdecode(m.point)) for m in mounts.read_mountinfo() if m.fs_type in ("cgroup", "cgroup2")]
    return tuple(dict.fromkeys(points))


@cache
def _freezers() -> tuple[tuple[Path, int], ...]:
    """Mount points of the hierarchies that can freeze processes, with their version."""
    found = {
        Path(os.fsdecode(m.point)): 2 if m.fs_type == "cgroup2" else 1
        for m in mounts.read_mountinfo()
        if m.fs_type == "cgroup2" or (m.fs_type == "cgroup" and b"freezer" in m.options.split(b","))
    }
    return tuple(found.items())


def swap_is_counted() -> bool:
    """True if a limit on memory plus swap can be set. False on version 1 without `swapaccount=1`."""
    memory = next((point for point in hierarchies() if (point / "memory.limit_in_bytes").exists()), None)
    return memory is None or (memory / "memory.memsw.limit_in_bytes").exists()


def directories(path: str) -> list[Path]:
    """Directories of the cgroup `path` ("/a/b"), one per hierarchy."""
    return [Path(place) for place in _places(path) if os.path.isdir(place)]


def _places(path: str) -> list[str]:
    """The places of the cgroup's directories, which need not be there. As text: a sandbox's end goes through them again
    and again."""
    return [f"{point}{path}" for point in hierarchies()]


def children(path: str) -> set[str]:
    """Names of the cgroups right below `path`, over all hierarchies."""
    names: set[str] = set()
    for directory in directories(path):
        try:
            names |= {entry.name for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False)}
        except FileNotFoundError:
            continue  # removed since we looked
    return names


def thaw(path: str) -> None:
    """Let every task of the cgroup go on. Not an error when nothing is frozen or the cgroup is gone."""
    for point, version in _freezers():
        Cgroup(f"{point}{path}", version).thaw()


def kill(path: str) -> set[int]:
    """SIGKILL to every process of the cgroup, which are returned, perhaps before they have ended. Not to those that are
    just being forked: call it until none is left."""
    found = {pid for place in _places(path) for pid in _processes(place)}
    for pid in found:
        _kill_member(pid, path)
    return found


def _processes(place: str) -> list[int]:
    """Process ids in one cgroup directory; empty when it is gone."""
    try:
        with open(f"{place}/cgroup.procs", "rb", buffering=0) as f:
            return [int(word) for word in f.readall().split()]
    except OSError as exc:
        if exc.errno in (errno.ENOENT, errno.ENODEV):
            return []
        raise


def _kill_member(pid: int, path: str) -> None:
    """Kill `pid` if it still is a member, so that a reused number hits no other process."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return  # ended
    try:
        with open(f"/proc/{pid}/cgroup") as f:
            member = any(line.rstrip("\n").split(":", 2)[2] == path for line in f)
        if member:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        pass  # ended
    finally:
        os.close(pidfd)


def remove(path: str) -> None:
    """Kill the remaining processes of the cgroup and remove its directories, nested ones included.

    Raises SandboxFailed when processes are still there after 10 s (stuck in the kernel).
    """
    deadline = time.monotonic() + _EMPTY_DEADLINE_S
    delay = 0.0005
    while left := [place for place in _places(path) if not _remove_directory(place)]:
        if time.monotonic() > deadline:
            pids = sorted({pid for place in left for pid in _processes(place)})
            raise SandboxFailed(
                f"the cgroup {left[0]} cannot be removed: processes {pids} do not end (stuck in the kernel); try again"
            )
        kill(path)
        time.sleep(delay)  # there is no event for "empty" that both versions have
        delay = min(delay * 2, 0.02)


def remove_if_empty(path: str) -> None:
    """Remove the cgroup's own directories where nothing is in them."""
    for place in _places(path):
        try:
            os.rmdir(place)
        except OSError as exc:
            if exc.errno not in (errno.EBUSY, errno.ENOTEMPTY, errno.ENOENT):
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
