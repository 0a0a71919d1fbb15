"""Deleting trees that somebody else has made."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
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


def test_names_are_listed_once_however_many_siblings(
    tmp_path: Path, parent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(300):
        (tmp_path / "t" / str(number) / "x").mkdir(parents=True)
        (tmp_path / "t" / str(number) / "f").touch()
    real, listed = os.listdir, 0

    def counted(fd: int) -> list[str]:
        nonlocal listed
        names = real(fd)
        listed += len(names)
        return names

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", counted)
        files.remove_tree(parent, b"t")
    assert os.listdir(tmp_path) == []
    assert listed == 3 * 300


def test_deep_siblings_are_listed_once_and_few_are_open(
    tmp_path: Path, parent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything at the deepest level that is held open is moved up, and is not looked at again and again there
    either."""
    (tmp_path / "t").mkdir()
    chain(tmp_path / "t", "d", MAX_DEPTH - 1)
    fd = files.open_deep(parent, b"/".join([b"t", *[b"d"] * (MAX_DEPTH - 1)]))
    for number in range(50):
        os.mkdir(str(number), dir_fd=fd)
        os.mkdir(f"{number}/x", dir_fd=fd)
    os.close(fd)
    before = len(os.listdir("/proc/self/fd"))
    real, listed, most = os.listdir, 0, 0

    def counted(fd: int) -> list[str]:
        nonlocal listed, most
        names = real(fd)
        listed, most = listed + len(names), max(most, len(real("/proc/self/fd")))
        return names

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", counted)
        files.remove_tree(parent, b"t")
    assert os.listdir(tmp_path) == []
    assert (
        listed == (MAX_DEPTH - 1) + 1 + 50 + 50 + 50
    )  # the chain with its end, each sibling where it was and moved up, what it holds
    assert most <= before + MAX_DEPTH
    assert len(os.listdir("/proc/self/fd")) <= before


def before_first_open(monkeypatch: pytest.MonkeyPatch, act: Callable[[str], object]) -> None:
    """Do `act` when the top has been listed, with the name that is opened next."""
    real = files.open_dir

    def racing(fd: int, name: bytes) -> int:
        monkeypatch.setattr(files, "open_dir", real)
        act(os.fsdecode(name))
        return real(fd, name)

    monkeypatch.setattr(files, "open_dir", racing)


def two_directories(top: Path) -> None:
    for name in ("a", "b"):
        (top / name).mkdir(parents=True)
        (top / name / "f").touch()


@pytest.mark.parametrize("whose", ["opened", "waiting"])
@pytest.mark.parametrize("then", ["gone", "file", "link"])
def test_a_directory_that_changes_after_it_was_listed(
    tmp_path: Path, parent: int, monkeypatch: pytest.MonkeyPatch, whose: str, then: str
) -> None:
    top = tmp_path / "t"
    two_directories(top)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").touch()

    def change(opened: str) -> None:
        path = top / (opened if whose == "opened" else {"a": "b", "b": "a"}[opened])
        shutil.rmtree(path)
        if then == "file":
            path.touch()
        elif then == "link":
            path.symlink_to(tmp_path / "outside")

    before_first_open(monkeypatch, change)
    files.remove_tree(parent, b"t")
    assert os.listdir(tmp_path) == ["outside"]
    assert os.listdir(tmp_path / "outside") == ["kept"]


def test_what_appears_after_the_listing_goes_too(tmp_path: Path, parent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    top = tmp_path / "t"
    two_directories(top)

    def add(opened: str) -> None:
        (top / "new" / "sub").mkdir(parents=True)
        (top / "new" / "sub" / "f").touch()
        (top / opened / "more").mkdir()
        (top / "file").touch()

    before_first_open(monkeypatch, add)
    files.remove_tree(parent, b"t")
    assert os.listdir(tmp_path) == []


def test_a_mount_is_an_error_that_leaves_nothing_open(
    tmp_path: Path, parent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t" / "a" / "b" / "c" / "d").mkdir(parents=True)
    before = len(os.listdir("/proc/self/fd"))
    depth = 0

    def mounted(fd: int, device: int | None) -> None:
        nonlocal depth
        depth += 1
        if depth == 3:
            raise OSError(errno.EBUSY, "something is mounted there")

    monkeypatch.setattr(files, "_check_device", mounted)
    with pytest.raises(OSError, match="mounted there"):
        files.remove_tree(parent, b"t", one_device=True)
    assert (tmp_path / "t" / "a" / "b" / "c" / "d").is_dir()
    assert len(os.listdir("/proc/self/fd")) <= before
