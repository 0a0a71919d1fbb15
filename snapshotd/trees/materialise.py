"""Write a view into a directory, with everything that the target can keep: modes, owners, times, attributes, links,
holes, special nodes.

The tree is an attacker's and the target is the host's: every call goes through directory descriptors, follows no link,
and opens no existing file. The result is exact, set-user-id programs and device nodes included; the user who restores
must keep others away from it.

One thread walks the tree and makes the directories. If the view allows it (`View.parallel`), some more threads make the
files, in batches of one directory: they spend nearly all their time in system calls, decompression and hashing, which
do not hold the interpreter's lock.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

from snapshotd.kernel import turns
from snapshotd.kernel.abilities import TRUSTED, Marks
from snapshotd.kernel.files import closing_fd, drop_xattrs, fd_path, identity_of, is_empty_dir, open_dir, write_all
from snapshotd.trees.base import FORMATS, Child, RestoreReport
from snapshotd.trees.lookup import Handles, Node, entry_path, make_whiteout
from snapshotd.trees.target import ACL_NAMES, Owner, WrittenTree
from snapshotd.trees.view import Directory, View
from snapshotd.types import Kind

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_BATCH_FILES = 128
_BATCH_BYTES = 2 << 20
_WAITING_BATCHES = 16
"""Each holds a descriptor. Enough that no thread waits for the one that walks."""
_OPEN_ENDS = 4096
"""Number of directories that may wait for their metadata."""
_MAX_THREADS = 4


def materialise(
    view: View,
    path: bytes,
    target_fd: int,
    *,
    whiteouts: bool = False,
    marks: Marks = TRUSTED,
    owner: Owner | None = None,
) -> RestoreReport:
    """Write the directory `path` of `view` into the empty directory `target_fd`, which gets its metadata, too.

    File data is reflinked where both lie on one file system that can, else copied without filling holes. Names of one
    hard link group are linked again. Anything that the target cannot hold (a name, an owner, an attribute, a time's
    precision, sockets) becomes a warning that names the path; the rest is written. Not durable on return.
    `whiteouts`: the target is a layer for overlayfs, with these `marks`. Character devices 0:0 are made, which are whiteouts there (and are
    left out with a warning otherwise), and so are sockets, since the layer stands for the tree itself.
    `owner`: the user and group of everything; None: those of the snapshot.
    Raises FileNotFoundError, NotADirectoryError (of `path`), ValueError (target not empty), OutOfSpace, DataLoss,
    OSError (EIO). On an error the target holds a part. The caller keeps others from writing to the target meanwhile.
    Memory: the listings on the way to the current entry, and a few MiB per processor.
    """
    if not is_empty_dir(target_fd):
        raise ValueError("the target directory is not empty")
    # The target's own access list is not the snapshot's, and every new entry would inherit the default one.
    drop_xattrs(target_fd, ACL_NAMES)
    with closing(Writer(view, whiteouts=whiteouts, marks=marks, owner=owner)) as writer:
        return writer.write(path, target_fd)


@dataclass(slots=True)
class _Batch:
    """Regular files of one directory, for another thread to make."""

    children: list[Child] = field(default_factory=list)
    bytes: int = 0


@dataclass(slots=True, eq=False)
class DirectoryFrame:
    """A directory being written."""

    source: Directory
    target: Node
    children: Iterator[Child]
    batch: _Batch = field(default_factory=_Batch)


class Writer:
    """Writes entries of `view` into a target. `whiteouts` as in `materialise`; `threads`: True if several threads may
    make files; `shift`: the number by which ids are higher in the target."""

    def __init__(
        self,
        view: View,
        *,
        whiteouts: bool,
        threads: bool = True,
        shift: int = 0,
        marks: Marks = TRUSTED,
        owner: Owner | None = None,
    ) -> None:
        self._view, self._whiteouts, self._marks = view, whiteouts, marks
        self._target = WrittenTree(owner, shift, marks if whiteouts else None)
        self._out = Handles()
        self._links: dict[tuple[int, int], tuple[Node, bytes]] = {}
        self._files = self._directories = self._bytes = 0
        self._stopped = False
        count = min(len(os.sched_getaffinity(0)), _MAX_THREADS)
        self._pool = ThreadPoolExecutor(count, "materialise") if threads and view.parallel else None
        self._waiting: deque[Future[tuple[int, int]]] = deque()
        self._ends: list[DirectoryFrame] = []

    def close(self) -> None:
        self._stopped = True  # batches close their descriptor, so they are not cancelled
        if self._pool is not None:
            self._pool.shutdown()
        self._out.close()

    def write(self, path: bytes, target_fd: int) -> RestoreReport:
        """The whole directory `path`."""
        source = self._view.directory(path)
        top = self.root(source, target_fd)
        top.children = iter(self._view.children(source))
        stack = [top]
        while stack:
            turns.give_way()
            frame = stack[-1]
            child = next(frame.children, None)
            if child is None:
                stack.pop()
                self._end(frame)
            elif child.entry.kind is Kind.DIRECTORY:
                if self.make_directory(frame, child):
                    stack.append(self._open_dir(frame, child))
            elif self._pool is not None and child.entry.kind is Kind.FILE and child.entry.nlink == 1:
                self._add_to_batch(frame, child)
            else:
                self.write_entry(frame, child)
        self._settle()
        return self.report()

    def report(self) -> RestoreReport:
        """The report of everything written so far."""
        return RestoreReport(self._files, self._directories, self._bytes, self._target.warnings.all())

    # -- one by one, for a caller that walks the tree itself (apply.py), without threads -------------------------------

    def root(self, source: Directory, target_fd: int) -> DirectoryFrame:
        """The target's root, where the directory `source` of the view is written."""
        return DirectoryFrame(source, self._out.add_root(target_fd), iter(()))

    def fd(self, frame: DirectoryFrame) -> int:
        """The descriptor of a directory of the target, valid until the next call of any method here."""
        return self._out.fd(frame.target)

    def enter(self, frame: DirectoryFrame, name: bytes) -> DirectoryFrame:
        """A directory that is there, in the view and in the target. OSError."""
        target = self._out.adopt(frame.target, name, open_dir(self._out.fd(frame.target), name))
        return DirectoryFrame(self._view.enter(frame.source, name), target, iter(()))

    def warn(self, frame: DirectoryFrame, name: bytes, what: str) -> None:
        """Note something about an entry that could not be written."""
        self._target.warn(frame.target, name, what)

    def make_directory(self, frame: DirectoryFrame, child: Child) -> bool:
        """Make an empty directory without its metadata. False, and a warning, if the target cannot hold it."""
        made = bool(self._target.attempt(frame.target, child.name, partial(self._make_dir, frame, child)))
        self._directories += made
        return made

    def write_entry(self, frame: DirectoryFrame, child: Child) -> bool:
        """Make anything but a directory, where nothing is. False if it was left out."""
        made = bool(self._target.attempt(frame.target, child.name, partial(self._write_node, frame, child)))
        self._files += made
        return made

    def finish_directory(self, frame: DirectoryFrame) -> None:
        """Write the metadata of a directory in which everything else is written."""
        xattrs = self._target.read_xattrs(frame.target, b"", lambda: self._view.directory_xattrs(frame.source))
        self._target.apply(frame.target, b"", self._out.fd(frame.target), self._view.entry_of(frame.source), xattrs)

    def is_linked(self, frame: DirectoryFrame, child: Child) -> bool:
        """True if the name in the target is a link to the written name of its group."""
        first = self._links.get(child.entry.inode)
        if first is None:
            return False
        one = os.stat(first[1], dir_fd=self._out.fd(first[0]), follow_symlinks=False)
        try:
            other = os.stat(child.name, dir_fd=self._out.fd(frame.target), follow_symlinks=False)
        except FileNotFoundError:
            return False
        return identity_of(one) == identity_of(other)

    # -- directories ---------------------------------------------------------------------------------------------------

    def _make_dir(self, frame: DirectoryFrame, child: Child) -> bool:
        os.mkdir(child.name, 0o700, dir_fd=self._out.fd(frame.target))
        return True

    def _open_dir(self, frame: DirectoryFrame, child: Child) -> DirectoryFrame:
        entered = self.enter(frame, child.name)
        entered.children = iter(self._view.children(entered.source))
        return entered

    def _end(self, frame: DirectoryFrame) -> None:
        """Finish a directory whose entries are all written, or on their way. Metadata come last: writing into the
        directory changes its time."""
        if self._pool is None:
            self.finish_directory(frame)
            return
        self._send_batch(frame)
        self._ends.append(frame)
        if len(self._ends) >= _OPEN_ENDS:
            self._settle()

    # -- batches -------------------------------------------------------------------------------------------------------

    def _add_to_batch(self, frame: DirectoryFrame, child: Child) -> None:
        frame.batch.children.append(child)
        frame.batch.bytes += child.entry.size
        if frame.batch.bytes >= _BATCH_BYTES or len(frame.batch.children) >= _BATCH_FILES:
            self._send_batch(frame)

    def _send_batch(self, frame: DirectoryFrame) -> None:
        children = frame.batch.children
        if not children:
            return
        frame.batch = _Batch()
        if len(self._waiting) >= _WAITING_BATCHES:
            self._take_result()
        assert self._pool is not None
        dir_fd = os.dup(self._out.fd(frame.target))
        try:
            self._waiting.append(self._pool.submit(self._write_batch, frame.target, children, dir_fd))
        except BaseException:
            os.close(dir_fd)
            raise

    def _write_batch(self, target: Node, children: list[Child], dir_fd: int) -> tuple[int, int]:
        """Runs in a thread of the pool. Returns the number of files and their bytes."""
        files = size = 0
        with closing_fd(dir_fd):
            loaded = self._view.load_children(children)
            for child, data in zip(children, loaded, strict=True):
                turns.give_way()
                if self._stopped:
                    break
                done = self._target.attempt(target, child.name, partial(self._write_file, target, child, dir_fd, data))
                files += done is not None
                size += done or 0
        return files, size

    def _take_result(self) -> None:
        files, size = self._waiting.popleft().result()
        self._files += files
        self._bytes += size

    def _settle(self) -> None:
        """Wait for all files, then finish the directories whose entries are all there."""
        while self._waiting:
            self._take_result()
        for frame in self._ends:
            self.finish_directory(frame)
        self._ends.clear()

    # -- entries -------------------------------------------------------------------------------------------------------

    def _write_node(self, frame: DirectoryFrame, child: Child) -> bool:
        """Create anything but a directory. False if it was left out on purpose."""
        target, entry = frame.target, child.entry
        if entry.kind is Kind.SOCKET and not self._whiteouts:
            self._target.warn(target, child.name, "is a socket, which only its program can make")
            return False
        if entry.nlink > 1 and self._link(frame, child):
            return True
        fd = self._out.fd(target)
        if entry.kind is Kind.FILE:
            self._bytes += self._write_file(target, child, fd)
        elif entry.kind is Kind.SYMLINK:
            os.symlink(self._view.readlink_of(child), child.name, dir_fd=fd)
            self._target.apply(target, child.name, entry_path(fd, child.name), entry, self._xattrs(target, child))
        else:
            self._write_special(target, child, fd)
        if entry.nlink > 1:
            self._links[entry.inode] = (target, child.name)
        return True

    def _link(self, frame: DirectoryFrame, child: Child) -> bool:
        """Make the name a link to the one written before. False if there is none, or no link can be made."""
        first = self._links.get(child.entry.inode)
        if first is None:
            return False
        with closing_fd(os.dup(self._out.fd(first[0]))) as source_fd:
            try:
                target_fd = self._out.fd(frame.target)
                os.link(first[1], child.name, src_dir_fd=source_fd, dst_dir_fd=target_fd, follow_symlinks=False)
            except OSError as exc:
                if exc.errno not in (errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP):
                    raise
                why = f"became a copy of its own, not a hard link ({exc.strerror})"
                self._target.warn(frame.target, child.name, why)
                return False
        return True

    def _write_file(self, target: Node, child: Child, dir_fd: int, data: bytes | memoryview | None = None) -> int:
        """Make a regular file, of `data` if they are here already. Returns its size. It never has more permission bits
        than in the end."""
        fd = os.open(child.name, _NEW_FILE, child.entry.mode & 0o777, dir_fd=dir_fd)
        try:
            size = self._view.copy_child(child, fd) if data is None else write_all(fd, data)
            self._target.apply(target, child.name, fd, child.entry, self._xattrs(target, child))
        except OSError:
            os.unlink(child.name, dir_fd=dir_fd)
            raise
        finally:
            os.close(fd)
        return size

    def _xattrs(self, target: Node, child: Child) -> dict[bytes, bytes]:
        return self._target.read_xattrs(target, child.name, lambda: self._view.xattrs_of(child))

    def _write_special(self, target: Node, child: Child, dir_fd: int) -> None:
        entry = child.entry
        if entry.kind is Kind.FIFO:
            os.mkfifo(child.name, 0o600, dir_fd=dir_fd)
        elif entry.kind is Kind.SOCKET:
            os.mknod(child.name, stat.S_IFSOCK | 0o600, dir_fd=dir_fd)
        elif entry.rdev or entry.kind is Kind.BLOCK_DEVICE:
            os.mknod(child.name, FORMATS[entry.kind] | 0o600, entry.rdev, dir_fd=dir_fd)
        elif entry.kind is Kind.CHAR_DEVICE and self._whiteouts:
            make_whiteout(dir_fd, child.name, self._marks)
            return
        else:  # in a layer a character device 0:0 would delete the name
            raise OSError(errno.EINVAL, "device number 0:0")
        xattrs = self._xattrs(target, child)
        with closing_fd(os.open(child.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)) as fd:
            self._target.apply(target, child.name, fd_path(fd), entry, xattrs)
