"""Combine adjacent layers into one that means the same above and below any other layers.

Files are hard-linked, so a merge costs directories and links, not bytes. That raises the link count and changes the
ctime of the linked files, in the layers merged too. Directory inodes are new.

One directory can stand for many because a lookup from above finds the same names, and goes on below the last merged
layer under the same name or path as it would have after the last of them. A directory's own marks are therefore
recomputed from where its search ended (`Directory.stopped`, `.rest`), and whiteouts stay wherever something below could
come into view.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence

from snapshotd import failpoints
from snapshotd.errors import NO_ROOM, LimitExceeded, OutOfSpace
from snapshotd.kernel.abilities import TRUSTED, Marks
from snapshotd.kernel.files import closing_fd, copy_data, copy_metadata, fd_path, is_empty_dir, open_dir
from snapshotd.trees.base import Child
from snapshotd.trees.lookup import Directory, Handles, Lookup, Node, make_whiteout, read_public_xattrs
from snapshotd.types import Kind

_KEPT_COPIES = 64
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def merge(layer_fds: Sequence[int], target_fd: int, marks: Marks = TRUSTED) -> int:
    """Combine `layer_fds` (directories of sealed layers, newest first, that follow each other in a stack) into
    `target_fd`.

    `target_fd`: an empty directory of the layers' file system; it becomes the layer's root, with the newest root's
    metadata. The result may replace the layers anywhere in a stack. Returns the bytes that its files occupy, which it
    shares with the layers as long as those are there. Not durable on return. On an error the target holds a part; throw
    it away. Raises ValueError (no layers, or the target is not empty), OutOfSpace, LimitExceeded (a redirect that no
    extended attribute can hold), OSError (EXDEV: another file system). Cost: one link per file, one mkdir per
    directory; nothing is read.
    """
    if not layer_fds or not is_empty_dir(target_fd):
        raise ValueError("merge needs at least one layer and an empty target directory")
    merger = _Merger(layer_fds, target_fd, marks)
    try:
        merger.run()
    except OSError as exc:
        if exc.errno in NO_ROOM:
            raise OutOfSpace(
                "cannot merge layers: no space is left in the layer directory; remove trajectories or enlarge it"
            ) from exc
        raise
    finally:
        merger.close()
    failpoints.hit("layers.merge.built")
    return merger.bytes


class _Merger:
    def __init__(self, layer_fds: Sequence[int], target_fd: int, marks: Marks) -> None:
        self._marks = marks
        self._layers = Lookup(layer_fds, complete=False, marks=marks)
        self._out = Handles()
        try:
            self._top = self._out.add_root(target_fd)
        except BaseException:
            self._layers.handles.close()
            raise
        self._copies: dict[tuple[int, int], int] = {}
        self.bytes = 0
        self._counted: set[tuple[int, int]] = set()

    def close(self) -> None:
        self._layers.handles.close()
        self._out.close()
        while self._copies:
            os.close(self._copies.popitem()[1])

    def run(self) -> None:
        stack = [self._begin(self._layers.root, self._top)]
        while stack:
            directory, target, children = stack[-1]
            child = next(children, None)
            if child is None:
                stack.pop()
                self._finish(directory, target)
            elif child.entry.kind is Kind.DIRECTORY:
                below = self._layers.enter(directory, child.name)
                stack.append(self._begin(below, self._make_dir(target, child.name)))
            else:
                self._link(child, target)
                self._count(child, target)

    def _begin(self, directory: Directory, target: Node) -> tuple[Directory, Node, Iterator[Child]]:
        children, hidden = self._layers.scan(directory)
        if not directory.stopped:  # else nothing is below that could come into view
            fd = self._out.fd(target)
            for name in hidden:  # our own rather than links: an xattr whiteout would need a mark on its directory, too
                make_whiteout(fd, name, self._marks)
        return directory, target, iter(children)

    def _count(self, child: Child, target: Node) -> None:
        if child.entry.nlink > 1:  # a file with several names counts once
            if child.entry.inode in self._counted:
                return
            self._counted.add(child.entry.inode)
        self.bytes += os.stat(child.name, dir_fd=self._out.fd(target), follow_symlinks=False).st_blocks * 512

    def _make_dir(self, parent: Node, name: bytes) -> Node:
        fd = self._out.fd(parent)
        os.mkdir(name, 0o700, dir_fd=fd)
        return self._out.adopt(parent, name, open_dir(fd, name))

    def _link(self, child: Child, target: Node) -> None:
        copy = self._copies.get(child.entry.inode)
        if copy is None:
            try:
                source_fd, target_fd = self._layers.handles.fd(child.source), self._out.fd(target)
                os.link(child.name, child.name, src_dir_fd=source_fd, dst_dir_fd=target_fd, follow_symlinks=False)
                return
            except OSError as exc:
                if exc.errno != errno.EMLINK or child.entry.kind is not Kind.FILE:
                    raise
        elif self._link_copy(copy, child.name, target):
            return
        self._copy(child, target)

    def _link_copy(self, copy_fd: int, name: bytes, target: Node) -> bool:
        try:
            os.link(fd_path(copy_fd), name, dst_dir_fd=self._out.fd(target), follow_symlinks=True)
        except OSError as exc:
            if exc.errno != errno.EMLINK:
                raise
            return False
        return True

    def _copy(self, child: Child, target: Node) -> None:
        """For a file that has all the names its file system allows (65,000 on ext4): a copy, shared by the names that
        follow."""
        with closing_fd(os.open(child.name, _READ, dir_fd=self._layers.handles.fd(child.source))) as source_fd:
            fd = os.open(child.name, _CREATE, 0o600, dir_fd=self._out.fd(target))
            if len(self._copies) >= _KEPT_COPIES:
                os.close(self._copies.pop(next(iter(self._copies))))
            self._copies[child.entry.inode] = fd
            st = os.fstat(source_fd)
            copy_data(source_fd, fd, st.st_size)
            _copy_metadata(source_fd, fd, st, self._marks)

    def _finish(self, directory: Directory, target: Node) -> None:
        """Metadata of the topmost source, then the marks that make the lookup go on where it would have."""
        fd = self._out.fd(target)
        source_fd = self._layers.handles.fd(directory.sources[0])
        st = os.fstat(source_fd)
        _copy_metadata(source_fd, fd, st, self._marks)
        parent = directory.parent
        if parent is not None:
            if directory.stopped:
                if not parent.stopped:
                    os.setxattr(fd, self._marks.opaque, b"y")
            else:
                redirect = _redirect(directory, parent, target.name)
                if redirect is not None:
                    _set_redirect(fd, redirect, self._marks)
        os.utime(fd, ns=(st.st_atime_ns, st.st_mtime_ns))


def _redirect(directory: Directory, parent: Directory, name: bytes) -> bytes | None:
    """The redirect that the merged directory `name` needs, whose lower part may exist; None if that part lies at its
    natural path."""
    if not directory.absolute:
        return None if directory.rest[0] == name else directory.rest[0]
    path = directory.path_below()
    if not parent.stopped and path == (*parent.path_below(), name):
        return None
    return b"/" + b"/".join(path)


def _set_redirect(fd: int, redirect: bytes, marks: Marks) -> None:
    try:
        os.setxattr(fd, marks.redirect, redirect)
    except OSError as exc:
        if exc.errno not in (errno.ENOSPC, errno.E2BIG, errno.ERANGE):
            raise
        raise LimitExceeded(
            f"cannot merge layers: a renamed directory needs a redirect of {len(redirect)} bytes, which the file system cannot hold;"
            " the layers stay as they are"
        ) from exc


def _copy_metadata(source_fd: int, fd: int, st: os.stat_result, marks: Marks) -> None:
    copy_metadata(st, read_public_xattrs(source_fd, marks), fd)
