"""Can this container be pivoted right now? Only if no process would be left behind on the old root.

A process whose working directory or open files lie below the old root keeps a stale, read-only view of it. So every
live process must be the container's init, or an agent that is *parked*: waiting in a call to us, with its working
directory at the root and its files closed (the in-sandbox library does both). A process's claim to be parked is checked
here from outside.
"""

from __future__ import annotations

import os

from snapshotd.kernel.holding.members import Members
from snapshotd.terms import number_of

MAX_FDS = 512
"""Looking at more descriptors than this would cost more than the copy path saves."""


def blocker(cgroup: Members, init_pid: int, root_id: int, parked: set[int]) -> str | None:
    """Reason why the container cannot be pivoted, or None. `root_id` is the id of the mount at its root. SandboxFailed
    when it is gone.

    Cost: a few reads per live process.
    """
    for pid in cgroup.processes():
        if pid == init_pid or is_zombie(pid):
            continue
        if pid not in parked:
            return f"process {pid} ({_name(pid)}) is live"
        reason = _holds_root(pid, root_id)
        if reason:
            return f"process {pid} ({_name(pid)}) {reason}"
    return None


def is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            return f.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return True  # ended since it was listed


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", errors="replace") as f:
            return f.read().strip()
    except (FileNotFoundError, ProcessLookupError):
        return "?"


def _holds_root(pid: int, root_id: int) -> str | None:
    try:
        root, cwd = os.stat(f"/proc/{pid}/root"), os.stat(f"/proc/{pid}/cwd")
        if (root.st_dev, root.st_ino) != (cwd.st_dev, cwd.st_ino):
            return "has its working directory below the root"
        fds = os.listdir(f"/proc/{pid}/fd")
        if len(fds) > MAX_FDS:
            return f"has {number_of(len(fds), 'open file')}"
        for fd in fds:
            with open(f"/proc/{pid}/fdinfo/{fd}", "rb") as f:
                for line in f:
                    if line.startswith(b"mnt_id:"):
                        if int(line[7:]) == root_id:
                            return f"has file descriptor {fd} open below the root"
                        break
    except (FileNotFoundError, ProcessLookupError):
        return None  # the process or the descriptor is gone: it holds nothing
    return None


def writable_mappings(cgroup: Members) -> set[bytes]:
    """Paths (relative to the root) that some process has mapped shared and writable. Only while frozen, or it is out of
    date at once."""
    found: set[bytes] = set()
    for pid in cgroup.processes():
        try:
            with open(f"/proc/{pid}/maps", "rb") as f:
                for line in f:
                    fields = line.rstrip(b"\n").split(None, 5)
                    if (
                        len(fields) == 6
                        and fields[1][1:2] == b"w"
                        and fields[1][3:4] == b"s"
                        and fields[5].startswith(b"/")
                    ):
                        found.add(fields[5].lstrip(b"/"))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # ended; its mappings are written back
    return found
