"""Read a tree, wherever it lies: the interface.

    stack_view.py    a stack of layers (directories)
    stored_view.py   a tree in the repository
    live_view.py     the live root of a sandbox

Paths are bytes relative to the root; b"" is the root, surplus slashes do not count, `.` and `..` are not followed (they
do not exist), links are never followed. Every method raises OSError: FileNotFoundError, NotADirectoryError (a component
is not a directory), EIO, ESTALE (a layer changed, which must not happen); methods of stored trees raise DataLoss
(naming object and pack) as well. Paths and directories of any length and depth. One thread at a time, but see
`View.parallel`.
"""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property
from itertools import takewhile
from typing import Any, Protocol, TypeAlias, TypeVar

from snapshotd.trees.base import Child, Entry
from snapshotd.types import Kind

Directory: TypeAlias = Any
"""A view's own handle of a directory, valid until the view is closed. Only good for handing back to that view."""

_KEPT_PATHS = 256
_LONG_PATH_BYTES = 4096
_MOST_LINKS, _MOST_STEPS = 40, 4096
"""Bounds for one path that is followed; the kernel's own bounds (MAXSYMLINKS; PATH_MAX)."""


class View(ABC):
    """See the module's text."""

    parallel: bool = False
    """True if any number of threads may read files (`copy_child`, `xattrs_of` and the like) while one thread lists
    directories."""
    live: bool = False
    """True if the tree changes while it is read: a listed entry may be gone, longer or shorter when it is opened."""

    @cached_property
    def _closing(self) -> ExitStack:
        """Everything to do at the first `close`."""
        return ExitStack()

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release every descriptor. Idempotent."""
        self._closing.close()

    # -- by path -------------------------------------------------------------------------------------------------------

    def lstat(self, path: bytes) -> Entry:
        """The entry at `path`, links not followed."""
        parts = split(path)
        if not parts:
            return self.entry_of(self.directory())
        return self.find(self.directory(b"/".join(parts[:-1])), parts[-1]).entry

    def list(self, path: bytes) -> list[tuple[bytes, Entry]]:
        """The entries of a directory, sorted by the bytes of their names."""
        return [(child.name, child.entry) for child in self.children(self.directory(path))]

    def open(self, path: bytes) -> int:
        """A descriptor for reading the regular file at `path`; the caller closes it. Raises IsADirectoryError, OSError
        (ELOOP: a link; EINVAL: a device, fifo or socket)."""
        return self.open_child(self.child(path))

    def readlink(self, path: bytes) -> bytes:
        """A symbolic link's target. OSError EINVAL if it is something else."""
        return self.readlink_of(self.child(path))

    def xattrs(self, path: bytes) -> dict[bytes, bytes]:
        """Extended attributes but overlayfs's own. Raises OSError (E2BIG: more than the kernel lists)."""
        if not split(path):
            return self.directory_xattrs(self.directory())
        return self.xattrs_of(self.child(path))

    def child(self, path: bytes) -> Child:
        """The entry at `path`, for the methods below. IsADirectoryError for the root."""
        parts = split(path)
        if not parts:
            raise IsADirectoryError(errno.EISDIR, "the root is nobody's child")
        return self.find(self.directory(b"/".join(parts[:-1])), parts[-1])

    def walk(self, path: bytes = b"") -> Iterator[tuple[bytes, Entry]]:
        """Every entry below the directory `path` (itself not), parents first, siblings sorted; paths from the view's
        root.

        Memory: the listings on the way to the current entry.
        """
        top, prefix = self.directory(path), b"/".join(split(path))
        # Lengths of paths: six thousand paths of a megabyte would not fit.
        stack = [(len(prefix), top, iter(self.children(top)))]
        while stack:
            length, directory, children = stack[-1]
            child = next(children, None)
            if child is None:
                stack.pop()
                continue
            child_path = join(prefix[:length], child.name)
            yield child_path, child.entry
            if child.entry.kind is Kind.DIRECTORY:
                prefix = child_path
                deeper = self.enter(directory, child.name)
                stack.append((len(prefix), deeper, iter(self.children(deeper))))

    # -- by handle, for walks that must not resolve paths again and again ----------------------------------------------

    @abstractmethod
    def directory(self, path: bytes = b"") -> Directory:
        """The handle of a directory."""

    @abstractmethod
    def children(self, directory: Directory) -> tuple[Child, ...]:
        """The directory's entries, sorted by the bytes of their names."""

    @abstractmethod
    def find(self, directory: Directory, name: bytes) -> Child:
        """The entry `name` of a directory."""

    @abstractmethod
    def enter(self, directory: Directory, name: bytes) -> Directory:
        """The handle of a sub-directory."""

    @abstractmethod
    def entry_of(self, directory: Directory) -> Entry:
        """A directory's own entry."""

    @abstractmethod
    def identity(self, directory: Directory) -> tuple[object, ...]:
        """Equal for two directories (of any two views) whose whole trees are equal, because the same layers or objects
        back them. Different identities say nothing."""

    def unlike(self, directory: Directory, other: View, others: Directory) -> Collection[bytes] | None:
        """The only names by which a directory and one of another view, with everything below them, can differ; None
        where that is not known without listing both."""
        return None

    def some(self, directory: Directory, names: Collection[bytes]) -> tuple[Child, ...]:
        """The directory's `children` that have one of the names."""
        return tuple([child for child in self.children(directory) if child.name in names])

    def content_of(self, child: Child) -> object | None:
        """Equal for two regular files (of views of one repository) if and only if their bytes are; None: not known
        without reading them."""
        return None

    @abstractmethod
    def open_child(self, child: Child) -> int:
        """Like `open`. Holes are holes. For a stored file this is an anonymous file filled with all its data."""

    @abstractmethod
    def read_child(self, child: Child, offset: int, length: int) -> bytes:
        """Bytes of a regular file from `offset`, holes as zeros; less than `length` only at its end. Errors like
        `open`."""

    @abstractmethod
    def copy_child(self, child: Child, target_fd: int) -> int:
        """Write a regular file's data into an empty file (sharing extents where possible, holes left out, length set).
        Returns the file's logical size. Errors like `open`, and errors of writing."""

    def load_children(self, children: Sequence[Child]) -> Sequence[bytes | memoryview | None]:
        """The whole data of small regular files at once, where that is faster than `copy_child` for each. None is no
        answer and no error: `copy_child` returns the data, or raises the error. Memory: some 20 MiB at most."""
        return [None] * len(children)

    @abstractmethod
    def readlink_of(self, child: Child) -> bytes:
        """Like `readlink`."""

    @abstractmethod
    def xattrs_of(self, child: Child) -> dict[bytes, bytes]:
        """Like `xattrs`."""

    @abstractmethod
    def directory_xattrs(self, directory: Directory) -> dict[bytes, bytes]:
        """Like `xattrs`."""


