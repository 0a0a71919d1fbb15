"""The index of all recorded text: a database of its own, which says in which records a word stands.

It is derived from the catalog and the recorded outputs, holds no text to read, and is made anew when it is missing, damaged
or of another version. A text is named by the snapshot that it came with, its kind and its part; `texts.py` reads it again
for an excerpt.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from snapshotd import sqlite
from snapshotd.catalog.base import NumberedSnapshot
from snapshotd.engine.search.texts import Text
from snapshotd.errors import DataLoss, InternalError, Unsupported, VersionMismatch
from snapshotd.sqlite import Database, Form
from snapshotd.types import SnapshotID, TrajectoryID

FORM = Form(
    "the index of texts",
    application_id=0x736E6669,  # "snfi"
    version=1,
    oldest=1,
    remedy="remove it; the daemon makes it anew",
    pragmas="PRAGMA cell_size_check = ON; PRAGMA cache_size = -4096; PRAGMA journal_size_limit = 4194304;",
)
_TOKENS = "tokenize = 'unicode61 remove_diacritics 2'"
_SCRIPT = f"""
CREATE TABLE snapshots (
    pk         INTEGER PRIMARY KEY,     -- its row in the catalog
    id         TEXT NOT NULL,
    trajectory TEXT NOT NULL,
    seq        INTEGER NOT NULL
) STRICT;
CREATE INDEX snapshots_by_trajectory ON snapshots (trajectory);
CREATE TABLE records (
    pk       INTEGER PRIMARY KEY,       -- its row in texts
    snapshot INTEGER NOT NULL,
    kind     TEXT NOT NULL,
    part     TEXT NOT NULL,
    cut      INTEGER NOT NULL
) STRICT;
CREATE INDEX records_by_snapshot ON records (snapshot);
-- `line` is one word, the trajectory's id: so a search in one trajectory does not look at the hits of all others.
CREATE VIRTUAL TABLE texts USING fts5(line, text, content = '', contentless_delete = 1, {_TOKENS});
PRAGMA user_version = {FORM.version};
"""
WORDS_MAX = 32
_CONTEXT_TOKENS = 32
_BEGIN, _END = "\x01", "\x02"
"""Marks of a match in an excerpt. No text has them (`texts.py`)."""


class FoundText(NamedTuple):
    """A record with a match. `number`: its place in the order of hits."""

    number: int
    snapshot: SnapshotID
    kind: str
    part: str
    cut: bool


class TextIndex:
    """Thread-safe. Errors: those of `sqlite.Database`, and Unsupported (SQLite has no FTS5); DataLoss: it has to be made anew.
    The file is opened when it is first used, so that a daemon starts on a full disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._opened: Database | None = None
        self._closed = False

    @property
    def _db(self) -> Database:
        with self._lock:
            if self._opened is None:
                if self._closed:
                    raise InternalError(f"{FORM.what} was used after it was closed")
                self._opened = self._open()
            return self._opened

    def _open(self) -> Database:
        if not self._path.exists():
            self._create()
        try:
            return Database(self._path, FORM)
        except (DataLoss, VersionMismatch):
            self._create()
            return Database(self._path, FORM)

    def _create(self) -> None:
        try:
            sqlite.create(self._path, FORM, _SCRIPT)
        except OSError as exc:
            if "no such module" not in str(exc):
                raise
            raise Unsupported(
                f"{FORM.what} cannot be made ({exc}): the SQLite in use needs the module FTS5; install apsw from PyPI, whose "
                "wheels have it"
            ) from exc

    def start_anew(self) -> None:
        """Give up all content."""
        with self._lock:
            if self._opened is not None:
                self._opened.close()
                self._opened = None
            sqlite.remove(self._path)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._closed = True
            if self._opened is not None:
                self._opened.close()
                self._opened = None

    def rows(self, after: int, last: int | None) -> list[NumberedSnapshot]:
        """The snapshots in these rows of the catalog, (after, last], as they were when they were added."""
        found = self._db.read(
            "SELECT pk, id, trajectory, seq FROM snapshots WHERE pk > ? AND pk <= ? ORDER BY pk",
            (after, (1 << 62) if last is None else last),
        )
        return [NumberedSnapshot(*row) for row in found]

    def count(self) -> int:
        """Number of snapshots."""
        return int(self._db.read("SELECT count(*) FROM snapshots")[0][0])

    def change(self, gone: Iterable[int], added: Iterable[tuple[NumberedSnapshot, Sequence[Text]]]) -> None:
        """Take snapshots away, by their rows, and add others with their texts; all or nothing."""
        db = self._db
        with db.transaction():
            for pk in gone:
                db.write("DELETE FROM texts WHERE rowid IN (SELECT pk FROM records WHERE snapshot = ?)", (pk,))
                db.write("DELETE FROM records WHERE snapshot = ?", (pk,))
                db.write("DELETE FROM snapshots WHERE pk = ?", (pk,))
            for snapshot, texts in added:
                db.write("INSERT INTO snapshots (pk, id, trajectory, seq) VALUES (?,?,?,?)", snapshot)
                for text in texts:
                    number = db.insert(
                        "INSERT INTO records (snapshot, kind, part, cut) VALUES (?,?,?,?)",
                        (snapshot.pk, text.kind, text.part, int(text.cut)),
                    )
                    db.write(
                        "INSERT INTO texts (rowid, line, text) VALUES (?,?,?)", (number, snapshot.trajectory, text.text)
                    )

    def forget(self, trajectory: TrajectoryID) -> None:
        """Take a trajectory's snapshots away."""
        self.change(
            [row[0] for row in self._db.read("SELECT pk FROM snapshots WHERE trajectory = ?", (trajectory,))], ()
        )

    def find(
        self,
        query: str,
        line: Sequence[tuple[TrajectoryID, int | None]],
        own: Collection[TrajectoryID] | None = None,
        *,
        before: int | None,
        limit: int,
    ) -> list[FoundText]:
        """Records that match, the newest first. `line`: only those of these trajectories, each up to a `seq`; empty: all.
        `own`: only those of these trajectories, however many; None: all. `query`: from `query_of`."""
        within = " OR ".join(f'"{trajectory}"' for trajectory, _ in line)
        match = f"text : ({query})" + (f" AND line : ({within})" if line else "")
        bounds = " OR ".join("s.trajectory = ?" + ("" if most is None else " AND s.seq <= ?") for _, most in line)
        values = [value for pair in line for value in pair if value is not None]
        found = self._db.read(
            "SELECT r.pk, s.id, r.kind, r.part, r.cut FROM texts f CROSS JOIN records r ON r.pk = f.rowid"
            " CROSS JOIN snapshots s ON s.pk = r.snapshot WHERE f.texts MATCH ? AND f.rowid < ?"
            f"{f' AND ({bounds})' if line else ''}"
            f"{'' if own is None else ' AND s.trajectory IN (SELECT value FROM json_each(?))'} ORDER BY f.rowid DESC LIMIT ?",
            (
                match,
                (1 << 62) if before is None else before,
                *values,
                *([] if own is None else [json.dumps([*own])]),
                limit,
            ),
        )
        return [
            FoundText(number, SnapshotID(snapshot), kind, part, bool(cut))
            for number, snapshot, kind, part, cut in found
        ]


