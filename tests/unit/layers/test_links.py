"""Which names of a layer are one file: what is found, and what a hostile tree cannot make of the search."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.kernel.files import DIR_FLAGS, open_dir, remove_tree
from snapshotd.layers import links

DEEP = 3000


@pytest.fixture
def layer(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "layer"
    path.mkdir()
    yield path
    fd = os.open(tmp_path, DIR_FLAGS)
    remove_tree(fd, "layer")  # too deep for pytest
    os.close(fd)


def _groups(layer: Path) -> list[links.Group]:
    fd = os.open(layer, DIR_FLAGS)
    try:
        return links.groups(fd)
    finally:
        os.close(fd)


def _deep(layer: Path, depth: int) -> int:
    """A chain of folders; a descriptor of the last."""
    fd = os.open(layer, DIR_FLAGS)
    for _ in range(depth):
        os.mkdir("d" * 20, dir_fd=fd)
        below = open_dir(fd, b"d" * 20)
        os.close(fd)
        fd = below
    return fd


def test_files_with_several_names(layer: Path) -> None:
    (layer / "a/b").mkdir(parents=True)
    for name, other in (("one", "a/two"), ("a/b/three", "a/b/four")):
        (layer / name).write_text(name)
        os.link(layer / name, layer / other)
    os.link(layer / "one", layer / "a/b/five")
    (layer / "alone").write_text("x")
    assert _groups(layer) == [(b"a/b/five", b"a/two", b"one"), (b"a/b/four", b"a/b/three")]


def test_a_deep_tree_is_walked_step_by_step(layer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not from its root for every folder."""
    fd = _deep(layer, DEEP)
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    os.link("file", "other", src_dir_fd=fd, dst_dir_fd=fd)
    os.close(fd)
    (layer / "first").write_text("x")
    os.link(layer / "first", layer / "second")
    opened = 0
    real = os.open

    def counting(*args: object, **kwargs: object) -> int:
        nonlocal opened
        opened += 1
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", counting)
    assert _groups(layer) == [(b"first", b"second")], "the kernel takes no path as long as the others'"
    assert opened < 2 * DEEP


def test_more_names_than_are_looked_at(layer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MAX_CANDIDATES", 60)
    for number in range(50):
        (layer / f"{number}").write_text("x")
        os.link(layer / f"{number}", layer / f"{number}b")
    found = _groups(layer)
    assert 5 <= len(found) <= 30
    for one, other in found:
        assert os.path.samefile(layer / one.decode(), layer / other.decode())
