"""A tree in the repository as a view.

No directory on disk holds the tree: listings are the repository's tree objects, and file data its contents; the
repository verifies both. An impossible part of a tree (a name with a slash, extents beyond the end of their file) is
damage, like bytes that do not match their hash.
"""

from __future__ import annotations

import errno
import os
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from hashlib import blake2b
from itertools import accumulate
from typing import Any

from snapshotd.errors import DataLoss, NotFound
from snapshotd.kernel.abilities import TRUSTED
from snapshotd.kernel.files import write_all
from snapshotd.repo.base import Repository, Tree, TreeEntry
from snapshotd.trees.base import Child, Entry, printable_path
from snapshotd.trees.view import PathCache, View, split
from snapshotd.types import BlobID, Kind, TreeID

_IN_MEMORY_BYTES = 8 << 20
"""A file with more data than this is opened as a temporary file on disk, not in memory."""
_SMALL_BYTES = 1 << 20
"""A longer file is never read with others at once."""
_PAGE_BYTES = 4096
_STORED = -1
"""Stands for the device in `Entry.inode`: no device has this number, so a stored file is never taken for one on
disk."""


@dataclass(slots=True, eq=False, repr=False)
class StoredDirectory:
    """A directory of a stored tree: the handle that `StoredView` gives out."""

    parent: StoredDirectory | None
    name: bytes
    tree: TreeID


