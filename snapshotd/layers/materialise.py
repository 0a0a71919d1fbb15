"""Write a view into a directory, with everything that can be kept: modes, owners, times, attributes, links, holes, special nodes.

The tree is an attacker's and the target is the host's: everything goes through directory descriptors, nothing is followed, nothing that
exists is opened. What comes out is exact, set-user-id programs and device nodes included; whoever restores must keep others away from it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from snapshotd.errors import OutOfSpace
from snapshotd.kernel.files import fd_path, is_empty_dir, open_dir
from snapshotd.layers.base import Child, Entry, RestoreReport
from snapshotd.layers.lookup import Handles, Node, entry_path
from snapshotd.layers.view import Directory, View, join
from snapshotd.types import Kind

MAX_WARNINGS = 1000
"""More than these are counted, not listed."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_CANNOT_HOLD = (
    errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENAMETOOLONG, errno.EOPNOTSUPP, errno.ENOSYS, errno.EILSEQ, errno.EFBIG,
    errno.EMLINK, errno.EEXIST, errno.E2BIG, errno.ERANGE, errno.EOVERFLOW,
)  # fmt: skip
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DEVICE_TYPES = {Kind.CHAR_DEVICE: stat.S_IFCHR, Kind.BLOCK_DEVICE: stat.S_IFBLK}


def materialise(view: View, path: bytes, target_fd: int) -> RestoreReport:
    """Write the directory `path` of `view` into the empty directory `target_fd`, which gets its metadata, too.

    File data is reflinked where both lie on one file system that can, else copied without filling holes. Names of one hard link group
    are linked again. What the target cannot hold (a name, an owner, an attribute, a time's precision, sockets) becomes a warning that
    names the path; the rest is written. Not durable on return.
    Raises FileNotFoundError, NotADirectoryError (of `path`), ValueError (target not empty), OutOfSpace, DataLoss, OSError (EIO).
    On an error the target holds a part. Nobody else may write to the target meanwhile.
    """
    if not is_empty_dir(target_fd):
        raise ValueError("the target directory is not empty")
    writer = _Writer(view)
    try:
        return writer.write(path, target_fd)
    finally:
        writer.close()


@dataclass(frozen=True, slots=True)
class _Frame:
    """A directory being written."""

    path: bytes
    source: Directory
    target: Node
    children: Iterator[Child]


