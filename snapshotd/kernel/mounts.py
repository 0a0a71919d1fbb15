"""Mounts by file descriptor: overlays, id-mapped clones, sealing, moving, and listing mounts.

Source: Documentation/filesystems/overlayfs.rst, mount_setattr(2), open_tree(2); design notes in docs/architecture.md.
"""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from snapshotd.kernel import syscalls as sc

OVERLAY_OPTIONS: tuple[tuple[str, str], ...] = (
    ("redirect_dir", "on"),  # with it off, rename() of a directory made in an earlier step fails with EXDEV
    ("index", "off"),  # with it on, a sealed upper cannot become a lower while old references live
    ("metacopy", "off"),  # a layer must hold its files' bytes
    ("xino", "auto"),
)
GONE = (errno.ENOTCONN, errno.ECONNABORTED, errno.ECONNREFUSED)
"""Errors of a FUSE mount whose process is gone."""
_DESCRIPTORS = "/proc/thread-self/fd"
_OPTIONS_BYTES = 4096
_OVERLAY_NEEDS_BYTES = 1 << 20
_OF_THE_KERNEL = (
    0x9FA0,
    0x62656572,
    0x27E0EB,
    0x63677270,
    0x64626720,
    0x74726163,
    0x73636673,
    0xCAFE4A11,
    0x1CD1,
    0x6E736673,
)
"""proc, sysfs, cgroup, cgroup2, debugfs, tracefs, securityfs, bpf, devpts, nsfs (linux/magic.h)."""
"""Free space with which no file system refuses a directory and an attribute: XFS reserves some hundred blocks for
them."""


class LayerNaming(StrEnum):
    """A way to tell overlayfs which directories its layers are, the faster one first."""

    DESCRIPTOR = "descriptor"
    """Linux 6.15: by descriptor. (6.13 takes some descriptors, but none that was opened with O_PATH.)"""
    TEXT = "text"
    """Linux 6.8: each by the path that its descriptor has in /proc. As fast. (A string of fsconfig(2) has 255 bytes.)"""
    OPTIONS = "options"
    """Any kernel: by all paths together, in the one page of options that mount(2) takes. 2 ms more, for the mount at a
    place from which it is cloned."""


def overlay(lower_fds: Sequence[int], upper_fd: int, work_fd: int, naming: LayerNaming) -> int:
    """Build a detached overlay mount and return its file descriptor.

    `lower_fds`: directories, newest first, 1..500 (1..220 by `LayerNaming.OPTIONS`). `upper_fd` and `work_fd`: empty
    directories of one file system and one mount. By anything but descriptors, the layers lie on mounts of this process's
    own mount namespace. The mount is `nodev`, `noatime` and `volatile`: making bytes durable is the repository's work,
    and without it an unmount would write back everything dirty (0.24 ms against 184 ms with 100 MiB dirty).
    Raises OSError (ENOSPC: see `_check_whole`); nothing is left behind.
    """
    if naming is LayerNaming.OPTIONS:
        mount = _by_options(lower_fds, upper_fd, work_fd)
    else:
        mount = _by_parameters(lower_fds, upper_fd, work_fd, naming)
    try:
        _check_whole(mount, upper_fd)
    except BaseException:
        os.close(mount)
        raise
    return mount


def _by_parameters(lower_fds: Sequence[int], upper_fd: int, work_fd: int, naming: LayerNaming) -> int:
    fs = sc.call("fsopen", "overlay", sc.FSOPEN_CLOEXEC)
    try:
        layers = [("lowerdir+", fd) for fd in lower_fds]
        for key, fd in (*layers, ("upperdir", upper_fd), ("workdir", work_fd)):
            if naming is LayerNaming.DESCRIPTOR:
                sc.call("fsconfig", fs, sc.FSCONFIG_SET_FD, key, None, fd)
            else:
                sc.call("fsconfig", fs, sc.FSCONFIG_SET_STRING, key, f"{_DESCRIPTORS}/{fd}", 0)
        for key, value in OVERLAY_OPTIONS:
            sc.call("fsconfig", fs, sc.FSCONFIG_SET_STRING, key, value, 0)
        sc.call("fsconfig", fs, sc.FSCONFIG_SET_FLAG, "volatile", None, 0)
        sc.call("fsconfig", fs, sc.FSCONFIG_CMD_CREATE, None, None, 0)
        return sc.call("fsmount", fs, sc.FSMOUNT_CLOEXEC, sc.MOUNT_ATTR_NODEV | sc.MOUNT_ATTR_NOATIME)
    finally:
        os.close(fs)


