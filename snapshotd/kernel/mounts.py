"""Mounts by file descriptor: overlays, id-mapped clones, sealing, moving, and listing mounts.

Source: Documentation/filesystems/overlayfs.rst, mount_setattr(2), open_tree(2); design notes in docs/architecture.md.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from snapshotd.kernel import syscalls as sc
from snapshotd.kernel.files import closing_fd, free_bytes
from snapshotd.terms import number_of

_REDIRECTS = ("redirect_dir", "on")
"""With it off, rename() of a directory made in an earlier step fails with EXDEV. Not allowed in a user namespace."""
OVERLAY_OPTIONS: tuple[tuple[str, str], ...] = (
    ("index", "off"),  # with it on, a sealed upper cannot become a lower while old references live
    ("metacopy", "off"),  # a layer must hold its files' bytes
    ("xino", "auto"),
)
GONE = (errno.ENOTCONN, errno.ECONNABORTED, errno.ECONNREFUSED)
"""Errors of a FUSE mount whose process is gone."""
_DESCRIPTORS = "/proc/thread-self/fd"
_OPTIONS_BYTES = 4096
_OVERLAY_NEEDS_BYTES = 1 << 20
"""Free space with which no file system refuses a directory and an attribute: XFS reserves some hundred blocks for
them."""
_WITH_OWN_FSID = (0xEF53, 0x9123683E)
"""ext2 to ext4, Btrfs (linux/magic.h): ext4_statfs, btrfs_statfs."""
_XFS, _XFS_IOC_FSGEOMETRY_V1, _XFS_GEOMETRY_BYTES = 0x58465342, 0x80705864, 112
"""ioctl_xfs_fsgeometry(2): any user may ask. The identifier is 16 bytes from byte 64 on."""
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


class LayerNaming(StrEnum):
    """A way to tell overlayfs which directories its layers are, the faster one first."""

    DESCRIPTOR = "descriptor"
    """Linux 6.15: by descriptor. (6.13 takes some descriptors, but none that was opened with O_PATH.)"""
    TEXT = "text"
    """Linux 6.8: each by the path that its descriptor has in /proc. As fast. (A string of fsconfig(2) has 255 bytes.)"""
    OPTIONS = "options"
    """Any kernel: by all paths together, in the one page of options that mount(2) takes. 2 ms more, for the mount at a
    place from which it is cloned."""


def overlay(
    lower_fds: Sequence[int], upper_fd: int, work_fd: int, naming: LayerNaming, *, user_marks: bool = False
) -> int:
    """Build a detached overlay mount and return its file descriptor.

    `lower_fds`: directories, newest first, 1..500 (1..220 by `LayerNaming.OPTIONS`). `upper_fd` and `work_fd`: empty
    directories of one file system and one mount. By anything but descriptors, the layers lie on mounts of this process's
    own mount namespace. `user_marks`: with marks that an ordinary user can set, and without
    redirects, as in a user namespace. The mount is `nodev`, `noatime` and `volatile`: making bytes durable is the repository's work,
    and without it an unmount would write back everything dirty (0.24 ms against 184 ms with 100 MiB dirty).
    Raises OSError (ENOSPC: see `_check_whole`); nothing is left behind.
    """
    if naming is LayerNaming.OPTIONS:
        mount = _by_options(lower_fds, upper_fd, work_fd, user_marks)
    else:
        mount = _by_parameters(lower_fds, upper_fd, work_fd, naming, user_marks)
    try:
        _check_whole(mount, upper_fd)
    except BaseException:
        os.close(mount)
        raise
    return mount


def _by_parameters(lower_fds: Sequence[int], upper_fd: int, work_fd: int, naming: LayerNaming, user_marks: bool) -> int:
    with closing_fd(sc.call("fsopen", "overlay", sc.FSOPEN_CLOEXEC)) as fs:
        layers = [("lowerdir+", fd) for fd in lower_fds]
        for key, fd in (*layers, ("upperdir", upper_fd), ("workdir", work_fd)):
            if naming is LayerNaming.DESCRIPTOR:
                sc.call("fsconfig", fs, sc.FSCONFIG_SET_FD, key, None, fd)
            else:
                sc.call("fsconfig", fs, sc.FSCONFIG_SET_STRING, key, f"{_DESCRIPTORS}/{fd}", 0)
        for key, value in OVERLAY_OPTIONS if user_marks else (_REDIRECTS, *OVERLAY_OPTIONS):
            sc.call("fsconfig", fs, sc.FSCONFIG_SET_STRING, key, value, 0)
        for flag in ("volatile", *(("userxattr",) if user_marks else ())):
            sc.call("fsconfig", fs, sc.FSCONFIG_SET_FLAG, flag, None, 0)
        sc.call("fsconfig", fs, sc.FSCONFIG_CMD_CREATE, None, None, 0)
        return sc.call("fsmount", fs, sc.FSMOUNT_CLOEXEC, sc.MOUNT_ATTR_NODEV | sc.MOUNT_ATTR_NOATIME)


def _by_options(lower_fds: Sequence[int], upper_fd: int, work_fd: int, user_marks: bool) -> int:
    """Mounted at a directory of its own for as long as it takes to clone it."""
    lowers = ":".join(f"{_DESCRIPTORS}/{fd}" for fd in lower_fds)
    upper = (("upperdir", f"{_DESCRIPTORS}/{upper_fd}"), ("workdir", f"{_DESCRIPTORS}/{work_fd}"))
    named = [f"{key}={value}" for key, value in (("lowerdir", lowers), *upper, *OVERLAY_OPTIONS)]
    options = ",".join((*named, "volatile", "userxattr" if user_marks else "=".join(_REDIRECTS))).encode()
    if len(options) >= _OPTIONS_BYTES:
        raise OSError(errno.E2BIG, f"overlay: {number_of(len(lower_fds), 'layer')} do not fit into one page of options")
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
    if os.fstatvfs(mount).f_flag & os.ST_RDONLY or free_bytes(upper_fd) < _OVERLAY_NEEDS_BYTES:
        raise OSError(errno.ENOSPC, "overlay: no space for its work directory")


def clone(
    dir_fd: int, path: bytes | str = b"", *, recursive: bool = False, attributes: int = 0, userns_fd: int = 0
) -> int:
    """A detached copy of the mount at `path` below `dir_fd` (the directory itself if empty), with these attributes of
    mount_setattr(2). Returns its descriptor."""
    flags = sc.OPEN_TREE_CLONE | sc.OPEN_TREE_CLOEXEC | (sc.AT_RECURSIVE if recursive else 0)
    fd = sc.call("open_tree", dir_fd, path, flags | (0 if path else sc.AT_EMPTY_PATH))
    try:
        if attributes:
            _set_attributes(fd, b"", sc.AT_EMPTY_PATH, sc.MountAttr(attributes, 0, 0, userns_fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _set_attributes(mount_fd: int, path: bytes, flags: int, attr: sc.MountAttr) -> None:
    sc.call("mount_setattr", mount_fd, path, flags, ctypes.byref(attr), ctypes.sizeof(attr))


def id_mapped_clone(dir_fd: int, userns_fd: int) -> int:
    """A detached clone of a directory's mount whose ids are shifted by the user namespace. Returns its descriptor.

    Upper and work must come from one clone of their parent, or overlayfs refuses them.
    """
    return clone(dir_fd, attributes=sc.MOUNT_ATTR_IDMAP, userns_fd=userns_fd)


def read_only_file(file_fd: int) -> int:
    """A detached mount of one file (O_PATH), read-only, nosuid, nodev and noexec. Returns its descriptor."""
    strict = sc.MOUNT_ATTR_RDONLY | sc.MOUNT_ATTR_NOSUID | sc.MOUNT_ATTR_NODEV | sc.MOUNT_ATTR_NOEXEC
    return clone(file_fd, attributes=strict)


def seal_here() -> None:
    """Make the mount at "/" of the calling thread's mount namespace read-only, for good.

    Raises OSError EBUSY while any file is open for writing through it, shared writable mappings included; then nothing
    changed.
    """
    _set_attributes(sc.AT_FDCWD, b"/", 0, sc.MountAttr(sc.MOUNT_ATTR_RDONLY, 0, 0, 0))


def unseal_here() -> None:
    """Undo `seal_here`, for the case that a later step of the pivot failed."""
    _set_attributes(sc.AT_FDCWD, b"/", 0, sc.MountAttr(0, sc.MOUNT_ATTR_RDONLY, 0, 0))


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
    return re.sub(rb"\\([0-3][0-7]{2})", lambda found: bytes((int(found[1], 8),)), field)


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


def file_system_id(fd: int) -> str | None:
    """The identifier of a file system, which it keeps over remounts, on other devices and over restarts, as text. None: it
    tells none.

    `f_fsid` comes from the identifier that mkfs wrote on ext4 and Btrfs (there of the subvolume), but from the number
    of the device on XFS, FAT and others, so XFS is asked in its own way. An overlay passes on what its upper layer
    says, unless it has an identifier of its own, and NFS and FUSE say nothing. A tmpfs is gone with its mount.
    """
    kind = file_system_kind(fd)
    if kind in _WITH_OWN_FSID:
        return f"{os.fstatvfs(fd).f_fsid:x}"
    if kind != _XFS:
        return None
    geometry = bytearray(_XFS_GEOMETRY_BYTES)
    try:
        fcntl.ioctl(fd, _XFS_IOC_FSGEOMETRY_V1, geometry)
    except OSError:
        return None
    return geometry[64:80].hex()


def holds_no_files(fd: int) -> bool:
    """True for a descriptor on a file system in which the kernel shows its own state, and processes theirs."""
    return file_system_kind(fd) in _OF_THE_KERNEL


def file_system_kind(fd: int) -> int:
    """The kernel's number for the kind of file system that a descriptor is on (statfs(2), `f_type`)."""
    facts = (ctypes.c_long * 32)()
    sc.call("fstatfs", fd, facts)
    return int(facts[0] & 0xFFFFFFFF)


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
            number, _, device, root, point, *_ = left.split(b" ")
            fs_type, source, *options = right.rstrip(b"\n").split(b" ")
            text = b"".join(options[:1])
            place = device.decode(), _unescape(root), _unescape(point)
            result.append(MountPoint(int(number), *place, fs_type.decode(), _unescape(source), text))
    return result
