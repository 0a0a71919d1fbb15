"""The objects that the roots reach: a walk over trees and lists, once each, without recursion.

Used by the garbage collection (`mark`: which objects must stay). Memory is proportional to the number of ids reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from snapshotd.errors import DataLoss, NotFound
from snapshotd.repo.base import ObjectKind, Roots, Tree
from snapshotd.repo.format.index import Index, IndexEntry
from snapshotd.repo.reading.reader import PackReader
from snapshotd.terms import number_of
from snapshotd.types import TreeID

_EVERY = 20_000
"""Objects between two messages to `progress`."""
_BATCH = 4096

Waiting = tuple[bytes, str | None, bytes]
"""(object, owner, path): None is an owner that may be incomplete."""


def tree_contents(tree: Tree) -> Iterator[tuple[bytes, bytes]]:
    """Yield (name, content) of each file of a directory that has content."""
    return ((entry.name, bytes.fromhex(entry.content)) for entry in tree.entries if entry.content is not None)


def tree_children(tree: Tree) -> Iterator[tuple[bytes, bytes]]:
    """Yield (name, tree) of each sub-directory."""
    return ((entry.name, bytes.fromhex(entry.tree)) for entry in tree.entries if entry.tree is not None)


def child_path(path: bytes, name: bytes) -> bytes:
    return path + b"/" + name if path else name


def owner_of(owner: str | None, path: bytes) -> str:
    """The words of a message for the owner that needs an object."""
    return f"{owner} needs it for {path.decode(errors='backslashreplace')!r}" if path else f"{owner} needs it"


class Marked(NamedTuple):
    """`live`: objects that must stay. `relist`: lists among them that are deltas against lists that need not stay."""

    live: set[bytes]
    relist: set[bytes]


def mark(
    reader: PackReader, index: Index, roots: Roots, young: set[bytes], progress: Callable[[str], object]
) -> Marked:
    """Every object that the roots reach, and the bases of their deltas; and the same for all objects in the packs
    `young`, which may belong to a snapshot that is no root yet (a part that these lack is no error). DataLoss, naming
    owner and path, when a root lacks something.

    A list stays only together with its parts: a large content that the index knows is taken for whole. So an old list
    does not stay just because a newer one is a delta against it; the newer one is named in `relist`, to be written in
    full."""
    marker = _Marker(reader, index, progress)
    marker.mark_contents([(bytes.fromhex(content), owner, b"") for content, owner in roots.contents.items()])
    for record, owner in roots.records.items():
        marker.mark_record(bytes.fromhex(record), owner)
    marker.mark_trees([(bytes.fromhex(tree), owner, b"") for tree, owner in roots.trees.items()])
    if young:
        for entry in index.objects():
            if entry.pack in young:
                marker.mark_unowned(entry)
    marker.mark_bases()
    return Marked(marker.live, marker.relist)


class _Marker:
    def __init__(self, reader: PackReader, index: Index, progress: Callable[[str], object]) -> None:
        self._reader, self._index, self._progress = reader, index, progress
        self.live: set[bytes] = set()
        self.relist: set[bytes] = set()
        self._told = 0

    def _say(self) -> None:
        if len(self.live) - self._told >= _EVERY:
            self._told = len(self.live)
            self._progress(f"marked as needed: {number_of(self._told, 'object')}")

    def mark_record(self, raw: bytes, owner: str) -> None:
        """Mark a record."""
        if self._index.find(raw) is None:
            raise _lost_error(raw, owner, b"")
        self.live.add(raw)

    def mark_trees(self, waiting: list[Waiting]) -> None:
        """Mark directories and everything below them."""
        while waiting:
            raw, owner, path = waiting.pop()
            if raw in self.live:
                continue
            try:
                tree = self._reader.load_tree(TreeID(raw.hex()))
            except (NotFound, DataLoss) as exc:
                if owner is None:
                    continue
                raise _lost_error(raw, owner, path, exc) from exc
            self.live.add(raw)
            self.mark_contents([(content, owner, child_path(path, name)) for name, content in tree_contents(tree)])
            waiting += [
                (child, owner, child_path(path, name)) for name, child in tree_children(tree) if child not in self.live
            ]
            self._say()

    def mark_contents(self, waiting: list[Waiting]) -> None:
        """Mark contents, with the parts of lists. All are looked up at once."""
        while waiting:
            wanted = {raw: (owner, path) for raw, owner, path in waiting if raw not in self.live}
            found = self._index.find_many(list(wanted))
            waiting = []
            for raw, (owner, path) in wanted.items():
                entry = found.get(raw)
                if entry is None:
                    if owner is None:
                        continue
                    raise _lost_error(raw, owner, path)
                self.live.add(raw)
                if entry.kind == ObjectKind.LIST:
                    waiting += [(part, owner, path) for part in self._parts(raw, owner, path)]
        self._say()

    def _parts(self, raw: bytes, owner: str | None, path: bytes) -> list[bytes]:
        try:
            return [part for part, _ in self._reader.contents.chunk_list(raw).parts]
        except (NotFound, DataLoss) as exc:
            if owner is None:
                return []
            raise _lost_error(raw, owner, path, exc) from exc

    def mark_unowned(self, entry: IndexEntry) -> None:
        """Mark an object of a young pack."""
        if entry.kind == ObjectKind.TREE:
            self.mark_trees([(entry.id, None, b"")])
            self.live.add(entry.id)
        elif entry.kind == ObjectKind.LIST:
            self.mark_contents([(entry.id, None, b"")])
        else:
            self.live.add(entry.id)

    def mark_bases(self) -> None:
        """Mark the bases of deltas: a delta is worth nothing without its base."""
        frontier: list[bytes] = list(self.live)
        while frontier:
            further: list[bytes] = []
            for batch in batches(frontier, _BATCH):
                for entry in self._index.find_many(batch).values():
                    if entry.base is None or entry.base in self.live:
                        continue
                    if entry.kind == ObjectKind.LIST:
                        self.relist.add(entry.id)
                    else:
                        self.live.add(entry.base)
                        further.append(entry.base)
            missing = set(further).difference(*(self._index.find_many(batch) for batch in batches(further, _BATCH)))
            if missing:
                raw = min(missing).hex()
                what = f"the object {raw}, which needed deltas are made against, is missing"
                raise DataLoss(f"{what}: run `snapshotd check`; nothing was removed")
            frontier = further


def batches(ids: list[bytes], size: int) -> Iterable[list[bytes]]:
    """The ids in lists of at most `size`."""
    return (ids[start : start + size] for start in range(0, len(ids), size))


def _lost_error(raw: bytes, owner: str, path: bytes, cause: Exception | None = None) -> DataLoss:
    why = f" ({cause})" if cause is not None else ""
    what = f"the object {raw.hex()} is missing or damaged, and {owner_of(owner, path)}{why}"
    return DataLoss(f"{what}: run `snapshotd check`; nothing was removed")
