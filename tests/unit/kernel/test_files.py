"""Deleting trees that somebody else has made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.kernel import files

MAX_DEPTH = 200
"""Levels that `remove_tree` holds open."""


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, files.DIR_FLAGS)
    yield fd
    os.close(fd)


def chain(top: Path, name: str, depth: int) -> None:
    fd = os.open(top, files.DIR_FLAGS)
    for _ in range(depth):
        os.mkdir(name, dir_fd=fd)
        deeper = files.open_dir(fd, os.fsencode(name))
        os.close(fd)
        fd = deeper
    os.close(os.open("end", os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=fd))
    os.close(fd)


def test_a_deep_tree_that_knows_where_it_is_moved_to(tmp_path: Path, parent: int) -> None:
    top = tmp_path / "t"
    (top / ".snapshotd-deep-0" / "x" / "y").mkdir(parents=True)
    for number in range(5):
        chain(top, f"c{number}", MAX_DEPTH + 5)
    files.remove_tree(parent, b"t")
    assert os.listdir(tmp_path) == []
