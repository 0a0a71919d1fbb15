"""Mounts and cgroups of this process's own, made fit where the process is in a container.

A container engine that was not told otherwise masks parts of /proc and /sys, mounts cgroups read-only, and shows on
version 1 of cgroups the container's own part of each hierarchy, while /proc names cgroups from the top. All of that is
undone for this process alone, which needs CAP_SYS_ADMIN and no other privilege; the container's other processes see
what they saw. On a machine without a container around it there is nothing to undo.
"""

from __future__ import annotations

import errno
import os

from snapshotd.kernel import mounts
from snapshotd.kernel import syscalls as sc

_CGROUPS = b"/sys/fs/cgroup"
_MASKS = ("tmpfs", "devtmpfs", "proc")
"""File systems of what hides a part of /proc or /sys, or makes it read-only: an empty one, /dev/null, and /proc itself."""


def enter_own_mounts() -> None:
    """Give this process, and what it starts, a mount namespace to which mounts from outside still arrive. OSError: this
    process lacks the right."""
    sc.call("unshare", sc.CLONE_NEWNS)
    sc.call("mount", "none", "/", None, sc.MS_REC | sc.MS_SLAVE, None)


def make_fit() -> None:
    """Take the masks of /proc and /sys away, and make cgroups writable, in namespaces of this process's own. Where
    nothing is in the way, the process stays in the namespaces that it has. From the main thread, before others start.
    OSError: this process lacks the right."""
    found = mounts.read_mountinfo()
    masks = [one.point for one in found if _hides(one)]
    hierarchies = [one for one in found if one.fs_type in ("cgroup", "cgroup2")]
    closed = [one.point for one in hierarchies if os.statvfs(one.point).f_flag & os.ST_RDONLY]
    if masks or closed:
        enter_own_mounts()
    for point in reversed(masks):
        try:
            mounts.detach(point)
        except OSError as exc:
            if exc.errno not in (errno.EINVAL, errno.ENOENT):  # it went with another one
                raise
    if any(one.root != b"/" and one.root == _own_cgroup(one) for one in hierarchies):
        sc.call("unshare", sc.CLONE_NEWCGROUP)
    for point in closed:
        kept = os.statvfs(point).f_flag & (os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC)
        sc.call("mount", None, point, None, sc.MS_REMOUNT | sc.MS_BIND | kept, None)


def _hides(one: mounts.MountPoint) -> bool:
    """A sandbox gets a new /proc and /sys in its user namespace only where the kernel sees whole ones here."""
    below = one.point.startswith((b"/proc/", b"/sys/")) and not one.point.startswith(_CGROUPS)
    return below and one.fs_type in _MASKS


def _own_cgroup(hierarchy: mounts.MountPoint) -> bytes | None:
    """This process's cgroup in a hierarchy, as /proc names it."""
    controllers = set(hierarchy.options.split(b","))
    with open("/proc/self/cgroup", "rb") as f:
        for line in f:
            _, names, path = line.rstrip(b"\n").split(b":", 2)
            if (not names and hierarchy.fs_type == "cgroup2") or (names and set(names.split(b",")) <= controllers):
                return path
    return None
