"""A repository in memory: the contract without packs. For tests of what stands above the repository."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from snapshotd.errors import NotFound
from snapshotd.repo.base import Reader, RepositoryWriter, Saved, Tree
from snapshotd.types import BlobID, Kind, RecordID, TreeID

_PIECE_BYTES = 1 << 20


class MemoryRepository(RepositoryWriter):
    """Ids are hashes, so equal things are one thing, as in the real one. Deltas, checksums and damage do not exist."""

    def __init__(self) -> None:
        self.contents: dict[BlobID, bytes] = {}
        self.trees: dict[TreeID, Tree] = {}
        self._records: dict[RecordID, bytes] = {}
        self.saved, self.epoch = Saved(0, 0, 0), ""

    def close(self) -> None:
        """Nothing to release."""

    def contains(self, object_id: BlobID | TreeID | RecordID) -> bool:
        return object_id in self.contents or object_id in self.trees or object_id in self._records

    def load_tree(self, tree_id: TreeID) -> Tree:
        if tree_id not in self.trees:
            raise NotFound(f"there is no tree {tree_id}")
        return self.trees[tree_id]

    def load_record(self, record_id: RecordID) -> bytes:
        if record_id not in self._records:
            raise NotFound(f"there is no record {record_id}")
        return self._records[record_id]

    def records(self) -> Iterator[tuple[RecordID, bytes]]:
        yield from self._records.items()

    def stored_bytes(self) -> int:
        return sum(map(len, self.contents.values()))

    def size_bytes(self, content: BlobID) -> int:
        return len(self._content(content))

    def load(self, content: BlobID) -> Iterator[bytes]:
        data = self._content(content)
        return (data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES))

    def read(self, content: BlobID, offset: int, length: int) -> bytes:
        return self._content(content)[offset : offset + length]

    def _content(self, content: BlobID) -> bytes:
        if content not in self.contents:
            raise NotFound(f"there is no content {content}")
        return self.contents[content]

    def save_bytes(self, data: bytes, previous: BlobID | None = None, name: bytes | None = None) -> BlobID:
        content = BlobID(hashlib.sha256(b"content" + data).hexdigest())
        self.contents[content] = bytes(data)
        return content

    def save_content(self, read: Reader, previous: BlobID | None = None) -> BlobID:
        pieces = []
        while piece := read(_PIECE_BYTES):
            pieces.append(piece)
        return self.save_bytes(b"".join(pieces), previous)

    def save_tree(self, tree: Tree, previous: TreeID | None = None) -> TreeID:
        names = [entry.name for entry in tree.entries]
        if names != sorted(set(names)) or any(
            name in (b"", b".", b"..") or b"/" in name or b"\0" in name for name in names
        ):
            raise ValueError("the entries of a tree are not in order")
        if tree.own.name or tree.own.kind is not Kind.DIRECTORY:
            raise ValueError("a tree's own row is not that of a directory")
        if any((one.kind is Kind.DIRECTORY) != (one.tree is not None) for one in tree.entries):
            raise ValueError("a directory in a tree has no tree, or something else has one")
        tree_id = TreeID(hashlib.sha256(b"tree" + repr(tree).encode()).hexdigest())
        self.trees[tree_id] = tree
        return tree_id

    def save_record(self, data: bytes, previous: RecordID | None = None) -> RecordID:
        record_id = RecordID(hashlib.sha256(b"record" + data).hexdigest())
        self._records[record_id] = bytes(data)
        return record_id

    def flush(self) -> None:
        """Nothing to do."""
