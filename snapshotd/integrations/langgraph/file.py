"""The file of a saver and a store: its form, its tables, and how an older one is brought to the present format.

A thread belongs to a family, and a copy of it to the same one. Pieces are shared within a family: so a copy costs
nothing, and to forget a thread no other family is looked at.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from snapshotd.errors import DataLoss
from snapshotd.sqlite import Database, Form, create, creating

FORM = Form(
    "the checkpoint file",
    application_id=0x736E6C67,  # "snlg"
    version=1,
    oldest=0,
    remedy="restore it from a backup",
    durable_commits=True,
    pragmas="PRAGMA cell_size_check = ON; PRAGMA foreign_keys = OFF;",
    checksums=True,
)

_FIRST = """
CREATE TABLE secret (hash_key BLOB NOT NULL);
INSERT INTO secret VALUES (randomblob(32));
CREATE TABLE family (pk INTEGER PRIMARY KEY AUTOINCREMENT, epoch INTEGER NOT NULL DEFAULT 0);
CREATE TABLE thread (
    pk INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, family INTEGER NOT NULL
);
CREATE INDEX thread_family ON thread (family);
CREATE TABLE space (
    pk INTEGER PRIMARY KEY AUTOINCREMENT, thread INTEGER NOT NULL, ns TEXT NOT NULL, UNIQUE (thread, ns)
);
CREATE TABLE checkpoint (
    pk INTEGER PRIMARY KEY AUTOINCREMENT,
    space INTEGER NOT NULL,
    id TEXT NOT NULL,
    parent INTEGER,
    shown INTEGER NOT NULL DEFAULT 0,
    metadata TEXT,
    body BLOB,
    snapshot TEXT,
    trajectory TEXT,
    UNIQUE (space, id)
);
CREATE INDEX checkpoint_snapshot ON checkpoint (snapshot) WHERE snapshot IS NOT NULL;
CREATE INDEX checkpoint_trajectory ON checkpoint (trajectory) WHERE trajectory IS NOT NULL;
CREATE TABLE call (
    pk INTEGER PRIMARY KEY,
    checkpoint INTEGER NOT NULL,
    name TEXT NOT NULL,
    trajectory TEXT NOT NULL,
    before TEXT NOT NULL,
    after TEXT
);
CREATE INDEX call_checkpoint ON call (checkpoint, name);
CREATE INDEX call_after ON call (after) WHERE after IS NOT NULL;
CREATE TABLE home (trajectory TEXT PRIMARY KEY, snapshot TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE writes (
    checkpoint INTEGER NOT NULL,
    task TEXT NOT NULL,
    idx INTEGER NOT NULL,
    path TEXT NOT NULL,
    channel TEXT NOT NULL,
    value BLOB NOT NULL,
    PRIMARY KEY (checkpoint, task, idx)
) WITHOUT ROWID;
CREATE TABLE piece (
    pk INTEGER PRIMARY KEY AUTOINCREMENT,
    family INTEGER NOT NULL,
    hash BLOB NOT NULL,
    data BLOB NOT NULL,
    UNIQUE (family, hash)
);
CREATE TABLE recipe (pk INTEGER PRIMARY KEY AUTOINCREMENT, family INTEGER NOT NULL, pieces BLOB NOT NULL);
CREATE INDEX recipe_family ON recipe (family);
CREATE TABLE item (
    pk INTEGER PRIMARY KEY,
    tenant TEXT NOT NULL,
    ns TEXT NOT NULL,
    key TEXT NOT NULL,
    value TEXT NOT NULL,
    created_ns INTEGER NOT NULL,
    updated_ns INTEGER NOT NULL,
    expires_ns INTEGER,
    ttl_ns INTEGER,
    UNIQUE (tenant, ns, key)
);
CREATE INDEX item_expires ON item (expires_ns) WHERE expires_ns IS NOT NULL;
CREATE VIRTUAL TABLE item_text USING fts5 (text, content = '', contentless_delete = 1, tokenize = "unicode61 remove_diacritics 2");
CREATE TABLE item_vector (item INTEGER NOT NULL, number INTEGER NOT NULL, vector BLOB NOT NULL, PRIMARY KEY (item, number)) WITHOUT ROWID;
"""
"""A checkpoint with `shown` = 0 is none that a caller sees. Without a body it is only a name: it was written to, or
named as a parent, before it was stored. With one it was removed, and later ones need its writes (removal.py). Row
numbers are never used again (AUTOINCREMENT), so what a process remembers under one is never something else.

A checkpoint with a snapshot is bound to a sandbox's files (daemon/bindings.py): `trajectory` is the one that goes on from it,
NULL until a fork is made for it. A call is written before it is made, `after` once its snapshot is known. `home` is what
a sandbox that was given to a saver held at first.

`item` is the store's. Its `ns` has a NUL behind each label: what begins with "a\\0" is the namespace ("a",) or below it,
and never ("ab",)."""

MIGRATIONS = (_FIRST,)
"""Each makes format n+1 of format n. An older release refuses a newer format."""


def open_file(path: str | Path) -> Database:
    """Open the file, made when there is none and brought to the present format when it is older; ":memory:" for none.
    Several processes may do so at once. NotFound: no such folder; NotPermitted; VersionMismatch: of a newer release;
    DataLoss: damaged, or no such file."""
    if path == ":memory:":
        database = Database(":memory:", FORM)
    else:
        path = Path(path).absolute()
        with creating(f"{FORM.what} {path}"):
            _make(path)
        database = Database(path, FORM)
    try:
        _migrate(database)
    except BaseException:
        database.close()
        raise
    return database


def _make(path: Path) -> None:
    """Make the file if there is none. One process at a time: a second one would replace the first one's file."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not path.exists():
            fcntl.flock(folder, fcntl.LOCK_EX)
            if not path.exists():
                _check_log(path)
                create(path, FORM)
    finally:
        os.close(folder)


def _check_log(path: Path) -> None:
    """DataLoss when a log says that there was a file: a new one in its place would hide that all threads are gone."""
    log = path.with_name(f"{path.name}-wal")
    if log.exists() and log.stat().st_size:
        raise DataLoss(
            f"{FORM.what} {path} is missing although its log {log.name} is there: {FORM.remedy}, or remove the log, too, to begin anew"
        )


def _migrate(database: Database) -> None:
    """Bring the tables to the present format in one transaction, however many processes try."""
    if database.pragma("user_version") == FORM.version:
        return
    with database.transaction():
        for script in MIGRATIONS[database.pragma("user_version") :]:
            for statement in filter(str.strip, script.split(";")):
                database.write(statement)
        database.write(f"PRAGMA user_version = {FORM.version}")
