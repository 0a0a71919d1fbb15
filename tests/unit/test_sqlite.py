"""SQLite's files as a whole: put out of the way with what belongs to them."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from snapshotd import sqlite
from snapshotd.sqlite import Database, Form

FORM = Form("the shelf", 0x7E57, 1, 1, "buy another one")
DURABLE = replace(FORM, durable_commits=True)


def left_by_a_crash(folder: Path) -> Path:
    """A database with one row, which is in its log only."""
    made = folder / "made" / "shelf.db"
    made.parent.mkdir()
    sqlite.create(made, FORM, "PRAGMA user_version = 1; CREATE TABLE books (name TEXT)")
    db = Database(made, FORM)
    with db.transaction():
        db.write("INSERT INTO books VALUES ('Emma')")
    left = folder / "left"
    shutil.copytree(made.parent, left)
    db.close()
    return left / "shelf.db"


def books(path: Path) -> list[str]:
    db = Database(path, FORM)
    try:
        return [row[0] for row in db.read("SELECT name FROM books")]
    finally:
        db.close()


def test_what_is_set_aside_keeps_its_log(tmp_path: Path) -> None:
    path = left_by_a_crash(tmp_path)
    kept = path.with_name("kept.db")
    sqlite.set_aside(path, kept)
    assert [one.name for one in path.parent.iterdir() if one.name.startswith("shelf")] == []
    sqlite.create(path, FORM, "PRAGMA user_version = 1; CREATE TABLE books (name TEXT)")
    assert (books(path), books(kept)) == ([], ["Emma"])


def test_a_database_is_never_without_its_log(tmp_path: Path) -> None:
    path = left_by_a_crash(tmp_path)
    kept = path.with_name("kept.db")
    Path(f"{kept}-wal").mkdir()  # a file cannot be given this name
    with pytest.raises(OSError, match="shelf"):
        sqlite.set_aside(path, kept)
    assert not path.exists()
    assert kept.exists()


def test_nothing_to_set_aside_is_no_error(tmp_path: Path) -> None:
    sqlite.set_aside(tmp_path / "shelf.db", tmp_path / "kept.db")
    assert list(tmp_path.iterdir()) == []


def test_a_durable_commit_does_not_lengthen_the_log(tmp_path: Path) -> None:
    path = tmp_path / "shelf.db"
    sqlite.create(path, DURABLE, "PRAGMA user_version = 1; CREATE TABLE books (name TEXT)")
    db = Database(path, DURABLE)
    lengths = set()
    for number in range(60):  # 240 KiB of frames
        with db.transaction():
            db.write("INSERT INTO books VALUES (?)", (f"{number}",))
        lengths.add(Path(f"{path}-wal").stat().st_size)
    assert len(lengths) == 1
    for _ in range(2000):
        with db.transaction():
            db.write("INSERT INTO books VALUES ('more')")
    assert Path(f"{path}-wal").stat().st_size < 6 << 20
    assert db.problems() == []
    db.close()
    assert not Path(f"{path}-wal").exists()


@pytest.mark.parametrize("commits", [0, 1, 30])
def test_a_log_whose_end_is_room_is_read_after_a_crash(tmp_path: Path, commits: int) -> None:
    made = tmp_path / "made" / "shelf.db"
    made.parent.mkdir()
    sqlite.create(made, DURABLE, "PRAGMA user_version = 1; CREATE TABLE books (name TEXT)")
    db = Database(made, DURABLE)
    for number in range(commits):
        with db.transaction():
            db.write("INSERT INTO books VALUES (?)", (f"{number}",))
    with db.transaction():
        db.write("INSERT INTO books VALUES ('never')")
        db._make_room()
        shutil.copytree(made.parent, tmp_path / "left", ignore=shutil.ignore_patterns("*-shm"))
    db.close()
    left = tmp_path / "left" / "shelf.db"
    assert Path(f"{left}-wal").stat().st_size >= 1 << 20
    assert books(left) == [f"{number}" for number in range(commits)]


@pytest.mark.parametrize("part", [0, 4096])
def test_room_that_the_disk_does_not_have_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    """Nor is the part that it has taken."""
    path = tmp_path / "shelf.db"
    sqlite.create(path, DURABLE, "PRAGMA user_version = 1; CREATE TABLE books (name TEXT)")
    db = Database(path, DURABLE)

    write, log = os.pwrite, Path(f"{path}-wal")

    def full(fd: int, data: bytes, at: int) -> int:
        if not part:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[:part], at)

    monkeypatch.setattr(os, "pwrite", full)
    with db.transaction():
        db.write("INSERT INTO books VALUES ('Emma')")
    monkeypatch.undo()
    assert log.stat().st_size % (4096 + 24) == 32
    db.close()
    assert books(path) == ["Emma"]
