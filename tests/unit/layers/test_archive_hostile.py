"""Layers that fight back while they are archived: what was listed is swapped, cut, or deeper than any path."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from archive_rig import Recorder, at, layer, names, run

from snapshotd.errors import DataLoss
from snapshotd.kernel.files import DIR_FLAGS, open_dir, remove_tree
from snapshotd.trees import archive, archive_data, archive_links
from snapshotd.trees.archive import apply
from snapshotd.types import BlobID, TreeID
from tests.memory_repository import MemoryRepository


def open_fds() -> set[str]:
    """Garbage of other tests may close some at any time."""
    return set(os.listdir("/proc/self/fd"))


class Meddler(Recorder):
    """Changes the layer when the first content is saved."""

    def __init__(self, meddle: list[tuple[Path, Path]]) -> None:
        super().__init__()
        self.renames = meddle

    def save_bytes(self, data: bytes, previous: BlobID | None = None, name: bytes | None = None) -> BlobID:
        while self.renames:
            source, target = self.renames.pop(0)
            os.rename(source, target)
        return super().save_bytes(data, previous, name)


def test_a_directory_swapped_for_a_link_is_not_followed(tmp_path: Path) -> None:
    secret = layer(tmp_path / "secret", {"key": "the secret of the host"})
    root = layer(tmp_path / "l", {"z": "1", "d/key": "mine"})
    os.symlink(secret, tmp_path / "trap")
    repository, before = Meddler([(root / "d", tmp_path / "aside"), (tmp_path / "trap", root / "d")]), open_fds()
    with pytest.raises(OSError) as caught:
        run(repository, root)
    assert caught.value.errno in (errno.ELOOP, errno.ENOTDIR)
    assert list(repository.contents.values()) == [b"1"]
    assert open_fds() <= before


def test_a_directory_swapped_for_another_is_not_read(tmp_path: Path) -> None:
    secret = layer(tmp_path / "secret", {"key": "the secret of the host"})
    root = layer(tmp_path / "l", {"z": "1", "d/key": "mine"})
    repository = Meddler([(root / "d", tmp_path / "aside"), (secret, root / "d")])
    with pytest.raises(OSError, match="replaced") as caught:
        run(repository, root)
    assert caught.value.errno == errno.ESTALE
    assert list(repository.contents.values()) == [b"1"]


@pytest.mark.parametrize("kind", ["link", "fifo", "file", "directory"])
def test_a_file_swapped_between_listing_and_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    root = layer(tmp_path / "l", {"f": "mine"})
    trap = tmp_path / "trap"
    if kind == "link":
        os.symlink(layer(tmp_path / "secret", {"key": "host"}) / "key", trap)
    elif kind == "fifo":
        os.mkfifo(trap)
    elif kind == "file":
        trap.write_text("host")
    else:
        trap.mkdir()
    repository = Recorder()
    real = archive_links.stat_within

    def swap(dir_fd: int, name: bytes, device: int) -> os.stat_result:
        st = real(dir_fd, name, device)
        os.unlink(root / "f")
        os.rename(trap, root / "f")
        return st

    monkeypatch.setattr(archive, "stat_within", swap)
    before = open_fds()
    with pytest.raises(OSError) as caught:
        run(repository, root)
    assert caught.value.errno == (errno.ELOOP if kind == "link" else errno.ESTALE)  # a link's target is not even opened
    assert repository.contents == {}
    assert open_fds() <= before


def test_a_file_cut_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = layer(tmp_path / "l", {"f": "x" * 10_000})
    real = archive_data.find_extents

    def cut(fd: int, size: int, *more: Any) -> object:
        found = real(fd, size, *more)
        os.truncate(root / "f", 10)
        return found

    monkeypatch.setattr(archive, "find_extents", cut)
    with pytest.raises(DataLoss, match="'f'"):
        run(MemoryRepository(), root)


def test_a_tree_deeper_than_any_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = layer(tmp_path / "l", {"top": "1"})
    depth, name = 6000, b"d" * 200
    fd = os.open(root, DIR_FLAGS)
    for _ in range(depth):
        os.mkdir(name, dir_fd=fd)
        deeper = open_dir(fd, name)
        os.close(fd)
        fd = deeper
    os.close(os.open(b"end", os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=fd))
    os.link(b"end", b"twin", src_dir_fd=fd, dst_dir_fd=fd)
    os.close(fd)
    try:
        repository, before = Recorder(), open_fds()
        most, save_tree = 0, repository.save_tree

        def look(*args: Any) -> TreeID:
            nonlocal most
            most = max(most, len(os.listdir("/proc/self/fd")))
            return save_tree(*args)

        monkeypatch.setattr(repository, "save_tree", look)
        fd = os.open(root, DIR_FLAGS)
        applied = apply(repository, fd, None, salt=b"salt")
        os.close(fd)
        assert most < len(before) + 300
        assert open_fds() <= before
        assert applied.entries == depth + 3
        tree: TreeID | None = applied.tree
        for _ in range(depth):
            assert tree is not None
            tree = repository.trees[tree].entries[0].tree
        assert names(repository, tree) == [b"end", b"twin"]
        path = (name + b"/") * depth + b"end"
        expected = int.from_bytes(hashlib.blake2b(b"salt" + path, digest_size=8).digest())
        assert repository.trees[tree or TreeID("")].entries[1].link == expected
        again = run(repository, layer(tmp_path / "next", {"top": "2"}), applied.tree)
        assert at(repository, again.tree, name) is at(repository, applied.tree, name)
    finally:
        fd = os.open(tmp_path, DIR_FLAGS)
        remove_tree(fd, b"l")
        os.close(fd)
