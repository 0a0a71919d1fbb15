"""Project quotas: limits for the disk use below a directory. XFS and ext4 keep them alike, where they are mounted with
`prjquota`.

Source: quotactl(2), ioctl_fs(2) FS_IOC_FSSETXATTR, linux/dqblk_xfs.h. Descriptors are those of directories opened for
reading.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import struct
from dataclasses import dataclass

from snapshotd.kernel import syscalls as sc

_FS_IOC_FSGETXATTR, _FS_IOC_FSSETXATTR = 0x801C581F, 0x401C5820
_FSXATTR = struct.Struct("=5I8s")
"""struct fsxattr: flags, two sizes and a count between them, the project, a size."""
_PROJINHERIT = 0x200
_PRJQUOTA = 2
_Q_XGETQUOTA, _Q_XSETQLIM, _Q_XGETQSTATV = 0x5803, 0x5804, 0x5808
_DISK_QUOTA = struct.Struct("=bbHIQQQQQQiiHHbbbbQQQiHh8s")
"""struct fs_disk_quota; blocks are of 512 bytes."""
_VERSION, _PROJ_QUOTA = 1, 2
_HARD_LIMITS = 1 << 1 | 1 << 3
_ENFORCED = 1 << 5
_STATV_BYTES = 160


@dataclass(frozen=True, slots=True)
class Used:
    """The disk use of a project."""

    bytes: int
    inodes: int


def enforces_limits(fd: int) -> bool:
    """True if the file system enforces project limits."""
    state = ctypes.create_string_buffer(b"\1", _STATV_BYTES)  # the answer's version
    try:
        _quotactl(fd, _Q_XGETQSTATV, 0, state)
    except OSError:
        return False  # no quotas in this kernel, on this file system, or switched on at its mount
    return bool(struct.unpack_from("=H", state, 2)[0] & _ENFORCED)


def join(fd: int, project: int) -> None:
    """Count a directory, and new entries in it from now on, to a project. OSError."""
    flags, size, extents, _, cow, rest = _FSXATTR.unpack(fcntl.ioctl(fd, _FS_IOC_FSGETXATTR, b"\0" * _FSXATTR.size))
    fcntl.ioctl(fd, _FS_IOC_FSSETXATTR, _FSXATTR.pack(flags | _PROJINHERIT, size, extents, project, cow, rest))


def read_use(fd: int, project: int) -> Used:
    """The disk use of a project on the file system that holds `fd`. OSError."""
    answer = ctypes.create_string_buffer(_DISK_QUOTA.size)
    try:
        _quotactl(fd, _Q_XGETQUOTA, project, answer)
    except OSError as exc:
        if exc.errno in (errno.ENOENT, errno.ESRCH):
            return Used(0, 0)  # the file system does not know the project
        raise
    values = _DISK_QUOTA.unpack(answer.raw)
    return Used(values[8] * 512, values[9])


def limit(fd: int, project: int, size_bytes: int, inodes: int) -> None:
    """Set the limits of a project. A write beyond them fails with ENOSPC (XFS) or EDQUOT (ext4). OSError."""
    blocks = size_bytes // 512
    values = (_VERSION, _PROJ_QUOTA, _HARD_LIMITS, project, blocks, 0, inodes, *[0] * 17, b"")
    _quotactl(fd, _Q_XSETQLIM, project, ctypes.create_string_buffer(_DISK_QUOTA.pack(*values), _DISK_QUOTA.size))


def _quotactl(fd: int, command: int, project: int, buffer: ctypes.Array[ctypes.c_char]) -> None:
    sc.call("quotactl_fd", fd, command << 8 | _PRJQUOTA, project, ctypes.byref(buffer))
