"""Acting on files as another user, in one thread: the kernel then decides what may be read and written."""

from __future__ import annotations

import array
import contextlib
import ctypes
import os
import pwd
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from snapshotd.kernel import syscalls as sc

_libc = ctypes.CDLL(None)
_SO_PEERGROUPS = 59
_MOST_GROUPS = 256
"""The most for which Python has a buffer."""
_PEER = struct.Struct("=iII")
_own = threading.local()


@dataclass(frozen=True, slots=True)
class HostUser:
    """A user of this machine, with all its groups."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()

    @staticmethod
    def of(uid: int) -> HostUser:
        """The user as the machine's databases know it. KeyError: they do not."""
        entry = pwd.getpwuid(uid)
        return HostUser(uid, entry.pw_gid, tuple(os.getgrouplist(entry.pw_name, entry.pw_gid)))


def peer(connection: socket.socket) -> tuple[int, HostUser]:
    """Process id and user of the process that connected a unix socket, as the kernel noted them then. OSError."""
    pid, uid, gid = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    groups = array.array("I")
    groups.frombytes(connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MOST_GROUPS * groups.itemsize))
    return pid, HostUser(uid, gid, tuple(groups))


@contextlib.contextmanager
def acting_as(user: HostUser) -> Iterator[None]:
    """Inside, this thread opens, makes and removes files as `user` does, without a capability that it lacks (setfsuid(2)).

    Other threads keep their rights: the call that sets the groups is the kernel's own, which counts for one thread,
    and not the C library's. `/proc/self` cannot be used inside. Nothing changes for root. Cost: six system calls.
    """
    if user.uid == 0 or getattr(_own, "acting", False):
        yield
        return
    before = os.getgroups()
    _set_groups(user.groups)
    _own.acting = True
    try:
        _libc.setfsgid(user.gid)
        _libc.setfsuid(user.uid)
        if _libc.setfsuid(-1) != user.uid:
            raise PermissionError(f"this process may not act as the user {user.uid}")
        yield
    finally:
        _libc.setfsuid(os.geteuid())
        _libc.setfsgid(os.getegid())
        _set_groups(before)
        _own.acting = False


def _set_groups(groups: Sequence[int]) -> None:
    """The groups of this thread alone."""
    sc.call("setgroups", len(groups), (ctypes.c_uint * len(groups))(*groups) if groups else None)