def _by_options(lower_fds: Sequence[int], upper_fd: int, work_fd: int) -> int:
    """Mounted at a directory of its own for as long as it takes to clone it."""
    lowers = ":".join(f"{_DESCRIPTORS}/{fd}" for fd in lower_fds)
    upper = (("upperdir", f"{_DESCRIPTORS}/{upper_fd}"), ("workdir", f"{_DESCRIPTORS}/{work_fd}"))
    named = [f"{key}={value}" for key, value in (("lowerdir", lowers), *upper, *OVERLAY_OPTIONS)]
    options = ",".join((*named, "volatile")).encode()
    if len(options) >= _OPTIONS_BYTES:
        raise OSError(errno.E2BIG, f"overlay: {len(lower_fds)} layers do not fit into one page of options")
    place = tempfile.mkdtemp(prefix="snapshotd-overlay-")
    try:
        sc.call("mount", "overlay", place, "overlay", sc.MS_NODEV | sc.MS_NOATIME, options)
        try:
            return clone(sc.AT_FDCWD, place)
        finally:
            detach(place)
    finally:
        os.rmdir(place)


def _check_whole(mount: int, upper_fd: int) -> None:
    """OSError unless the overlay is writable and has all its options.

    On a full disk overlayfs mounts all the same: read-only when it could not make its work directory, and without
    following redirects when it could not set an attribute there (fs/overlayfs/super.c, ovl_make_workdir). The first
    shows; of the second only lack of space tells.
    """
    upper = os.fstatvfs(upper_fd)
    if upper.f_flag & os.ST_RDONLY:
        raise OSError(errno.EROFS, "overlay: the upper directory's file system is read-only")
    if os.fstatvfs(mount).f_flag & os.ST_RDONLY or upper.f_bavail * upper.f_frsize < _OVERLAY_NEEDS_BYTES:
        raise OSError(errno.ENOSPC, "overlay: no space for its work directory")


def clone(dir_fd: int, path: bytes | str = b"", *, recursive: bool = False) -> int:
    """A detached copy of the mount at `path` below `dir_fd` (the directory itself if empty). Returns its descriptor."""
    flags = sc.OPEN_TREE_CLONE | sc.OPEN_TREE_CLOEXEC | (sc.AT_RECURSIVE if recursive else 0)
    return sc.call("open_tree", dir_fd, path, flags | (0 if path else sc.AT_EMPTY_PATH))


def set_attributes(mount_fd: int, *, attr_set: int = 0, attr_clr: int = 0, userns_fd: int = 0) -> None:
    """mount_setattr(2) on the mount that `mount_fd` is the root of. Raises OSError (EBUSY: open for writing)."""
    attr = sc.MountAttr(attr_set, attr_clr, 0, userns_fd)
    sc.call("mount_setattr", mount_fd, b"", sc.AT_EMPTY_PATH, ctypes.byref(attr), ctypes.sizeof(attr))