class StoredView(View):
    """The stored tree `tree`. The repository stays the caller's; a temporary file for `open` of a large file goes to
    the directory `scratch` (None: the system's place for them).

    Raises NotFound (no such tree), DataLoss; a part of the tree that is missing is DataLoss. Directories are loaded
    when they are read, so that damage in one does not hide the others: reading any attribute of a listed directory but
    its kind loads that directory. `ctime_ns` is the mtime, the size of a directory 0. Memory: the repository's caches.
    Errors name the file.
    """

    parallel = True

    def __init__(
        self,
        repository: Repository,
        tree: TreeID,
        scratch: str | None = None,
        *,
        closed: Callable[[], object] = lambda: None,
    ) -> None:
        """`closed` is called once, at the first `close`."""
        self._closing.callback(closed)
        self._repository, self._scratch = repository, scratch
        self._root = StoredDirectory(None, b"", tree)
        repository.load_tree(tree)
        self._paths = PathCache(self._root, self.enter)
        self._layout: tuple[TreeEntry | None, tuple[tuple[int, int], ...], list[int]] = (None, (), [])

    @property
    def tree(self) -> TreeID:
        """The tree that is shown."""
        return self._root.tree

    # -- by handle -----------------------------------------------------------------------------------------------------

    def directory(self, path: bytes = b"") -> StoredDirectory:
        found: StoredDirectory = self._paths.resolve(split(path))
        return found

    def children(self, directory: StoredDirectory) -> tuple[Child, ...]:
        return tuple([self.child_of(directory, entry) for entry in self.load(directory).entries])

    def find(self, directory: StoredDirectory, name: bytes) -> Child:
        entry = entry_named(self.load(directory), name)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(name))
        return self.child_of(directory, entry)

    def enter(self, directory: StoredDirectory, name: bytes) -> StoredDirectory:
        entry: TreeEntry = self.find(directory, name).source[1]
        if entry.tree is None:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fsdecode(name))
        return StoredDirectory(directory, name, entry.tree)

    def entry_of(self, directory: StoredDirectory) -> Entry:
        return Entry(*_values(self.load(directory).own))

    def identity(self, directory: StoredDirectory) -> tuple[object, ...]:
        return "tree", directory.tree

    def content_of(self, child: Child) -> object | None:
        entry: TreeEntry = child.source[1]
        # With extents it would say too little: zeros may be data or a hole.
        return entry.content if entry.kind is Kind.FILE and entry.extents is None else None

    def open_child(self, child: Child) -> int:
        self._check_regular(child)
        extents = self._extents(child)[0]
        if sum(length + _PAGE_BYTES for _, length in extents) <= _IN_MEMORY_BYTES:
            fd = os.memfd_create("snapshotd-file", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile(dir=self._scratch, buffering=0) as file:
                fd = os.dup(file.fileno())
        try:
            self.copy_child(child, fd)
            os.lseek(fd, 0, os.SEEK_SET)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def read_child(self, child: Child, offset: int, length: int) -> bytes:
        self._check_regular(child)
        extents, starts = self._extents(child)
        entry: TreeEntry = child.source[1]
        end = min(offset + length, entry.size)
        if offset < 0 or offset >= end:
            return b""
        at = max(bisect_right(extents, offset, key=lambda extent: extent[0]) - 1, 0)
        pieces, done = [], offset
        while at < len(extents) and extents[at][0] < end:
            start, stop = max(extents[at][0], offset), min(extents[at][0] + extents[at][1], end)
            if start < stop:
                pieces += [bytes(start - done), self._read(child, starts[at] + start - extents[at][0], stop - start)]
                done = stop
            at += 1
        return b"".join([*pieces, bytes(end - done)])

    def copy_child(self, child: Child, target_fd: int) -> int:
        self._check_regular(child)
        entry: TreeEntry = child.source[1]
        if entry.content is not None and entry.extents is None:
            done = 0
            for piece in self._pieces(child, entry.content):
                done += len(piece)
                if done > entry.size:
                    break
                write_all(target_fd, piece)
            if done != entry.size:
                raise self._damage(child, "its content has another length than recorded")
            return done
        self._copy_sparse(child, entry, target_fd)
        return entry.size

    def load_children(self, children: Sequence[Child]) -> list[bytes | memoryview | None]:
        result: list[bytes | memoryview | None] = [None] * len(children)
        places, contents = [], []
        for place, child in enumerate(children):
            entry: TreeEntry = child.source[1]
            if (
                entry.kind is Kind.FILE
                and entry.content is not None
                and entry.extents is None
                and entry.size <= _SMALL_BYTES
            ):
                places.append(place)
                contents.append(entry.content)
        for place, data in zip(places, self._repository.load_many(contents), strict=True):
            if data is not None and len(data) == children[place].entry.size:
                result[place] = data
        return result

    def readlink_of(self, child: Child) -> bytes:
        entry: TreeEntry = child.source[1]
        if entry.kind is not Kind.SYMLINK:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), os.fsdecode(child.name))
        return entry.target

    def xattrs_of(self, child: Child) -> dict[bytes, bytes]:
        directory, entry = child.source
        if entry.tree is not None:
            return self.directory_xattrs(StoredDirectory(directory, entry.name, entry.tree))
        return _public_xattrs(entry)

    def directory_xattrs(self, directory: StoredDirectory) -> dict[bytes, bytes]:
        return _public_xattrs(self.load(directory).own)

    # -- for views that are made of this one ---------------------------------------------------------------------------

    def load(self, directory: StoredDirectory) -> Tree:
        """The directory's object. DataLoss, naming the directory."""
        try:
            return self._repository.load_tree(directory.tree)
        except (DataLoss, NotFound) as exc:
            raise DataLoss(f"directory {self._where(directory)}: {exc.message}") from exc

    def child_of(self, directory: StoredDirectory, entry: TreeEntry) -> Child:
        """An entry of a directory as listings show it. DataLoss: its name is impossible."""
        if b"/" in entry.name or entry.name in _NO_NAMES:
            raise DataLoss(
                f"directory {self._where(directory)}: it holds the impossible name {os.fsdecode(entry.name)!a}"
            )
        if entry.tree is None:
            return Child(entry.name, Entry(*_values(entry)), (directory, entry))
        below = StoredDirectory(directory, entry.name, entry.tree)
        return Child(entry.name, _LazyEntry(lambda: self.load(below).own), (directory, entry))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _check_regular(self, child: Child) -> None:
        kind = child.source[1].kind
        if kind is Kind.DIRECTORY:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fsdecode(child.name))
        if kind is not Kind.FILE:
            raise OSError(
                errno.ELOOP if kind is Kind.SYMLINK else errno.EINVAL, "not a regular file", os.fsdecode(child.name)
            )

    def _extents(self, child: Child) -> tuple[tuple[tuple[int, int], ...], list[int]]:
        """The extents of the file's data, and the beginning of each in its content. The last answer is remembered: a
        file in a million pieces may be read in small steps."""
        entry: TreeEntry = child.source[1]
        layout = self._layout  # read once: another thread may set it
        if layout[0] is entry:
            return layout[1:]
        extents = entry.extents
        if extents is None:
            extents = ((0, entry.size),) if entry.size else ()
        end = 0
        for start, length in extents:
            if start < end or length <= 0:
                raise self._damage(child, "its extents are out of order")
            end = start + length
        if end > entry.size or (bool(extents) and entry.content is None):
            raise self._damage(child, "its extents do not fit its size and content")
        starts = list(accumulate((length for _, length in extents), initial=0))
        self._layout = (entry, extents, starts)
        return extents, starts

    def _copy_sparse(self, child: Child, entry: TreeEntry, target_fd: int) -> None:
        extents, _ = self._extents(child)
        waiting = iter(extents)
        start = length = 0
        for piece in self._pieces(child, entry.content) if entry.content is not None else ():
            rest = memoryview(piece)
            while rest:
                if not length:
                    start, length = next(waiting, (0, 0))
                    if not length:
                        raise self._damage(child, "its content is longer than its extents")
                part = rest[:length]
                write_all(target_fd, part, start)
                start, length, rest = start + len(part), length - len(part), rest[len(part) :]
        if length or next(waiting, None) is not None:
            raise self._damage(child, "its content is shorter than its extents")
        os.ftruncate(target_fd, entry.size)

    def _pieces(self, child: Child, content: BlobID) -> Iterator[bytes]:
        with self._naming(child):
            yield from self._repository.load(content)

    def _read(self, child: Child, offset: int, length: int) -> bytes:
        with self._naming(child):
            data = self._repository.read(child.source[1].content, offset, length)
        if len(data) != length:
            raise self._damage(child, "its content is shorter than recorded")
        return data

    @contextmanager
    def _naming(self, child: Child) -> Iterator[None]:
        try:
            yield
        except (DataLoss, NotFound) as exc:
            raise self._damage(child, exc.message) from exc

    def _damage(self, child: Child, why: str) -> DataLoss:
        return DataLoss(f"file {self._where(child.source[0], child.name)}: {why}")

    def _where(self, directory: StoredDirectory, *names: bytes) -> str:
        """A path for people, and its owner."""
        return f"{printable_path(directory, *names)} of tree {self._root.tree}"


