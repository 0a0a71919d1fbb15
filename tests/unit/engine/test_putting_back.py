"""A rewind of a folder's files: what is there is compared at the instant at which it goes."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshotd.engine.folders.capture import TOP
from snapshotd.engine.folders.names import name_of, path_of
from snapshotd.engine.folders.rewinding import putting_back
from snapshotd.engine.folders.rewinding.out_place import facts_of, new_place
from snapshotd.engine.folders.rewinding.putting_back import PuttingBack
from snapshotd.kernel import files
from snapshotd.kernel.identity import HostUser
from snapshotd.trees import diff
from snapshotd.trees.stack_view import StackView
from tests.capabilities import require


class Folder:
    """A folder as its head has it, and the tree that it is to get."""

    def __init__(self, place: Path) -> None:
        self.path, self.trees = place / "folder", (place / "head", place / "to")
        self.path.mkdir()
        for tree in self.trees:
            (tree / os.fsdecode(TOP)).mkdir(parents=True)

    def write(self, head: dict[str, str], to: dict[str, str]) -> None:
        for top, content in zip(
            (self.path, *(tree / os.fsdecode(TOP) for tree in self.trees)), (head, head, to), strict=True
        ):
            for name, text in content.items():
                (top / name).parent.mkdir(parents=True, exist_ok=True)
                (top / name).write_text(text)

    def rewind(self) -> PuttingBack:
        fds = [os.open(path, os.O_RDONLY) for path in (self.path, *self.trees)]
        try:
            with StackView(fds[1:2]) as head, StackView(fds[2:]) as to:
                changes = [one for one in diff.diff(head, to, TOP) if one.path != TOP]
                done = PuttingBack(fds[0], HostUser(os.getuid(), os.getgid()), head, to, new_place())
                done.run(changes)
                return done
        finally:
            for fd in fds:
                os.close(fd)

    def files(self) -> dict[str, str]:
        return {str(one.relative_to(self.path)): one.read_text() for one in self.path.rglob("*") if one.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    require("root")
    yield Folder(tmp_path)
    assert not [one.name for one in (tmp_path / "folder").iterdir() if one.name.startswith(".snapshotd-")]


def test_all_kinds_of_changes_are_made(folder: Folder) -> None:
    folder.write(
        {"a": "2", "made": "x", "d/in": "x", "turned/in": "x"}, {"a": "1", "gone": "y", "e/f/in": "y", "turned": "y"}
    )
    assert folder.rewind().left == {}
    assert folder.files() == {"a": "1", "gone": "y", "e/f/in": "y", "turned": "y"}
    assert sorted(os.listdir(folder.path)) == ["a", "e", "gone", "turned"]


EDITS: dict[str, Callable[[Path], object]] = {
    "content": lambda path: path.write_text("a person's"),
    "same size": lambda path: path.write_text("3"),
    "mode": lambda path: path.chmod(0o600),
    "another kind": lambda path: (path.unlink(), path.symlink_to("x")),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "nothing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("name", ["a", "made"])
def test_another_file_than_the_heads_stays_and_is_named(folder: Folder, edit: str, name: str) -> None:
    folder.write({"a": "2", "made": "2"}, {"a": "1"})
    EDITS[edit](folder.path / name)
    if edit == "a directory":
        (folder.path / name / "in").write_text("a person's")
    before = (folder.path / name).lstat() if edit != "nothing" else None
    done = folder.rewind()
    assert list(done.left) == [name.encode()]
    if before is None:
        assert not (folder.path / name).exists()
    else:
        assert (folder.path / name).lstat().st_ino == before.st_ino


def test_a_name_that_somebody_took_is_not_replaced(folder: Folder) -> None:
    folder.write({"b": "x"}, {"b": "x", "gone": "1"})
    (folder.path / "gone").write_text("a person's")
    assert list(folder.rewind().left) == [b"gone"]
    assert (folder.path / "gone").read_text() == "a person's"


def linked(folder: Folder, head: str, to: str, names: tuple[str, ...] = ("a", "b", "d/c")) -> None:
    """One file with several names, in the folder and in both trees."""
    folder.write({names[0]: head, "d/x": "x"}, {names[0]: to, "d/x": "x"})
    for top in (folder.path, *(tree / os.fsdecode(TOP) for tree in folder.trees)):
        for name in names[1:]:
            os.link(top / names[0], top / name)


def test_all_names_of_a_file_go_back_and_stay_one(folder: Folder) -> None:
    linked(folder, "2", "1")
    done = folder.rewind()
    assert done.left == {}
    assert folder.files() == {"a": "1", "b": "1", "d/c": "1", "d/x": "x"}
    assert len({(folder.path / name).stat().st_ino for name in ("a", "b", "d/c")}) == 1
    st = (folder.path / "a").stat()
    assert st.st_nlink == 3
    assert set(done.done.values()) == {facts_of(st)}


def test_all_names_of_a_file_go(folder: Folder) -> None:
    folder.write({"a": "2", "x": "x"}, {"x": "x"})
    for top in (folder.path, folder.trees[0] / os.fsdecode(TOP)):
        os.link(top / "a", top / "b")
    assert folder.rewind().left == {}
    assert folder.files() == {"x": "x"}


def test_names_that_were_files_of_their_own_are_again(folder: Folder) -> None:
    folder.write({"a": "2"}, {"a": "1", "b": "1"})
    for top in (folder.path, folder.trees[0] / os.fsdecode(TOP)):
        os.link(top / "a", top / "b")
    assert folder.rewind().left == {}
    assert folder.files() == {"a": "1", "b": "1"}
    assert (folder.path / "a").stat().st_nlink == 1


@pytest.mark.parametrize("through", ["a", "b", "d/c"])
def test_no_name_of_a_file_that_a_person_changed_goes_back(folder: Folder, through: str) -> None:
    linked(folder, "2", "1")
    (folder.path / through).write_text("a person's")
    assert sorted(folder.rewind().left) == [b"a", b"b", b"d/c"]
    assert folder.files() == {"a": "a person's", "b": "a person's", "d/c": "a person's", "d/x": "x"}
    assert (folder.path / "a").stat().st_nlink == 3


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("how", ["later name", "held"])
def test_an_edit_while_the_names_of_a_file_go_back(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, at: int, how: str
) -> None:
    """Through the last name, which is there until its turn, or by a program that had the file open. No byte of it goes,
    and all names that came out have it again."""
    linked(folder, "2", "1")
    old = os.open(folder.path / "a", os.O_RDONLY)
    points = iter(range(100))

    def hit(point: str) -> None:
        if point == "engine.folders.exchanged" and next(points) == at:
            where = folder.path / "d/c" if how == "later name" and at < 2 else f"/proc/self/fd/{old}"
            fd = os.open(where, os.O_WRONLY | os.O_APPEND)
            os.write(fd, b" late")
            os.close(fd)

    monkeypatch.setattr(putting_back, "hit", hit)
    done = folder.rewind()
    os.close(old)
    assert sorted(done.left) == [b"a", b"b", b"d/c"]
    assert folder.files() == {"a": "2 late", "b": "2 late", "d/c": "2 late", "d/x": "x"}


def test_an_edit_of_the_new_file_is_no_change_of_the_rewinds(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    linked(folder, "2", "1")
    points = iter(range(100))

    def hit(point: str) -> None:
        if point == "engine.folders.exchanged" and next(points) == 0:
            (folder.path / "a").write_text("a person's")

    monkeypatch.setattr(putting_back, "hit", hit)
    done = folder.rewind()
    assert folder.files() == {"a": "a person's", "b": "a person's", "d/c": "a person's", "d/x": "x"}
    there = facts_of((folder.path / "a").stat())
    assert there not in done.done.values()


@pytest.mark.parametrize("mapped", [False, True])
def test_a_file_with_a_writer_stays(folder: Folder, mapped: bool) -> None:
    folder.write({"a": "2"}, {"a": "1"})
    file = (folder.path / "a").open("r+b", buffering=0)
    pages = mmap.mmap(file.fileno(), 1) if mapped else None
    if pages is not None:
        file.close()
    assert "open for writing" in folder.rewind().left[b"a"]
    if pages is None:
        file.write(b"9")
        file.close()
    else:
        pages[0] = ord("9")
        pages.close()
    assert (folder.path / "a").read_text() == "9"


@pytest.mark.parametrize("also", [False, True])
def test_an_edit_right_after_the_exchange_comes_back(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, also: bool
) -> None:
    """A program had the old file open, wrote after the comparison, and closed it. `also`: somebody wrote to the new one."""
    folder.write({"a": "2", "z": "2"}, {"a": "1", "z": "1"})
    old = os.open(folder.path / "a", os.O_RDONLY)
    points = iter(range(100))

    def at(point: str) -> None:
        if point == "engine.folders.exchanged" and next(points) == 1:  # "a" is done
            fd = os.open(f"/proc/self/fd/{old}", os.O_WRONLY)
            os.write(fd, b"late")
            os.close(fd)
            if also:
                (folder.path / "a").write_text("new")

    monkeypatch.setattr(putting_back, "hit", at)
    done = folder.rewind()
    os.close(old)
    found = folder.files()
    if also:
        (kept,) = found.keys() - {"a", "z"}
        assert (found["a"], found[kept], kept.partition(".kept-")[0]) == ("new", "late", "a")
        assert kept in done.left[b"a"]
    else:
        assert found == {"a": "late", "z": "1"}


def test_a_file_system_that_knows_no_exchange(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*_: object) -> None:
        raise OSError(errno.EINVAL, "the file system cannot")

    for name in ("exchange", "rename_no_replace"):
        monkeypatch.setattr(files, name, cannot)
    folder.write({"a": "2", "b": "2", "made": "2"}, {"a": "1", "b": "1", "gone": "1"})
    (folder.path / "b").write_text("a person's")
    assert list(folder.rewind().left) == [b"b"]
    assert folder.files() == {"a": "1", "b": "a person's", "gone": "1"}


@pytest.mark.parametrize("path", [b"a", b"\\xff", b"\xff", b"\\", b"\\\\xff", "ä/\u20ac".encode(), b"\n", b"\\x"])
def test_names_keep_their_bytes(path: bytes) -> None:
    assert path_of(name_of(path)) == path
    assert name_of(path).encode()
