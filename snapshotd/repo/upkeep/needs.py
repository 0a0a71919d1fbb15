"""The snapshots that need damaged objects: a walk over everything the roots reach, once per directory, from the leaves
up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from snapshotd.errors import DataLoss, NotFound
from snapshotd.repo.base import Fault, ObjectKind, Roots
from snapshotd.repo.format.index import Index
from snapshotd.repo.reading.reader import PackReader
from snapshotd.repo.upkeep.reach import child_path, tree_children, tree_contents
from snapshotd.terms import number_of
from snapshotd.types import TreeID

_EVERY = 10_000


def name_needs(
    reader: PackReader, index: Index, roots: Roots, damaged: dict[bytes, Fault], progress: Callable[[str], object]
) -> tuple[str, ...]:
    """Walk everything; give the faults in `damaged` their first owner and path, and add objects that turn out to be
    missing or damaged on the way. Returns the owners that cannot be read in full, sorted."""
    walk = _Walk(reader, index, damaged, progress)
    hurt: set[str] = set()
    for tree, owner in roots.trees.items():
        if not walk.tree(bytes.fromhex(tree), owner):
            hurt.add(owner)
    for content, owner in roots.contents.items():
        if not walk.whole([(b"", bytes.fromhex(content))], owner, b"", (ObjectKind.CHUNK, ObjectKind.LIST)):
            hurt.add(owner)
    for record, owner in roots.records.items():
        if not walk.whole([(b"", bytes.fromhex(record))], owner, b"", (ObjectKind.RECORD,)):
            hurt.add(owner)
    return tuple(sorted(hurt - {""}))  # "" stands for no owner


class _Node:
    """A directory in the course of the walk."""

    __slots__ = ("children", "path", "raw", "whole")

    def __init__(self, raw: bytes, path: bytes, whole: bool, children: list[tuple[bytes, bytes]]) -> None:
        self.raw, self.path, self.whole, self.children = raw, path, whole, children


class _Walk:
    def __init__(
        self, reader: PackReader, index: Index, damaged: dict[bytes, Fault], progress: Callable[[str], object]
    ) -> None:
        self._reader, self._index, self._damaged, self._progress = reader, index, damaged, progress
        self._whole: set[bytes] = set()
        self._broken: set[bytes] = set()

    def tree(self, top: bytes, owner: str) -> bool:
        """True if a directory and everything below it is there."""
        if top in self._whole or top in self._broken:
            return top in self._whole
        nodes = [self._enter(top, owner, b"")]
        while nodes:
            node = nodes[-1]
            if not node.children:
                (self._whole if node.whole else self._broken).add(node.raw)
                nodes.pop()
                if nodes:
                    nodes[-1].whole &= node.whole
                if len(self._whole) % _EVERY == 0 and self._whole:
                    self._progress(f"walked {number_of(len(self._whole), 'directory')}")
                continue
            name, child = node.children.pop()
            if child in self._broken:
                node.whole = False
            elif child not in self._whole:
                nodes.append(self._enter(child, owner, child_path(node.path, name)))
        return top in self._whole

    def _enter(self, raw: bytes, owner: str, path: bytes) -> _Node:
        try:
            tree = self._reader.load_tree(TreeID(raw.hex()))
        except (DataLoss, NotFound) as exc:
            self._need(raw, owner, path, exc.message)
            return _Node(raw, path, False, [])
        whole = self.whole([*tree_contents(tree)], owner, path, (ObjectKind.CHUNK, ObjectKind.LIST))
        if raw in self._damaged:  # it can be read from memory, or the index is wrong about it
            self._need(raw, owner, path, "")
            whole = False
        return _Node(raw, path, whole, [*tree_children(tree)])

    def whole(self, wanted: list[tuple[bytes, bytes]], owner: str, path: bytes, kinds: tuple[ObjectKind, ...]) -> bool:
        """True if all of these (name, object) are there and of one of these kinds. `damaged` also holds the objects
        that depend on a damaged one."""
        found = self._index.find_many(list({raw for _, raw in wanted}))
        whole = True
        for name, raw in wanted:
            entry = found.get(raw)
            place = child_path(path, name) if name else path
            if entry is None or entry.kind not in kinds:
                self._need(raw, owner, place, "it is missing" if entry is None else "it is something else")
            elif raw in self._damaged:
                self._need(raw, owner, place, "")
            else:
                continue
            whole = False
        return whole

    def _need(self, raw: bytes, owner: str, path: bytes, why: str) -> None:
        fault = self._damaged.get(raw) or Fault(why, None, raw.hex())
        self._damaged[raw] = fault if fault.owner is not None else replace(fault, owner=owner, path=path)
