"""The difference between two stored trees, as the layer that makes one of the other.

Put over a directory that holds the tree `below`, the layer gives `tree`: it has the entries that differ, and a whiteout
(a character device 0:0) for each name that is in `below` only. It needs no opaque and no redirect marks: where both
sides have a directory they merge name by name, and a directory over anything else is not merged by the kernel anyway.

Hard links. Overlayfs knows no links between layers: the names of a group that is shown here in part and lies below in
part would be two files. A group is shown as a whole or not at all, then. Its entries are equal but for their names, so
a group can only be torn by names that moved to another place without being written again, as the rename of a directory
does: the names in it keep the number of their group, and so do the ones elsewhere. A count finds such groups: fewer
names among the changed entries than the group has (`TreeEntry.nlink`). Only then the unchanged part of the tree is
searched for the rest.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from snapshotd.repo.base import Repository, TreeEntry
from snapshotd.trees.base import Child, Entry
from snapshotd.trees.stored_view import StoredDirectory, StoredView, entry_named
from snapshotd.trees.view import PathCache, View, pair_by_name, split
from snapshotd.types import Kind, TreeID


@dataclass(slots=True, eq=False)
class _Names:
    """Unchanged names that are shown because their link group is: the ones of a directory, and the ones in its
    sub-directories."""

    files: set[bytes] = field(default_factory=set)
    deeper: dict[bytes, _Names] = field(default_factory=dict)


@dataclass(slots=True, eq=False, repr=False)
class DifferenceDirectory:
    """A directory of the layer: the handle that `DifferenceView` gives out. `below`: the directory that it merges with;
    None if there is none."""

    stored: StoredDirectory
    below: StoredDirectory | None
    linked: _Names | None


class DifferenceView(View):
    """The layer that, over a directory with the tree `below`, gives `tree`. See the module's text. Raises and behaves
    like `StoredView`.

    Sub-directories are compared when they are entered, equal ones are not even read. `whole_groups`: show hard link
    groups as a whole or not at all, which takes reading all changed directories at the first listing; without it a
    group may be torn as a copy-up would. A character device 0:0 of `tree` itself cannot be told from a whiteout and is
    one here.
    """

    parallel = True

    def __init__(
        self,
        repository: Repository,
        tree: TreeID,
        below: TreeID,
        scratch: str | None = None,
        *,
        whole_groups: bool = True,
    ) -> None:
        self._upper, self._lower = StoredView(repository, tree, scratch), StoredView(repository, below, scratch)
        self._root = DifferenceDirectory(self._upper.directory(), self._lower.directory(), None)
        self._groups_known = not whole_groups
        self._paths = PathCache(self._root, self.enter)

    # -- by handle -----------------------------------------------------------------------------------------------------

    def directory(self, path: bytes = b"") -> DifferenceDirectory:
        self._know_groups()
        found: DifferenceDirectory = self._paths.resolve(split(path))
        return found

    def children(self, directory: DifferenceDirectory) -> tuple[Child, ...]:
        self._know_groups()
        return tuple([self._upper.child_of(directory.stored, entry) for entry in self._entries(directory)])

    def find(self, directory: DifferenceDirectory, name: bytes) -> Child:
        self._know_groups()
        entry = entry_named(self._upper.load(directory.stored), name)
        other = None if directory.below is None else entry_named(self._lower.load(directory.below), name)
        entry = _difference(entry, other, _is_linked(directory, name))
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(name))
        return self._upper.child_of(directory.stored, entry)

    def enter(self, directory: DifferenceDirectory, name: bytes) -> DifferenceDirectory:
        entry: TreeEntry = self.find(directory, name).source[1]
        if entry.tree is None:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fsdecode(name))
        linked = directory.linked.deeper.get(name) if directory.linked is not None else None
        other = None if directory.below is None else entry_named(self._lower.load(directory.below), name)
        return _enter(directory, entry, other, linked)

    def entry_of(self, directory: DifferenceDirectory) -> Entry:
        return self._upper.entry_of(directory.stored)

    def identity(self, directory: DifferenceDirectory) -> tuple[object, ...]:
        below = None if directory.below is None else directory.below.tree
        return "difference", directory.stored.tree, below, directory.linked

    def open_child(self, child: Child) -> int:
        return self._upper.open_child(child)

    def read_child(self, child: Child, offset: int, length: int) -> bytes:
        return self._upper.read_child(child, offset, length)

    def copy_child(self, child: Child, target_fd: int) -> int:
        return self._upper.copy_child(child, target_fd)

    def load_children(self, children: Sequence[Child]) -> list[bytes | memoryview | None]:
        return self._upper.load_children(children)

    def readlink_of(self, child: Child) -> bytes:
        return self._upper.readlink_of(child)

    def xattrs_of(self, child: Child) -> dict[bytes, bytes]:
        return self._upper.xattrs_of(child)

    def directory_xattrs(self, directory: DifferenceDirectory) -> dict[bytes, bytes]:
        return self._upper.directory_xattrs(directory.stored)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _entries(self, directory: DifferenceDirectory) -> Iterator[TreeEntry]:
        """The entries that the directory shows, in order."""
        for name, entry, other in self._pairs(directory):
            shown = _difference(entry, other, _is_linked(directory, name))
            if shown is not None:
                yield shown

    def _pairs(self, directory: DifferenceDirectory) -> Iterator[tuple[bytes, TreeEntry | None, TreeEntry | None]]:
        """The entries of both sides by name."""
        entries = self._upper.load(directory.stored).entries
        others = () if directory.below is None else self._lower.load(directory.below).entries
        return pair_by_name(entries, others)

    def _know_groups(self) -> None:
        if not self._groups_known:
            self._groups_known = True
            torn = self._find_torn_groups()
            if torn:
                self._root.linked = self._find_names(torn)

    def _find_torn_groups(self) -> set[int]:
        """The link groups that are shown in part."""
        shown: Counter[int] = Counter()
        names: dict[int, int] = {}
        todo = [self._root]
        while todo:
            directory = todo.pop()
            for _, entry, other in self._pairs(directory):
                if entry is None or _difference(entry, other, linked=False) is None:
                    continue
                if entry.tree is not None:
                    todo.append(_enter(directory, entry, other, None))
                elif entry.link:
                    shown[entry.link] += 1
                    names[entry.link] = entry.nlink
        return {link for link, count in shown.items() if count < names[link]}

    def _find_names(self, torn: set[int]) -> _Names:
        """The places of the unchanged names of these groups. Directories (of equal content) that hold none are read
        once."""
        root = _Names()
        without: set[tuple[TreeID, TreeID | None]] = set()
        stack = [(root, self._root, self._pairs(self._root))]
        while stack:
            names, directory, pairs = stack[-1]
            _, entry, other = next(pairs, (b"", None, None))
            if entry is None and other is None:
                stack.pop()
                if stack and not names.files and not names.deeper:
                    without.add(_key(directory))
                    del stack[-1][0].deeper[directory.stored.name]
            elif entry is not None and entry.tree is not None:
                deeper = _enter(directory, entry, other, None)
                if deeper.below is not None and _key(deeper) not in without:
                    names.deeper[entry.name] = _Names()
                    stack.append((names.deeper[entry.name], deeper, self._pairs(deeper)))
            elif entry is not None and entry.link in torn and entry == other:
                names.files.add(entry.name)
        return root


def _difference(entry: TreeEntry | None, other: TreeEntry | None, linked: bool) -> TreeEntry | None:
    """The entry that the layer shows for a name that is `entry` above and `other` below (None: not there). None:
    nothing.

    `linked`: shown even if both are equal.
    """
    if entry is not None and entry.kind is Kind.CHAR_DEVICE and not entry.rdev:
        entry = None
    if entry is not None:
        return entry if linked or entry != other else None
    return None if other is None else TreeEntry(other.name, Kind.CHAR_DEVICE, 0, 0, 0, 0)


def _is_linked(directory: DifferenceDirectory, name: bytes) -> bool:
    return directory.linked is not None and (name in directory.linked.files or name in directory.linked.deeper)


def _enter(
    directory: DifferenceDirectory, entry: TreeEntry, other: TreeEntry | None, linked: _Names | None
) -> DifferenceDirectory:
    assert entry.tree is not None
    below = None
    if directory.below is not None and other is not None and other.tree is not None:
        below = StoredDirectory(directory.below, other.name, other.tree)
    return DifferenceDirectory(StoredDirectory(directory.stored, entry.name, entry.tree), below, linked)


def _key(directory: DifferenceDirectory) -> tuple[TreeID, TreeID | None]:
    return directory.stored.tree, None if directory.below is None else directory.below.tree
