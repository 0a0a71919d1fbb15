"""Repositories with known content, for the tests of damage and garbage collection."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from snapshotd.repo.base import Repository, RepositoryWriter, Roots, Tree, TreeEntry
from snapshotd.repo.reading.reader import PackReader
from snapshotd.repo.upkeep.maintenance import PackMaintenance
from snapshotd.repo.writing.writer import PackRepository
from snapshotd.store.base import Store
from snapshotd.store.local import LocalStore
from snapshotd.types import BlobID, Kind, RecordID, TreeID

KEY = bytes(range(32))
Files = dict[bytes, bytes]
"""Path to content. Directories are where paths have a slash."""


def silent(_text: str) -> None:
    """Progress that nobody looks at."""


class Opened(PackMaintenance):
    """A repository open for writing and upkeep, below one directory."""

    def __init__(self, directory: Path, store: Store | None = None) -> None:
        directory.mkdir(exist_ok=True)
        super().__init__(store or LocalStore(directory / "store"), directory / "index.db", KEY)

    @property
    def repo(self) -> PackRepository:
        return self.writer()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._store.close()


class OpenedReader(PackReader):
    """With a store of its own."""

    def __init__(self, directory: Path) -> None:
        self._own_store = LocalStore(directory / "store")
        try:
            super().__init__(self._own_store, directory / "index.db", KEY)
        except BaseException:
            self._own_store.close()
            raise

    def close(self) -> None:
        super().close()
        self._own_store.close()


def open_reader(directory: Path) -> PackReader:
    return OpenedReader(directory)


@dataclass
class Saved:
    """What saving a snapshot gave, and what is in it."""

    tree: TreeID
    record: RecordID
    output: BlobID
    files: Files
    trees: dict[bytes, TreeID]
    contents: dict[bytes, BlobID]
    output_bytes: bytes
    record_bytes: bytes


def save(writer: RepositoryWriter, files: Files, name: str, previous: Saved | None = None) -> Saved:
    """Save a snapshot like the archive does: with the earlier versions of the same paths as hints."""
    contents = {
        path: writer.save_bytes(data, previous.contents.get(path) if previous else None)
        for path, data in files.items()
        if data
    }
    trees: dict[bytes, TreeID] = {}
    folders = {path[:at] for path in files for at, char in enumerate(path) if char == 0x2F} | {b""}
    for folder in sorted(folders, key=lambda one: -one.count(b"/") - bool(one)):  # the deepest first
        trees[folder] = writer.save_tree(
            _tree(folder, files, contents, trees), previous.trees.get(folder) if previous else None
        )
    output, record = f"output of {name}\n".encode() * 30, f'{{"snapshot": "{name}", "tree": "{trees[b""]}"}}'.encode()
    saved_record = writer.save_record(record, previous.record if previous else None)
    return Saved(trees[b""], saved_record, writer.save_bytes(output), dict(files), trees, contents, output, record)


def _tree(folder: bytes, files: Files, contents: dict[bytes, BlobID], trees: dict[bytes, TreeID]) -> Tree:
    prefix = folder + b"/" if folder else b""
    entries: dict[bytes, TreeEntry] = {}
    for path, data in files.items():
        if not path.startswith(prefix):
            continue
        name, slash, _ = path[len(prefix) :].partition(b"/")
        if slash:
            entries[name] = TreeEntry(name, Kind.DIRECTORY, 0, 0, 0, 0, tree=trees[prefix + name])
        else:
            entries[name] = TreeEntry(name, Kind.FILE, 0o644, 0, 0, 1, len(data), contents.get(path))
    return Tree(TreeEntry(b"", Kind.DIRECTORY, 0o755, 0, 0, 5), tuple(entries[name] for name in sorted(entries)))


def load(reader: Repository, tree: TreeID) -> Files:
    """Everything below a tree, read back."""
    files: Files = {}
    waiting = [(b"", tree)]
    while waiting:
        prefix, current = waiting.pop()
        for entry in reader.load_tree(current).entries:
            path = prefix + entry.name
            if entry.tree is not None:
                waiting.append((path + b"/", entry.tree))
            else:
                files[path] = b"".join(reader.load(entry.content)) if entry.content is not None else b""
    return files


def roots_of(snapshots: Iterable[tuple[str, Saved]]) -> Roots:
    kept = list(snapshots)
    return Roots(
        {one.tree: name for name, one in kept},
        {one.output: name for name, one in kept},
        {one.record: name for name, one in kept},
    )


def is_as_saved(reader: Repository, saved: Saved) -> bool:
    return (
        load(reader, saved.tree) == saved.files
        and b"".join(reader.load(saved.output)) == saved.output_bytes
        and reader.load_record(saved.record) == saved.record_bytes
    )


@dataclass
class Author:
    """Makes up file trees that resemble each other, as the steps of an agent do."""

    rng: random.Random
    files: Files = field(default_factory=dict)
    big: bool = True

    def step(self) -> Files:
        """The files after some more changes."""
        rng = self.rng
        for _ in range(rng.randint(1, 6)):
            what = rng.random()
            if what < 0.35 or not self.files:
                path = b"/".join(b"d%d" % rng.randint(0, 3) for _ in range(rng.randint(0, 3))) + b"/f%d" % rng.randint(
                    0, 30
                )
                self._set(path.lstrip(b"/"), self._content())
            elif what < 0.75:
                path = rng.choice(sorted(self.files))
                data = self.files[path]
                at = rng.randint(0, len(data))
                self.files[path] = data[:at] + b"changed %d" % rng.randint(0, 99) + data[at + rng.randint(0, 20) :]
            else:
                del self.files[rng.choice(sorted(self.files))]
        return dict(self.files)

    def _set(self, path: bytes, data: bytes) -> None:
        above = [path[:at] for at, char in enumerate(path) if char == 0x2F]
        if not any(one in self.files for one in above):  # a file cannot be a folder
            self.files[path] = data

    def _content(self) -> bytes:
        kind = self.rng.random()
        if kind < 0.1:
            return b""
        if kind < 0.5:
            return b"".join(
                b"line %d of some text\n" % self.rng.randint(0, 999) for _ in range(self.rng.randint(1, 200))
            )
        if kind < 0.95 or not self.big:
            return self.rng.randbytes(self.rng.randint(1, 5000))
        return self.rng.randbytes(self.rng.randint(300_000, 1_500_000))