def id_mapped_clone(dir_fd: int, userns_fd: int) -> int:
    """A detached clone of a directory's mount whose ids are shifted by the user namespace. Returns its descriptor.

    Upper and work must come from one clone of their parent, or overlayfs refuses them.
    """
    fd = clone(dir_fd)
    try:
        set_attributes(fd, attr_set=sc.MOUNT_ATTR_IDMAP, userns_fd=userns_fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_only_file(file_fd: int) -> int:
    """A detached mount of one file (O_PATH), read-only, nosuid, nodev and noexec. Returns its descriptor."""
    fd = clone(file_fd)
    try:
        strict = sc.MOUNT_ATTR_RDONLY | sc.MOUNT_ATTR_NOSUID | sc.MOUNT_ATTR_NODEV | sc.MOUNT_ATTR_NOEXEC
        set_attributes(fd, attr_set=strict)
    except BaseException:
        os.close(fd)
        raise
    return fd


def seal_here() -> None:
    """Make the mount at "/" of the calling thread's mount namespace read-only, for good.

    Raises OSError EBUSY while any file is open for writing through it, shared writable mappings included; then nothing
    changed.
    """
    attr = sc.MountAttr(sc.MOUNT_ATTR_RDONLY, 0, 0, 0)
    sc.call("mount_setattr", sc.AT_FDCWD, b"/", 0, ctypes.byref(attr), ctypes.sizeof(attr))


def unseal_here() -> None:
    """Undo `seal_here`, for the case that a later step of the pivot failed."""
    attr = sc.MountAttr(0, sc.MOUNT_ATTR_RDONLY, 0, 0)
    sc.call("mount_setattr", sc.AT_FDCWD, b"/", 0, ctypes.byref(attr), ctypes.sizeof(attr))


def attach(mount_fd: int, target_fd: int) -> None:
    """Mount a detached tree on the directory or file that `target_fd` (O_PATH) holds."""
    sc.call("move_mount", mount_fd, b"", target_fd, b"", sc.MOVE_MOUNT_F_EMPTY_PATH | sc.MOVE_MOUNT_T_EMPTY_PATH)


def detach(path: bytes | str) -> None:
    """Lazy unmount: the tree disappears from `path` now, and from memory when its last user is gone."""
    sc.call("umount2", path, sc.MNT_DETACH)


def answers(place: int | bytes) -> bool:
    """True if the process that serves a FUSE mount is there. Asks for its size, which no cache knows. Waits as long as
    the process does not answer."""
    try:
        os.statvfs(place)
    except OSError as exc:
        return exc.errno not in GONE
    return True


@dataclass(frozen=True, slots=True)
class MountPoint:
    """One line of mountinfo: `point` is relative to the reading process's root, raw bytes, octal escapes undone."""

    mount_id: int
    parent_id: int
    device: str
    root: bytes
    """The directory of the file system that is mounted; of cgroups, as this process's cgroup namespace names it."""
    point: bytes
    fs_type: str
    source: bytes
    options: bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """The mounts in a process's root: the id of the mount at "/", and (point, id) of the mounts directly in it, in
    mount order. If several lie on one point, the id is the topmost one's."""

    root_id: int
    points: tuple[tuple[bytes, int], ...]


def _unescape(field: bytes) -> bytes:
    if b"\\" not in field:
        return field
    out, i = bytearray(), 0
    while i < len(field):
        if field[i : i + 1] == b"\\" and i + 3 < len(field) + 1:
            out.append(int(field[i + 1 : i + 4], 8))
            i += 4
        else:
            out.append(field[i])
            i += 1
    return bytes(out)


def mount_id(fd: int) -> int:
    """The id, as in mountinfo, of the mount that a descriptor is on."""
    answer = sc.Statx()
    sc.call("statx", fd, b"", sc.AT_EMPTY_PATH, sc.STATX_MNT_ID, ctypes.byref(answer))
    return int(answer.mnt_id)


def born_at(fd: int) -> int | None:
    """The time at which the inode of a descriptor was made, in nanoseconds. None: its file system does not tell."""
    answer = sc.Statx()
    sc.call("statx", fd, b"", sc.AT_EMPTY_PATH, sc.STATX_BTIME, ctypes.byref(answer))
    return int(answer.birth_s * 10**9 + answer.birth_ns) if answer.mask & sc.STATX_BTIME else None


def holds_no_files(fd: int) -> bool:
    """True for a descriptor on a file system in which the kernel shows its own state, and processes theirs."""
    facts = (ctypes.c_long * 32)()
    sc.call("fstatfs", fd, facts)
    return facts[0] & 0xFFFFFFFF in _OF_THE_KERNEL


def layout(pid: int) -> Layout:
    """The layout of a process's mount namespace. Raises OSError when the process is gone.

    On the path of every step: reads only the first five fields of each line (proc_pid_mountinfo(5)).
    """
    with open(f"/proc/{pid}/mountinfo", "rb") as f:
        lines = [
            line.split(b" ", 5) for line in f.read().split(b"\n")[:-1]
        ]  # a name may hold any other line break, unescaped
    top = {line[4]: int(line[0]) for line in lines}
    root = next((line[0] for line in reversed(lines) if line[4] == b"/"), b"-1")  # the last one at "/" lies on top
    return Layout(
        int(root), tuple((_unescape(line[4]), top[line[4]]) for line in lines if line[1] == root and line[4] != b"/")
    )


def read_mountinfo(pid: int | str = "self") -> list[MountPoint]:
    """The mounts of a process's namespace, in mount order. Raises OSError (the process is gone)."""
    result = []
    with open(f"/proc/{pid}/mountinfo", "rb") as f:
        for line in f:
            left, _, right = line.partition(b" - ")
            fields, tail = left.split(b" "), right.rstrip(b"\n").split(b" ")
            options = tail[2] if len(tail) > 2 else b""
            result.append(
                MountPoint(
                    int(fields[0]),
                    int(fields[1]),
                    fields[2].decode(),
                    _unescape(fields[3]),
                    _unescape(fields[4]),
                    tail[0].decode(),
                    _unescape(tail[1]),
                    options,
                )
            )
    return result
