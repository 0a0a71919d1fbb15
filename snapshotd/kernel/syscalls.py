"""The system calls that Python does not wrap, by number. Every failure is an OSError with the call's name.

Numbers are from the kernel's syscall tables; calls from 424 on have one number on all architectures.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Callable
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

_COMMON = {
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "clone3": 435,
    "openat2": 437,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
}
_BY_MACHINE = {
    "x86_64": {
        "bpf": 321,
        "clone": 56,
        "pivot_root": 155,
        "setns": 308,
        "umount2": 166,
        "renameat2": 316,
        "syncfs": 306,
        "unshare": 272,
        "mount": 165,
        "statx": 332,
        "fallocate": 285,
        "keyctl": 250,
        "seccomp": 317,
        "capset": 126,
        "setgroups": 116,
        "fstatfs": 138,
        "fanotify_init": 300,
        "fanotify_mark": 301,
        "open_by_handle_at": 304,
    },
    "aarch64": {
        "bpf": 280,
        "clone": 220,
        "pivot_root": 41,
        "setns": 268,
        "umount2": 39,
        "renameat2": 276,
        "syncfs": 267,
        "unshare": 97,
        "mount": 40,
        "statx": 291,
        "fallocate": 47,
        "keyctl": 219,
        "seccomp": 277,
        "capset": 91,
        "setgroups": 159,
        "fstatfs": 44,
        "fanotify_init": 262,
        "fanotify_mark": 263,
        "open_by_handle_at": 265,
    },
}
NUMBERS: dict[str, int] = {**_COMMON, **_BY_MACHINE.get(platform.machine(), {})}

AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000
CLONE_FS = 0x200
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWNS = 0x20000
CLONE_NEWUSER = 0x10000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWNET = 0x40000000
MNT_DETACH = 2
MS_REC, MS_SLAVE, MS_BIND, MS_REMOUNT, MS_RDONLY = 0x4000, 1 << 19, 0x1000, 0x20, 1
MS_NOATIME, MS_NODEV, MS_NOSUID = 1024, 4, 2
OPEN_TREE_CLONE = 1
OPEN_TREE_CLOEXEC = 0x80000
FSOPEN_CLOEXEC = 1
FSMOUNT_CLOEXEC = 1
FSCONFIG_SET_STRING, FSCONFIG_SET_FD, FSCONFIG_SET_FLAG, FSCONFIG_CMD_CREATE = 1, 5, 0, 6
MOVE_MOUNT_F_EMPTY_PATH = 4
MOVE_MOUNT_T_EMPTY_PATH = 0x40
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC = 1, 2, 4, 8
MOUNT_ATTR_NOATIME, MOUNT_ATTR_IDMAP = 0x10, 0x00100000
RESOLVE_NO_XDEV, RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH, RESOLVE_IN_ROOT = 1, 2, 4, 8, 16
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
STATX_BTIME, STATX_MNT_ID = 0x800, 0x1000
KEYCTL_JOIN_SESSION_KEYRING = 1
_CAPABILITIES_VERSION = 0x20080522


class MountAttr(ctypes.Structure):
    _fields_ = [(n, ctypes.c_uint64) for n in ("attr_set", "attr_clr", "propagation", "userns_fd")]


class OpenHow(ctypes.Structure):
    _fields_ = [(n, ctypes.c_uint64) for n in ("flags", "mode", "resolve")]


class Statx(ctypes.Structure):
    """The kernel's answer, with the time of birth and the mount's id alone (include/uapi/linux/stat.h)."""

    _fields_ = [
        ("mask", ctypes.c_uint32),
        ("before", ctypes.c_ubyte * 76),
        ("birth_s", ctypes.c_int64),
        ("birth_ns", ctypes.c_uint32),
        ("between", ctypes.c_ubyte * 52),
        ("mnt_id", ctypes.c_uint64),
        ("after", ctypes.c_ubyte * 104),
    ]


def _convert(arg: object) -> Any:
    if arg is None or isinstance(arg, int):
        return ctypes.c_long(arg or 0)
    if isinstance(arg, str | bytes):
        return ctypes.c_char_p(os.fsencode(arg))
    return arg


def call(name: str, *args: object) -> int:
    """Issue a system call. Integers, bytes, str (fs-encoded), None (NULL) and ctypes references are accepted.

    Returns the call's result (>= 0). Raises OSError with errno and the call's name; NotImplementedError on an unknown
    machine.
    """
    number = NUMBERS.get(name)
    if number is None:
        raise NotImplementedError(f"{name}: no system call number for {platform.machine()}")
    result: int = _libc.syscall(ctypes.c_long(number), *[_convert(a) for a in args])
    if result < 0:
        err = ctypes.get_errno()
        raise OSError(err, f"{name}: {os.strerror(err)}")
    return result


def prctl(option: int, value: int) -> None:
    """prctl(2) with one argument. Raises OSError."""
    function: Callable[..., int] = _libc.prctl
    if function(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        err = ctypes.get_errno()
        raise OSError(err, f"prctl({option}): {os.strerror(err)}")


def set_capabilities(effective: int, permitted: int, inheritable: int) -> None:
    """capset(2) for this thread: three sets of bits. Raises OSError."""
    header, sets = struct.pack("Ii", _CAPABILITIES_VERSION, 0), (effective, permitted, inheritable)
    low, high = (struct.pack("III", *(bits >> shift & 0xFFFFFFFF for bits in sets)) for shift in (0, 32))
    call("capset", header, low + high)


PR_SET_CHILD_SUBREAPER = 36
PR_SET_SECUREBITS = 28
SECBIT_NO_SETUID_FIXUP = 4
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38