class _Writer:
    def __init__(self, view: View) -> None:
        self._view = view
        self._out = Handles()
        self._links: dict[tuple[int, int], tuple[Node, bytes]] = {}
        self._warnings: list[str] = []
        self._unlisted = 0
        self._files = self._directories = self._bytes = 0

    def close(self) -> None:
        self._out.close()

    def write(self, path: bytes, target_fd: int) -> RestoreReport:
        source = self._view.directory(path)
        stack = [_Frame(b"", source, self._out.add_root(target_fd), iter(self._view.children(source)))]
        while stack:
            frame = stack[-1]
            child = next(frame.children, None)
            if child is None:
                stack.pop()
                self._finish_dir(frame)
                continue
            child_path = join(frame.path, child.name)
            if child.entry.kind is not Kind.DIRECTORY:
                self._files += self._attempt(child_path, partial(self._write_node, frame, child))
            elif self._attempt(child_path, partial(self._make_dir, frame, child)):
                self._directories += 1
                stack.append(self._open_dir(frame, child, child_path))
        if self._unlisted:
            self._warnings.append(f"{self._unlisted} more warnings are not listed.")
        return RestoreReport(self._files, self._directories, self._bytes, tuple(self._warnings))

    # -- entries ---------------------------------------------------------------------------------------------------------------

    def _make_dir(self, frame: _Frame, child: Child) -> bool:
        os.mkdir(child.name, 0o700, dir_fd=self._out.fd(frame.target))
        return True

    def _open_dir(self, frame: _Frame, child: Child, path: bytes) -> _Frame:
        target = self._out.adopt(frame.target, child.name, open_dir(self._out.fd(frame.target), child.name))
        source = self._view.enter(frame.source, child.name)
        return _Frame(path, source, target, iter(self._view.children(source)))

    def _finish_dir(self, frame: _Frame) -> None:
        """Metadata comes last: writing into the directory has changed its time."""
        path = fd_path(self._out.fd(frame.target))
        xattrs = self._read_xattrs(frame.path, lambda: self._view.directory_xattrs(frame.source))
        self._apply(frame.path, path, self._view.entry_of(frame.source), xattrs)

    def _write_node(self, frame: _Frame, child: Child) -> bool:
        """Create anything but a directory. False if it was left out on purpose."""
        path, entry = join(frame.path, child.name), child.entry
        if entry.kind is Kind.SOCKET:
            self._warn(path, "is a socket, which only its program can make")
            return False
        if entry.nlink > 1 and self._link(frame, child):
            return True
        fd = self._out.fd(frame.target)
        if entry.kind is Kind.FILE:
            self._write_file(path, child, fd)
        elif entry.kind is Kind.SYMLINK:
            os.symlink(self._view.readlink_of(child), child.name, dir_fd=fd)
            self._apply(path, entry_path(fd, child.name), entry, self._read_xattrs(path, lambda: self._view.xattrs_of(child)))
        else:
            self._write_special(path, child, fd)
        if entry.nlink > 1:
            self._links[entry.inode] = (frame.target, child.name)
        return True

    def _link(self, frame: _Frame, child: Child) -> bool:
        """Make the name a link to the one written before. False if there is none, or no link can be made."""
        first = self._links.get(child.entry.inode)
        if first is None:
            return False
        source_fd = os.dup(self._out.fd(first[0]))
        try:
            target_fd = self._out.fd(frame.target)
            os.link(first[1], child.name, src_dir_fd=source_fd, dst_dir_fd=target_fd, follow_symlinks=False)
        except OSError as exc:
            if exc.errno not in (errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP):
                raise
            self._warn(join(frame.path, child.name), f"became a copy of its own, not a hard link ({exc.strerror})")
            return False
        finally:
            os.close(source_fd)
        return True

    def _write_file(self, path: bytes, child: Child, dir_fd: int) -> None:
        fd = os.open(child.name, _NEW_FILE, 0o600, dir_fd=dir_fd)
        try:
            size = self._view.copy_child(child, fd)
            xattrs = self._read_xattrs(path, lambda: self._view.xattrs_of(child))
            self._apply(path, fd_path(fd), child.entry, xattrs)
        except OSError:
            os.unlink(child.name, dir_fd=dir_fd)
            raise
        finally:
            os.close(fd)
        self._bytes += size

    def _write_special(self, path: bytes, child: Child, dir_fd: int) -> None:
        entry = child.entry
        if entry.kind is Kind.FIFO:
            os.mkfifo(child.name, 0o600, dir_fd=dir_fd)
        elif entry.rdev == 0:  # in a layer a character device 0:0 would delete the name
            raise OSError(errno.EINVAL, "device number 0:0")
        else:
            os.mknod(child.name, _DEVICE_TYPES[entry.kind] | 0o600, entry.rdev, dir_fd=dir_fd)
        xattrs = self._read_xattrs(path, lambda: self._view.xattrs_of(child))
        fd = os.open(child.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
        try:
            self._apply(path, fd_path(fd), entry, xattrs)
        finally:
            os.close(fd)

    # -- metadata --------------------------------------------------------------------------------------------------------------

    def _read_xattrs(self, path: bytes, read: Callable[[], dict[bytes, bytes]]) -> dict[bytes, bytes]:
        try:
            return read()
        except OSError as exc:
            if exc.errno != errno.E2BIG:
                raise
            self._warn(path, "lost its extended attributes, which are more than can be listed")
            return {}

    def _apply(self, path: bytes, target: str | bytes, entry: Entry, xattrs: dict[bytes, bytes]) -> None:
        """Owner, mode, attributes, time, in this order: chown clears set-user-id and capabilities, all of them change the ctime only."""
        link = entry.kind is Kind.SYMLINK
        self._try(path, "owner", lambda: os.chown(target, entry.uid, entry.gid, follow_symlinks=not link))
        if not link:
            self._try(path, "mode", lambda: os.chmod(target, entry.mode))
        for name, value in xattrs.items():
            shown = f"extended attribute {os.fsdecode(name)!r}"
            self._try(path, shown, partial(os.setxattr, target, name, value, follow_symlinks=not link), *_NO_ROOM)
        times = (entry.mtime_ns, entry.mtime_ns)
        self._try(path, "time", lambda: os.utime(target, ns=times, follow_symlinks=not link))
        st = os.stat(target, follow_symlinks=not link)
        got = (st.st_uid, st.st_gid, st.st_mtime_ns, entry.mode if link else stat.S_IMODE(st.st_mode))
        if got != (entry.uid, entry.gid, entry.mtime_ns, entry.mode):
            self._warn(path, "has another owner, mode or time than in the snapshot, because the target cannot hold it")

    def _try(self, path: bytes, what: str, action: Callable[[], object], *more: int) -> None:
        """One piece of metadata that may be lost. `more`: errors that also mean "cannot hold" (a full disk, where one value is too big)."""
        try:
            action()
        except OSError as exc:
            if exc.errno not in (*_CANNOT_HOLD, *more):
                raise
            self._warn(path, f"lost its {what} ({exc.strerror})")

    def _attempt(self, path: bytes, action: Callable[[], bool]) -> bool:
        """Whether `action` wrote the entry; a warning says what the target could not hold."""
        try:
            return action()
        except OSError as exc:
            if exc.errno in _NO_ROOM:
                raise OutOfSpace(f"cannot restore {_shown(path)}: the target's disk is full; free space or choose another target") from exc
            if exc.errno not in _CANNOT_HOLD:
                raise
            self._warn(path, f"was left out, because the target cannot hold it ({exc.strerror})")
            return False

    def _warn(self, path: bytes, what: str) -> None:
        if len(self._warnings) < MAX_WARNINGS:
            self._warnings.append(f"{_shown(path)} {what}.")
        else:
            self._unlisted += 1


def _shown(path: bytes) -> str:
    """A path for people: printable whatever its bytes are, and not endless."""
    text = ascii(os.fsdecode(path or b"."))
    return text if len(text) <= 300 else text[:150] + "..." + text[-147:]
