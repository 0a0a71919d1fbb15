"""A repository that remembers, and layers to apply to it."""

from __future__ import annotations

import os
from pathlib import Path

from snapshotd.kernel.files import DIR_FLAGS
from snapshotd.repo.base import Reader, Tree, TreeEntry
from snapshotd.trees.archive import Applied, apply
from snapshotd.types import BlobID, Kind, TreeID
from tests.memory_repository import MemoryRepository


class Recorder(MemoryRepository):
    """Remembers what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[TreeID] = []
        self.saved_trees: list[tuple[TreeID, TreeID | None]] = []
        self.saved_contents: list[tuple[int, BlobID | None]] = []
        self.streamed = 0

    def load_tree(self, tree_id: TreeID) -> Tree:
        self.loaded.append(tree_id)
        return super().load_tree(tree_id)

    def save_tree(self, tree: Tree, previous: TreeID | None = None) -> TreeID:
        tree_id = super().save_tree(tree, previous)
        self.saved_trees.append((tree_id, previous))
        return tree_id

    def save_bytes(self, data: bytes, previous: BlobID | None = None, name: bytes | None = None) -> BlobID:
        self.saved_contents.append((len(data), previous))
        return super().save_bytes(data, previous, name)

    def save_content(self, read: Reader, previous: BlobID | None = None) -> BlobID:
        self.streamed += 1
        return super().save_content(read, previous)

    def forget(self) -> None:
        self.loaded, self.saved_trees, self.saved_contents, self.streamed = [], [], [], 0


def run(
    repository: MemoryRepository,
    layer: Path,
    parent: TreeID | None = None,
    *,
    salt: bytes = b"salt",
    marks: bool = True,
) -> Applied:
    fd = os.open(layer, DIR_FLAGS)
    try:
        return apply(repository, fd, parent, salt=salt, marks=marks)
    finally:
        os.close(fd)


def at(repository: MemoryRepository, tree: TreeID, path: bytes) -> TreeEntry:
    """The entry at a path, as it is stored in its directory."""
    entry = TreeEntry(b"", Kind.DIRECTORY, 0, 0, 0, 0, tree=tree)
    for name in path.split(b"/"):
        assert entry.tree is not None
        entry = {entry.name: entry for entry in MemoryRepository.load_tree(repository, entry.tree).entries}[name]
    return entry


def names(repository: MemoryRepository, tree: TreeID | None) -> list[bytes]:
    assert tree is not None
    return [entry.name for entry in repository.trees[tree].entries]


def layer(root: Path, files: dict[str, str]) -> Path:
    root.mkdir()
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
