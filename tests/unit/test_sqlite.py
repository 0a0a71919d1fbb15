"""SQLite's files as a whole: put out of the way with what belongs to them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from snapshotd import sqlite
from snapshotd.sqlite import Database, Form

FORM = Form("the shelf", 0x7E57, 1, 1, "buy another one")


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