def query_of(text: str) -> str | None:
    """A person's text in the language of FTS5: all of its words, "several words" in a row, word* by its beginning. All
    else in it is looked for as it stands. None: it has no word."""
    parts: list[str] = []
    rest = text
    while (rest := rest.strip()) and len(parts) < WORDS_MAX:
        closing = rest.find('"', 1) if rest.startswith('"') else -1
        if closing > 0:
            word, rest = rest[1:closing], rest[closing + 1 :]
            if rest.startswith("*"):
                word, rest = word + "*", rest[1:]
        else:
            word, *others = rest.split(None, 1)
            rest = others[0] if others else ""
        begins = word.endswith("*")
        if any(char.isalnum() for char in word):
            literal = word.rstrip("*").replace('"', '""').replace("\x00", " ")
            parts.append(f'"{literal}"' + (" *" if begins else ""))
    return " AND ".join(parts) or None


class Excerpts:
    """Cuts the place of the first match out of a text, by the same rules as the index. From one thread."""

    def __init__(self, query: str) -> None:
        self._query = query
        self._db = Database(":memory:", FORM)
        self._db.write(f"CREATE VIRTUAL TABLE one USING fts5(text, {_TOKENS})")

    def close(self) -> None:
        self._db.close()

    def make_excerpt(self, text: str) -> tuple[str, tuple[tuple[int, int], ...]]:
        """The excerpt, and where in it the matches are. Empty if there is none."""
        self._db.write("DELETE FROM one")
        self._db.write("INSERT INTO one (rowid, text) VALUES (1, ?)", (text,))
        row = self._db.read_one(
            "SELECT snippet(one, 0, ?, ?, '…', ?) FROM one WHERE one MATCH ?",
            (_BEGIN, _END, _CONTEXT_TOKENS, self._query),
        )
        return ("", ()) if row is None else _split_marks(row[0])


def _split_marks(marked: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    plain, matches = "", []
    for number, piece in enumerate(marked.split(_BEGIN)):
        match, _, after = piece.partition(_END) if number else ("", "", piece)
        if match:
            matches.append((len(plain), len(plain) + len(match)))
        plain += match + after
    return plain, tuple(matches)
