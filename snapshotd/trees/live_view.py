"""The files of a running sandbox as a view: what its processes see, while they change it.

Everything is looked up from a directory that is held, one component at a time. Links are not followed and mounts are
not entered, so nothing leads out. A mount shows as no snapshot has it: a directory that is empty, and a file
that is not there. A file is opened only when it is a regular one, and without waiting for a lease that somebody holds.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

from snapshotd.errors import LimitExceeded
from snapshotd.kernel import files, turns
from snapshotd.trees.base import Child, Entry
from snapshotd.trees.lookup import Handles, Node
from snapshotd.trees.view import Directory, PathCache, View, split
from snapshotd.types import IdMap, Kind

MOST_NAMES = 1_000_000
"""Entries that one directory is read with: a listing is held in memory."""
_NOBODY = 65534
_HOLD = os.O_PATH | os.O_NOFOLLOW
_MOUNTED = Node(None, b"", 0, (0, 0))
"""Stands for every directory on which something is mounted."""
_MOUNT_POINT = Entry(Kind.DIRECTORY, 0o755, 0, 0, 0, 0, 0, 1, (0, 0), 0)


class LiveView(View):
    """`root_fd` stays the caller's. An entry that vanishes between a listing and a look at it was never there; a
    directory that is moved meanwhile may give ESTALE."""

    live = True

    def __init__(self, root_fd: int, id_map: IdMap | None = None, closed: Callable[[], object] = lambda: None) -> None:
        """`id_map`: of the container, whose ids the files have from outside. `closed` is called once, at the first
        `close`."""
        self._id_map = id_map
        self._handles = Handles()
        self._root = self._handles.add_root(root_fd)
        self._paths = PathCache(self._root, self.enter)
        self._closing.callback(closed)
        self._closing.callback(self._handles.close)

    def directory(self, path: bytes = b"") -> Directory:
        found: Node = self._paths.resolve(split(path))
        return found

    def children(self, directory: Directory) -> tuple[Child, ...]:
        if directory is _MOUNTED:
            return ()
        fd = self._handles.fd(directory)
        with os.scandir(fd) as listed:
            names = [os.fsencode(entry.name) for entry in islice(listed, MOST_NAMES + 1)]
        if len(names) > MOST_NAMES:
            raise LimitExceeded(
                f"a directory of the sandbox has more than {MOST_NAMES} entries; look at it with a command inside"
            )
        found = []
        for name in sorted(names):
            turns.give_way()
            try:
                found.append(self._child(fd, directory, name))
            except OSError as exc:
                if exc.errno not in (errno.ENOENT, errno.EXDEV):
                    raise
        return tuple(found)

    def find(self, directory: Directory, name: bytes) -> Child:
        if directory is _MOUNTED:
            raise OSError(errno.EXDEV, "something is mounted above it", os.fsdecode(name))
        return self._child(self._handles.fd(directory), directory, name)

    def enter(self, directory: Directory, name: bytes) -> Directory:
        if directory is _MOUNTED:
            raise OSError(errno.EXDEV, "something is mounted above it", os.fsdecode(name))
        try:
            fd = files.open_in_root(self._handles.fd(directory), name, files.DIR_FLAGS)
        except OSError as exc:
            if exc.errno != errno.EXDEV:
                raise
            return _MOUNTED
        return self._handles.adopt(directory, name, fd)

    def entry_of(self, directory: Directory) -> Entry:
        if directory is _MOUNTED:
            return _MOUNT_POINT
        return self._entry(os.fstat(self._handles.fd(directory)))

    def identity(self, directory: Directory) -> tuple[object, ...]:
        return (self, directory)

    def open_child(self, child: Child) -> int:
        with files.closing_fd(files.open_in_root(self._handles.fd(child.source), child.name, _HOLD)) as held:
            return open_regular(held)

    def read_child(self, child: Child, offset: int, length: int) -> bytes:
        with files.closing_fd(self.open_child(child)) as fd:
            return os.pread(fd, length, offset)

    def copy_child(self, child: Child, target_fd: int) -> int:
        with files.closing_fd(self.open_child(child)) as fd:
            return files.copy_data(fd, target_fd, os.fstat(fd).st_size)

    def readlink_of(self, child: Child) -> bytes:
        with files.closing_fd(files.open_in_root(self._handles.fd(child.source), child.name, _HOLD)) as held:
            return os.readlink(b"", dir_fd=held)

    def xattrs_of(self, child: Child) -> dict[bytes, bytes]:
        with files.closing_fd(files.open_in_root(self._handles.fd(child.source), child.name, _HOLD)) as held:
            return self._xattrs(held)

    def directory_xattrs(self, directory: Directory) -> dict[bytes, bytes]:
        return {} if directory is _MOUNTED else self._xattrs(self._handles.fd(directory))

    def _xattrs(self, fd: int) -> dict[bytes, bytes]:
        """Without access lists where the ids in them are not the container's."""
        found = files.read_xattrs(fd)
        return {name: found[name] for name in found if self._id_map is None or not name.startswith(b"system.")}

    def _entry(self, st: os.stat_result) -> Entry:
        entry = Entry.of(st)
        if self._id_map is None:
            return entry
        return replace(entry, uid=self._inside(entry.uid), gid=self._inside(entry.gid))

    def _inside(self, number: int) -> int:
        assert self._id_map is not None
        inside = number - self._id_map.base
        return inside if 0 <= inside < self._id_map.count else _NOBODY

    def _child(self, fd: int, directory: Node, name: bytes) -> Child:
        """The entry `name` of an open directory. OSError EXDEV for a file that is mounted there."""
        if name in (b"", b".", b"..") or b"/" in name:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(name))
        try:
            held = files.open_in_root(fd, name, _HOLD)
        except OSError as exc:
            if exc.errno != errno.EXDEV:
                raise
            st = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if not stat.S_ISDIR(st.st_mode):
                raise
            return Child(name, _MOUNT_POINT, directory)
        with files.closing_fd(held):
            return Child(name, self._entry(os.fstat(held)), directory)


def open_regular(held: int) -> int:
    """A descriptor for reading what `held` (O_PATH) names. OSError: EISDIR, ELOOP (a link), EINVAL (a device, fifo or
    socket), EWOULDBLOCK (somebody holds a lease on it)."""
    mode = os.fstat(held).st_mode
    if not stat.S_ISREG(mode):
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.ELOOP if stat.S_ISLNK(mode) else errno.EINVAL
        raise OSError(code, "not a regular file")
    return os.open(files.fd_path(held), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
