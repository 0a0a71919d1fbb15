"""Opening an index. One that another process has locked for a moment, as the one does that recovers the WAL of a killed
one, is waited for; one that lacks a table is damaged."""

from __future__ import annotations

import threading
from pathlib import Path

import apsw
import pytest

from snapshotd import sqlite
from snapshotd.errors import Conflict, DataLoss
from snapshotd.repo.format.index import Index, create_index


@pytest.fixture
def path(tmp_path: Path) -> Path:
    create_index(tmp_path / "index.db")
    return tmp_path / "index.db"


def _locked(path: Path) -> apsw.Connection:
    """Somebody who lets nobody else in."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    connection.execute("PRAGMA locking_mode = EXCLUSIVE; BEGIN IMMEDIATE; COMMIT").fetchall()
    return connection


@pytest.mark.parametrize("write", [False, True])
def test_it_is_waited_for(path: Path, write: bool) -> None:
    holder = _locked(path)
    opened: list[Index] = []
    waits = threading.Thread(target=lambda: opened.append(Index(path, write=write)))
    waits.start()
    waits.join(0.3)
    assert waits.is_alive()
    holder.close()
    waits.join(60)
    assert opened
    opened[0].close()


def test_not_for_ever(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "_BUSY_TIMEOUT_MS", 20)
    holder = _locked(path)
    with pytest.raises(Conflict, match="locked by another process"):
        Index(path, write=False)
    holder.close()


@pytest.mark.parametrize("script", ["DROP TABLE objects", "ALTER TABLE packs RENAME COLUMN bytes TO others"])
def test_a_missing_table_or_column_is_damage(path: Path, script: str) -> None:
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    connection.execute(script).fetchall()
    connection.close()
    found = Index(path, write=False)
    try:
        with pytest.raises(DataLoss, match="run `snapshotd repair`"):
            assert (found.find(bytes(32)), found.packs()) == (None, [])
    finally:
        found.close()