def follow(view: View, path: bytes) -> tuple[bytes, Entry]:
    """Where a path leads with all links in it followed, as for a process whose root the view is: the path without
    links, and what is there. OSError (ELOOP: more than 40 links, as in the kernel, or a way of endless length)."""
    todo, done, links, steps = split(path)[::-1], list[bytes](), 0, 0
    entry = view.entry_of(view.directory())
    while todo:
        steps += 1
        if steps > _MOST_STEPS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        name = todo.pop()
        if name in (b".", b".."):
            del done[len(done) - (name == b"..") :]
            entry = view.entry_of(view.directory(b"/".join(done)))
            continue
        child = view.find(view.directory(b"/".join(done)), name)
        if child.entry.kind is Kind.SYMLINK:
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            target = view.readlink_of(child)
            if target.startswith(b"/"):
                done.clear()
            todo += split(target)[::-1]
            entry = view.entry_of(view.directory(b"/".join(done)))
            continue
        done.append(name)
        entry = child.entry
    return b"/".join(done), entry


class _Named(Protocol):
    @property
    def name(self) -> bytes: ...


_N = TypeVar("_N", bound=_Named)


def pair_by_name(left: Sequence[_N], right: Sequence[_N]) -> Iterator[tuple[bytes, _N | None, _N | None]]:
    """Two listings side by side, each sorted by name: the name, and the entry of each that has it."""
    i = j = 0
    while i < len(left) or j < len(right):
        if j == len(right) or (i < len(left) and left[i].name < right[j].name):
            yield left[i].name, left[i], None
            i += 1
        elif i == len(left) or right[j].name < left[i].name:
            yield right[j].name, None, right[j]
            j += 1
        else:
            yield left[i].name, left[i], right[j]
            i, j = i + 1, j + 1


def count_common(left: Iterable[bytes], right: Iterable[bytes]) -> int:
    """The number of components with which two paths begin alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def join(prefix: bytes, name: bytes) -> bytes:
    """A path below `prefix`, which may be the root (b"")."""
    return prefix + b"/" + name if prefix else name


def split(path: bytes) -> list[bytes]:
    """The components of a path; surplus slashes do not count."""
    return [part for part in path.split(b"/") if part]


class PathCache:
    """Finds a view's directories by path, from the nearest ancestor that is remembered: the last ones of ordinary
    length, and all on the last way of any length. A walk that asks for every path it sees costs one step per directory
    this way, however deep it goes."""

    def __init__(self, root: Directory, enter: Callable[[Directory, bytes], Directory]) -> None:
        self._root, self._enter = root, enter
        self._short: OrderedDict[tuple[bytes, ...], Directory] = OrderedDict()
        self._long: list[tuple[bytes, Directory]] = []

    def resolve(self, parts: Sequence[bytes]) -> Directory:
        """The directory that the components lead to. Raises the errors of `enter`."""
        if sum(map(len, parts)) + len(parts) > _LONG_PATH_BYTES:
            return self._resolve_long(parts)
        at, done = self._root, 0
        for count in range(len(parts), 0, -1):
            known = self._short.get(tuple(parts[:count]))
            if known is not None:
                at, done = known, count
                break
        for name in parts[done:]:
            at = self._enter(at, name)
        self._short[tuple(parts)] = at
        self._short.move_to_end(tuple(parts))
        if len(self._short) > _KEPT_PATHS:
            self._short.popitem(last=False)
        return at

    def _resolve_long(self, parts: Sequence[bytes]) -> Directory:
        common = count_common(parts, (name for name, _ in self._long))
        del self._long[common:]
        for name in parts[common:]:
            self._long.append((name, self._enter(self._long[-1][1] if self._long else self._root, name)))
        return self._long[-1][1]