_NO_NAMES = (b"", b".", b"..")


def entry_named(tree: Tree, name: bytes) -> TreeEntry | None:
    """The entry `name` of a stored directory."""
    at = bisect_left(tree.entries, name, key=lambda entry: entry.name)
    return tree.entries[at] if at < len(tree.entries) and tree.entries[at].name == name else None


class _LazyEntry(Entry):
    """The entry of a directory in its parent's listing: everything but the kind is in the directory's own object,
    loaded when asked for."""

    __slots__ = ("_load",)
    _load: Callable[[], TreeEntry]

    def __init__(self, load: Callable[[], TreeEntry]) -> None:
        object.__setattr__(self, "kind", Kind.DIRECTORY)
        object.__setattr__(self, "_load", load)

    def __getattr__(self, name: str) -> Any:
        """Called for slots that are still empty."""
        if name not in _FIELDS:
            raise AttributeError(name)
        for field, value in zip(_FIELDS, _values(self._load()), strict=True):
            object.__setattr__(self, field, value)
        return object.__getattribute__(self, name)

    def _all(self) -> tuple[Any, ...]:
        return tuple([getattr(self, field) for field in _FIELDS])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Entry) and self._all() == tuple([getattr(other, field) for field in _FIELDS])

    def __hash__(self) -> int:
        return hash(self._all())


_FIELDS = tuple(field.name for field in fields(Entry))


def _values(entry: TreeEntry) -> tuple[Any, ...]:
    """The fields of the `Entry` that shows a stored entry."""
    kind = entry.kind
    size = entry.size if kind is Kind.FILE else len(entry.target)
    inode = (_STORED, _file_number(entry))
    return kind, entry.mode, entry.uid, entry.gid, size, entry.mtime_ns, entry.rdev, entry.nlink, inode, entry.mtime_ns


def _file_number(entry: TreeEntry) -> int:
    """128 bits over everything but the name: one file has one number, and two numbers are equal only if everything
    about the files is."""
    everything = (
        entry.kind.value,
        entry.mode,
        entry.uid,
        entry.gid,
        entry.mtime_ns,
        entry.size,
        entry.content,
        entry.extents,
        entry.target,
        entry.rdev,
        entry.tree,
        entry.link,
        entry.nlink,
        entry.xattrs,
    )
    return int.from_bytes(blake2b(repr(everything).encode(), digest_size=16).digest(), "big")


def _public_xattrs(entry: TreeEntry) -> dict[bytes, bytes]:
    """Attributes of overlayfs itself never come out, from any source."""
    return {name: value for name, value in entry.xattrs if not name.startswith(TRUSTED.prefix)}
