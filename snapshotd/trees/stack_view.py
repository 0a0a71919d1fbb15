"""A stack of sealed layers as a view, without mounting it.

Equal to what the kernel shows through a mount (tests/model/test_overlay_view.py compares the two), except:
overlayfs's own attributes never show, and a merged directory has the inode number of its topmost source.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection, Sequence

from snapshotd.errors import DataLoss
from snapshotd.kernel.abilities import TRUSTED, Marks
from snapshotd.kernel.files import closing_fd, copy_data, fd_path
from snapshotd.trees.base import Child, Entry
from snapshotd.trees.lookup import Directory, Lookup, entry_path, read_public_xattrs
from snapshotd.trees.view import PathCache, View, split
from snapshotd.types import Kind

_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class StackView(View):
    """`layer_fds`: directories, newest first, the image's root last. The descriptors given stay the caller's.

    At most `lookup.MAX_OPEN_DIRS` descriptors plus one per layer are held. Cost: a lookup asks each source of the
    parent directory; a listing stats every entry once.
    """

    def __init__(
        self, layer_fds: Sequence[int], closed: Callable[[], object] = lambda: None, marks: Marks = TRUSTED
    ) -> None:
        """`closed` is called once, at the first `close`. `marks`: those of the layers."""
        self._marks = marks
        self._lookup = Lookup(layer_fds, complete=True, marks=marks)
        self._closing.callback(closed)
        self._closing.callback(self._lookup.handles.close)
        self._paths = PathCache(self._lookup.root, self.enter)
        roots = tuple(node.inode for node in self._lookup.roots)
        self._stacks = [roots[i:] for i in range(len(roots))]

    # -- by handle, for walks that must not resolve paths again and again ----------------------------------------------

    def directory(self, path: bytes = b"") -> Directory:
        found: Directory = self._paths.resolve(split(path))
        return found

    def children(self, directory: Directory) -> tuple[Child, ...]:
        return tuple(self._lookup.scan(directory)[0])

    def find(self, directory: Directory, name: bytes) -> Child:
        return self._lookup.find(directory, name)

    def enter(self, directory: Directory, name: bytes) -> Directory:
        return self._lookup.enter(directory, name)

    def entry_of(self, directory: Directory) -> Entry:
        return Entry.of(os.fstat(self._lookup.handles.fd(directory.sources[0])))

    def identity(self, directory: Directory) -> tuple[object, ...]:
        """The layers below the topmost source belong to it: a redirect deeper down may lead there."""
        return tuple(node.inode for node in directory.sources), self._stacks[directory.sources[0].layer]

    def unlike(self, directory: Directory, other: View, others: Directory) -> Collection[bytes] | None:
        """The layers below their own are common to both views, redirects included; so only names in the layers above
        can differ, as entries or as whiteouts. Cost: a listing of each layer above."""
        if not isinstance(other, StackView):
            return None
        shared = 0
        for mine, its in zip(reversed(directory.sources), reversed(others.sources), strict=False):
            if mine.inode != its.inode or self._stacks[mine.layer] != other._stacks[its.layer]:
                break
            shared += 1
        if not shared:
            return None
        names: set[bytes] = set()
        for lookup, sources in ((self._lookup, directory.sources), (other._lookup, others.sources)):
            for source in sources[:-shared]:
                names.update(map(os.fsencode, os.listdir(lookup.handles.fd(source))))
        return names

    def some(self, directory: Directory, names: Collection[bytes]) -> tuple[Child, ...]:
        return tuple(self._lookup.scan(directory, names)[0])

    def open_child(self, child: Child) -> int:
        if child.entry.kind is Kind.DIRECTORY:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fsdecode(child.name))
        if child.entry.kind is not Kind.FILE:  # opening a fifo or a device would act on it
            code = errno.ELOOP if child.entry.kind is Kind.SYMLINK else errno.EINVAL
            raise OSError(code, "not a regular file", os.fsdecode(child.name))
        fd = os.open(child.name, _FILE_FLAGS, dir_fd=self._lookup.handles.fd(child.source))
        st = os.fstat(fd)
        if not stat.S_ISREG(st.st_mode) or (st.st_dev, st.st_ino) != child.entry.inode:
            os.close(fd)
            raise OSError(errno.ESTALE, "a file was replaced while it was read", os.fsdecode(child.name))
        return fd

    def read_child(self, child: Child, offset: int, length: int) -> bytes:
        with closing_fd(self.open_child(child)) as fd:
            return os.pread(fd, length, offset)

    def copy_child(self, child: Child, target_fd: int) -> int:
        with closing_fd(self.open_child(child)) as fd:
            size = os.fstat(fd).st_size
            if copy_data(fd, target_fd, size) != size:
                raise DataLoss(f"file {os.fsdecode(child.name)!a} is shorter on disk than recorded; check the disk")
            return size

    def readlink_of(self, child: Child) -> bytes:
        return os.readlink(child.name, dir_fd=self._lookup.handles.fd(child.source))

    def xattrs_of(self, child: Child) -> dict[bytes, bytes]:
        path = entry_path(self._lookup.handles.fd(child.source), child.name)
        return read_public_xattrs(path, self._marks, follow=False)

    def directory_xattrs(self, directory: Directory) -> dict[bytes, bytes]:
        return read_public_xattrs(fd_path(self._lookup.handles.fd(directory.sources[0])), self._marks)
