"""Telling whether files were touched, without a look at them: marks on single inodes (fanotify(7), Linux 5.1).

A mark follows the inode, so a write through any name of a file and any mount of its file system is told, also through
one that is made later. The kernel tells of a change before the call that makes it returns. One thing it does not tell:
writes through a shared mapping. A process with one keeps the file open for writing, which the kernel tells at the opening
and at the end, and which `has_writer` asks for in between.

Sources: fanotify(7), fcntl(2) (`F_SETLEASE`), linux/fanotify.h.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from snapshotd.kernel import syscalls as sc
from snapshotd.kernel.mounts import file_system_kind

_CLOEXEC, _NONBLOCK, _REPORT_FID, _UNLIMITED_MARKS = 1, 2, 0x200, 0x20
_REPORT_NAMES = 0x400 | 0x800
"""Events name the directory and the entry in it (Linux 5.9)."""
_ADD, _REMOVE = 1, 2
_ACCESS = 1
_MODIFY, _ATTRIB, _CLOSE_WRITE, _OPEN = 2, 4, 8, 0x20
_NAMES = 0x40 | 0x80 | 0x100 | 0x200
"""A name in a directory came or went: moved from, moved to, created, deleted."""
_SELF_GONE = 0x400 | 0x800
_OVERFLOW, _ONDIR, _ON_CHILD = 0x4000, 0x40000000, 0x08000000
_INFO_NAMED = 2
OF_FILE = _MODIFY | _ATTRIB | _CLOSE_WRITE | _OPEN | _SELF_GONE
OF_DIRECTORY = _ATTRIB | _NAMES | _SELF_GONE | _ONDIR
OF_LINK = _ATTRIB | _SELF_GONE
_EVENT = struct.Struct("=IBBHQii")
_HANDLE_AT = 12
"""Where a file handle is in the record beside an event: after its header and the file system's id."""
_READ_BYTES = 1 << 17
_LOCAL = (0xEF53, 0x58465342, 0x9123683E, 0x01021994)
"""Ext4, XFS, Btrfs, tmpfs (linux/magic.h): no other machine writes to them, and all writes pass the kernel's files."""


@dataclass(slots=True)
class InodeEvents:
    """The events that were waiting. `opened`: handles of files that others opened. `lost`: there were more than the
    kernel keeps."""

    changed: bool = False
    names: bool = False
    lost: bool = False
    opened: set[bytes] = field(default_factory=set)


class _Marks:
    """A group of marks, until `close`. OSError: the kernel gives none. Not thread-safe."""

    _report: int

    def __init__(self) -> None:
        flags = _CLOEXEC | _NONBLOCK | self._report | _UNLIMITED_MARKS
        self._fd = sc.call("fanotify_init", flags, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._fd)

    def fileno(self) -> int:
        return self._fd

    def _change(self, action: int, fd: int, mask: int) -> None:
        sc.call("fanotify_mark", self._fd, action, mask, sc.AT_FDCWD, f"/proc/self/fd/{fd}")

    def _events(self) -> Iterator[tuple[int, int, bytes]]:
        """The events that wait, each as its mask, the process, and the record beside it."""
        while True:
            try:
                data = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                return
            at = 0
            while at < len(data):
                length, _, _, head, mask, _, pid = _EVENT.unpack_from(data, at)
                yield mask, pid, data[at + head : at + length]
                at += length


class InodeMarks(_Marks):
    """Marks on single inodes, of files and of directories."""

    _report = _REPORT_FID

    def add(self, fd: int, mask: int) -> None:
        """Mark the inode of a descriptor (of any kind, O_PATH too). OSError: its file system has no marks."""
        self._change(_ADD, fd, mask)

    def has(self, fd: int) -> bool:
        """True if the inode of a descriptor is marked. Marks keep no file system mounted, and go with it without an event.
        OSError."""
        try:  # no mark has this event, so nothing is taken from it
            self._change(_REMOVE, fd, _ACCESS)
        except FileNotFoundError:
            return False
        return True

    def read(self) -> InodeEvents:
        """All events that wait, but for openings by this process."""
        told, own = InodeEvents(), os.getpid()
        for mask, pid, record in self._events():
            told.lost |= bool(mask & _OVERFLOW)
            told.changed |= bool(mask & ~_OPEN)
            told.names |= bool(mask & (_NAMES | _SELF_GONE))
            if mask & _OPEN and pid != own:
                told.opened.add(record[_HANDLE_AT:])
        return told


@dataclass(frozen=True, slots=True)
class Touch:
    """One event of a directory: the process, the directory's handle, and the entry (b"": the directory itself).
    `is_name`: the name came or went; `is_dir`: it is a directory's. `lost`: there were more events than the kernel
    keeps."""

    pid: int
    handle: bytes
    name: bytes
    is_name: bool
    is_dir: bool
    lost: bool = False


class NameMarks(_Marks):
    """Marks on directories, which tell who changed which entry. Events of two processes are never one."""

    MASK = _MODIFY | _ATTRIB | _CLOSE_WRITE | _NAMES | _ONDIR | _ON_CHILD
    _report = _REPORT_NAMES

    def add(self, fd: int) -> None:
        """Mark the directory of a descriptor. OSError: its file system has no marks."""
        self._change(_ADD, fd, self.MASK)

    def read(self) -> Iterator[Touch]:
        """The events that wait, but those of this process."""
        own = os.getpid()
        for mask, pid, record in self._events():
            if mask & _OVERFLOW:
                yield Touch(0, b"", b"", False, False, lost=True)
            elif pid != own and record[:1] == bytes((_INFO_NAMED,)):
                size = int.from_bytes(record[_HANDLE_AT : _HANDLE_AT + 4], sys.byteorder)
                end = _HANDLE_AT + 8 + size
                name = record[end:].split(b"\0", 1)[0]
                name = b"" if name == b"." else name
                yield Touch(pid, record[_HANDLE_AT:end], name, bool(mask & _NAMES), bool(mask & _ONDIR))


def open_directory(root: int, handle: bytes) -> int:
    """Hold the directory of a handle, on the mount of `root` (O_PATH). OSError: it is gone."""
    return _open(root, handle, os.O_PATH | os.O_DIRECTORY)


def _open(root: int, handle: bytes, flags: int) -> int:
    buffer = ctypes.create_string_buffer(handle, len(handle))
    return sc.call("open_by_handle_at", root, buffer, flags | os.O_CLOEXEC)


def is_local(fd: int) -> bool:
    """True for a file on a file system of a kind whose changes the kernel tells completely."""
    return file_system_kind(fd) in _LOCAL


def has_writer(fd: int) -> bool:
    """True if any process has the regular file open for writing, or mapped so. `fd` is open for reading alone. OSError:
    its file system does not tell.

    The kernel grants a lease for reading only where there is no writer (fcntl(2)). It is given back at once; a writer
    that comes in between waits so long. Its signal is one that processes ignore.
    """
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as exc:
        if exc.errno == errno.EAGAIN:
            return True
        raise
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def open_handle(root: int, handle: bytes) -> int:
    """Open the file of a handle, on the mount of `root`, for reading. FileNotFoundError: it is gone. OSError."""
    try:
        return _open(root, handle, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as exc:
        if exc.errno == errno.ESTALE:
            raise FileNotFoundError(exc.errno, "the file is gone") from exc
        raise
