"""The catalog's file: opened, made when there is none, and brought to the current schema. Knows no table."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from snapshotd.catalog import schema
from snapshotd.sqlite import Database, Form, create, creating, read_without_log

_REMEDY = "restore it from a backup, or make it again from the repository with `snapshotd daemon --rebuild-catalog`"
_PRAGMAS = """
PRAGMA foreign_keys = ON;
PRAGMA cell_size_check = ON;   -- find damaged pages when they are read
"""
FORM = Form(
    "the catalog",
    schema.APPLICATION_ID,
    schema.VERSION,
    schema.OLDEST,
    _REMEDY,
    pragmas=_PRAGMAS,
    checksums=True,
    keeps_log=True,
)


def open_database(path: Path | Literal[":memory:"]) -> Database:
    """Open the catalog, creating or migrating it as needed. Also: NotFound (no such folder)."""
    if path != ":memory:":
        with creating(f"{FORM.what} {path}"):
            exists = path.exists()
        if not exists:
            create(path, FORM, schema.script(0))
    database = Database(path, FORM)
    try:
        version = database.pragma("user_version")
        if version < schema.VERSION:
            with database.transaction():
                database.write(schema.script(version))
    except BaseException:
        database.close()
        raise
    return database


def meta_in_file(path: Path, key: str) -> str | None:
    """A named fact as the file alone has it, without its log; None if there is none. Changes nothing. DataLoss."""
    tables = read_without_log(path, FORM, "SELECT 1 FROM sqlite_master WHERE name = 'meta'")
    rows = read_without_log(path, FORM, "SELECT value FROM meta WHERE key = ?", (key,)) if tables else []
    return str(rows[0][0]) if rows else None
