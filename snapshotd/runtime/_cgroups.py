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


def swap_is_counted() -> bool:
    """True if a limit on memory plus swap can be set. False on version 1 without `swapaccount=1`."""
    memory = next((point for point in hierarchies() if (point / "memory.limit_in_bytes").exists()), None)
    return memory is None or (memory / "memory.memsw.limit_in_bytes").exists()


def directories(path: str) -> list[Path]:
    """Directories of the cgroup `path` ("/a/b"), one per hierarchy."""
    found = (point / path.lstrip("/") for point in hierarchies())
    return [directory for directory in found if directory.is_dir()]


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
    for directory in directories(path):
        if (directory / "freezer.state").exists():
            Cgroup(str(directory), 1).thaw()
        elif (directory / "cgroup.freeze").exists():
            Cgroup(str(directory), 2).thaw()


def kill(path: str) -> None:
    """SIGKILL to every process of the cgroup, repeated for processes that were just being forked. Returns before they
    have ended."""
    for directory in directories(path):
        for pid in processes(directory):
            _kill_member(pid, path)


def processes(directory: Path) -> list[int]:
    """Process ids in one cgroup directory; empty when it is gone."""
    try:
        return [int(word) for word in (directory / "cgroup.procs").read_bytes().split()]
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
    while left := [directory for directory in directories(path) if not _remove_directory(directory)]:
        if time.monotonic() > deadline:
            pids = sorted({pid for directory in left for pid in processes(directory)})
            raise SandboxFailed(
                f"the cgroup {left[0]} cannot be removed: processes {pids} do not end (stuck in the kernel); try again"
            )
        kill(path)
        time.sleep(delay)  # there is no event for "empty" that both versions have
        delay = min(delay * 2, 0.02)


def remove_if_empty(path: str) -> None:
    """Remove the cgroup's own directories where nothing is in them."""
    for directory in directories(path):
        try:
            os.rmdir(directory)
        except OSError as exc:
            if exc.errno not in (errno.EBUSY, errno.ENOTEMPTY, errno.ENOENT):
                raise


def _remove_directory(directory: Path) -> bool:
    nested = [Path(parent) for parent, _, _ in os.walk(directory, topdown=False)]
    try:
        for each in nested:
            os.rmdir(each)
    except FileNotFoundError:
        return not directory.exists()
    except OSError as exc:
        if exc.errno in (errno.EBUSY, errno.ENOTEMPTY):
            return False
        raise
    return True
