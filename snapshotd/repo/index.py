"""The index: which pack holds an object, and where. One SQLite file, which can be rebuilt from the packs alone.

Tables (`user_version` 2; ids are raw bytes):

    packs     number (primary key), id (16 bytes), bytes, objects (frames in it)
    objects   id (primary key), kind, pack (number), offset, stored (the whole frame), plain, base (id or NULL), depth (0: no delta)
    records   number (ascending in the order they were saved), id

Durability: WAL with synchronous=FULL, so a committed transaction survives power loss. The writer commits only after the packs are durable.
Concurrency: one writer (`open_index(write=True)`); any number of readers, which see each transaction as a whole. Thread-safe.
The file is made under another name and renamed, so an empty or cut one is damage. With packs but no index, opening says DataLoss.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import apsw

from snapshotd.errors import (
    NO_ROOM,
    Conflict,
    DataLoss,
    InternalError,
    NotPermitted,
    OutOfSpace,
    SnapshotdError,
    Unsupported,
    VersionMismatch,
)  # fmt: skip
from snapshotd.kernel import files
from snapshotd.repo.base import ObjectKind
from snapshotd.store.base import Store

INDEX_VERSION = 2
"""As in version 1, but there may be packs of version 2, which older versions of snapshotd do not read."""
APPLICATION_ID = 0x736E7078  # "snpx"
OLDEST_SQLITE = (3, 51, 3)  # older ones have the WAL-reset bug
_SCHEMA = """
CREATE TABLE packs (number INTEGER PRIMARY KEY, id BLOB NOT NULL UNIQUE, bytes INTEGER NOT NULL, objects INTEGER NOT NULL);
CREATE TABLE objects (
    id BLOB PRIMARY KEY, kind INTEGER NOT NULL, pack INTEGER NOT NULL REFERENCES packs(number), offset INTEGER NOT NULL,
    stored INTEGER NOT NULL, plain INTEGER NOT NULL, base BLOB, depth INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE records (number INTEGER PRIMARY KEY AUTOINCREMENT, id BLOB NOT NULL UNIQUE);
"""
_PRAGMAS = "PRAGMA synchronous = FULL; PRAGMA trusted_schema = OFF; PRAGMA cache_size = -16384;"
_BUSY_TIMEOUT_MS = 10_000
_COLUMNS = "o.id, o.kind, p.id, o.offset, o.stored, o.plain, o.base, o.depth"
_FROM = "FROM objects o JOIN packs p ON p.number = o.pack"
_MANY = 256
_MANY_SQL = f"SELECT {_COLUMNS} {_FROM} WHERE o.id IN ({','.join('?' * _MANY)})"


class Entry(NamedTuple):
    """Where an object is. `offset` and `stored` are those of its whole frame in the pack; `depth` is the number of deltas to undo."""

    id: bytes
    kind: ObjectKind
    pack: bytes
    offset: int
    stored: int
    plain: int
    base: bytes | None
    depth: int


class PackRow(NamedTuple):
    """A pack: its id, length and number of frames."""

    id: bytes
    bytes: int
    objects: int


class Index:
    """See the module's text. Made by `open_index` and `create_index`."""

    def __init__(self, path: Path, write: bool) -> None:
        """Opens an existing index. DataLoss (damaged, empty), VersionMismatch, NotPermitted."""
        _check_sqlite()
        self.path = path
        self.writable = write
        self._lock = threading.RLock()
        self._conn: apsw.Connection | None = None
        self._synced = False
        flags = apsw.SQLITE_OPEN_READWRITE if write else apsw.SQLITE_OPEN_READONLY
        try:
            with self._translated():
                self._conn = apsw.Connection(str(path), flags=flags)
                self._conn.set_busy_timeout(_BUSY_TIMEOUT_MS)  # before the first statement, which may meet a process that recovers the WAL
                self._conn.execute(_PRAGMAS).fetchall()
                self._check_version()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Idempotent. The last one to close folds the WAL into the file."""
        with self._lock:
            if self._conn is not None:
                self._conn.close()
                self._conn = None

    def fold(self) -> None:
        """Put everything that is in the WAL into the file itself, durably, which `close` only tries. Nobody else may have it open.
        OutOfSpace, Conflict."""
        ((busy, _, _),) = self._rows("PRAGMA wal_checkpoint(TRUNCATE)")
        if busy:
            raise Conflict(f"the repository's index {self.path} is in use by another process: close whatever else reads it")

    def find(self, object_id: bytes) -> Entry | None:
        """An object's place; None if there is none."""
        for row in self._rows(f"SELECT {_COLUMNS} {_FROM} WHERE o.id = ?", (object_id,)):
            return _entry(row)
        return None

    def find_many(self, object_ids: Sequence[bytes]) -> dict[bytes, Entry]:
        """The places of those that exist. About 2 us each, against 8 us for `find`."""
        found: dict[bytes, Entry] = {}
        for start in range(0, len(object_ids), _MANY):
            some = object_ids[start : start + _MANY]
            padded = (*some, *([None] * (_MANY - len(some))))
            for row in self._rows(_MANY_SQL, padded):
                entry = _entry(row)
                found[entry.id] = entry
        return found

    def objects(self, kind: ObjectKind | None = None, packs: Collection[bytes] | None = None) -> Iterator[Entry]:
        """Every object, or those of a kind or in some packs (which takes as long as reading all). Read in pages by id: what is committed
        meanwhile may be there or not."""
        condition = ""
        values: list[bytes | int | str] = []
        if kind is not None:
            condition, values = condition + " AND o.kind = ?", [*values, int(kind)]
        if packs is not None:
            numbers = [int(row[0]) for raw in packs for row in self._rows("SELECT number FROM packs WHERE id = ?", (raw,))]
            condition, values = condition + " AND o.pack IN (SELECT value FROM json_each(?))", [*values, json.dumps(numbers)]
        last = b""
        while rows := self._rows(f"SELECT {_COLUMNS} {_FROM} WHERE o.id > ?{condition} ORDER BY o.id LIMIT 5000", (last, *values)):
            yield from map(_entry, rows)
            last = rows[-1][0]

    def packs(self) -> list[PackRow]:
        """Every pack, oldest first."""
        return [PackRow(*row) for row in self._rows("SELECT id, bytes, objects FROM packs ORDER BY number")]

    def stored_bytes(self) -> int:
        """What all packs take."""
        return int(self._rows("SELECT coalesce(sum(bytes), 0) FROM packs")[0][0])

    def records(self) -> Iterator[bytes]:
        """The ids of all records in the order they were saved. Those saved meanwhile are there or not."""
        last = 0
        while rows := self._rows("SELECT number, id FROM records WHERE number > ? ORDER BY number LIMIT 1000", (last,)):
            yield from (row[1] for row in rows)
            last = rows[-1][0]

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Everything inside becomes durable and visible at the end, or nothing does (any exception). Not nested. OutOfSpace; OSError when
        the disk fails: then nobody knows what is durable, and the index must not be written to again."""
        with self._lock, self._translated():
            conn = self._connection()
            conn.execute("BEGIN IMMEDIATE")
            try:
                yield
                conn.execute("COMMIT")
            except BaseException:
                if conn.in_transaction:
                    conn.execute("ROLLBACK")
                raise
            if not self._synced:  # the WAL file's own name
                _sync_dir(self.path.parent)
                self._synced = True

    def add_pack(self, pack: PackRow) -> None:
        """Inside a transaction. Not an error if it is there."""
        conn = self._connection()
        if conn.pragma("user_version") != INDEX_VERSION:
            conn.pragma("user_version", INDEX_VERSION)
        conn.execute("INSERT OR IGNORE INTO packs (id, bytes, objects) VALUES (?, ?, ?)", pack)

    def add_objects(self, entries: Iterable[Entry]) -> None:
        """Inside a transaction; their packs are there. An object that is there already gets the new place. A new record is the last."""
        conn = self._connection()
        numbers: dict[bytes, int] = {}
        rows, records = [], []
        for entry in entries:
            number = numbers.get(entry.pack)
            if number is None:
                number = numbers[entry.pack] = self._pack_number(entry.pack)
            rows.append((entry.id, int(entry.kind), number, entry.offset, entry.stored, entry.plain, entry.base, entry.depth))
            if entry.kind == ObjectKind.RECORD:
                records.append((entry.id,))
        conn.executemany("INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        if records:
            conn.executemany("INSERT OR IGNORE INTO records (id) VALUES (?)", records)

    def remove_objects(self, object_ids: Iterable[bytes]) -> None:
        """Inside a transaction. Not an error for those that are not there."""
        ids = [(object_id,) for object_id in object_ids]
        self._connection().executemany("DELETE FROM objects WHERE id = ?", ids)
        self._connection().executemany("DELETE FROM records WHERE id = ?", ids)

    def remove_pack(self, pack: bytes) -> None:
        """Inside a transaction, with every object that the index still has in it."""
        conn = self._connection()
        for (number,) in conn.execute("SELECT number FROM packs WHERE id = ?", (pack,)).fetchall():
            ids = conn.execute("SELECT id FROM objects WHERE pack = ?", (number,)).fetchall()
            self.remove_objects([row[0] for row in ids if isinstance(row[0], bytes)])
            conn.execute("DELETE FROM packs WHERE number = ?", (number,))

    def remove_empty_packs(self, packs: Iterable[bytes]) -> None:
        """Inside a transaction. Like `remove_pack` for packs that the caller knows no object to be in (which takes no search)."""
        self._connection().executemany("DELETE FROM packs WHERE id = ?", [(pack,) for pack in packs])

    def problems(self) -> list[str]:
        """What SQLite's own checks find; [] if all is well. Reads the whole file."""
        try:
            rows = [str(row[0]) for row in self._rows("PRAGMA integrity_check(100)")]
            if rows == ["ok"]:
                rows = [f"a row of {row[0]} names a pack that does not exist" for row in self._rows("PRAGMA foreign_key_check")[:100]]
        except DataLoss as exc:  # too damaged even for the check
            return [exc.message]
        return rows

    def _pack_number(self, pack: bytes) -> int:
        for (number,) in self._connection().execute("SELECT number FROM packs WHERE id = ?", (pack,)):
            return int(number)
        raise InternalError(f"objects of pack {pack.hex()} were added to the index before the pack")

    def _connection(self) -> apsw.Connection:
        if self._conn is None:
            raise InternalError(f"the repository's index {self.path} was used after it was closed")
        return self._conn

    def _rows(self, sql: str, values: Sequence[bytes | int | str | None] = ()) -> list[tuple]:  # type: ignore[type-arg]
        with self._lock, self._translated():
            return self._connection().execute(sql, values).fetchall()

    def _check_version(self) -> None:
        conn = self._connection()
        application, version = conn.pragma("application_id"), conn.pragma("user_version")
        if application != APPLICATION_ID or not isinstance(version, int):
            raise DataLoss(f"{self.path} is not the index of a repository: run `snapshotd repair` to make it again")
        if version > INDEX_VERSION:
            raise VersionMismatch(
                f"the index {self.path} was written by a newer snapshotd (format {version}, this one knows {INDEX_VERSION}): "
                "use that version or a newer one"
            )

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except apsw.Error as exc:
            raise self._meaning(exc) from exc

    def _meaning(self, exc: apsw.Error) -> SnapshotdError | OSError:
        what = f"the repository's index {self.path}"
        number = self._conn.system_errno if self._conn is not None else 0
        full = number in NO_ROOM and isinstance(exc, apsw.IOError | apsw.CantOpenError)
        if isinstance(exc, apsw.FullError) or full:
            return OutOfSpace(f"{what} cannot be written because the disk is full: free some space and try again")
        if isinstance(exc, apsw.CorruptError | apsw.NotADBError):
            return DataLoss(f"{what} is damaged ({exc}): run `snapshotd repair` to make it again from the packs")
        if isinstance(exc, apsw.IOError):
            return OSError(number or errno.EIO, f"{what} cannot be read or written ({exc}): check the disk")
        if isinstance(exc, apsw.BusyError | apsw.LockedError):
            return Conflict(f"{what} is locked by another process: close whatever else writes to it")
        if isinstance(exc, apsw.ReadOnlyError | apsw.PermissionsError | apsw.CantOpenError):
            return NotPermitted(f"{what} cannot be opened ({exc}): check that it exists, its owner and mode")
        if isinstance(exc, apsw.SQLError):
            return DataLoss(f"{what} lacks a table or column ({exc}): run `snapshotd repair` to make it again from the packs")
        return InternalError(f"{what} refused a statement ({type(exc).__name__}: {exc})")


def open_index(path: Path, store: Store) -> Index:
    """The index for writing; a new one if there are neither an index nor packs. DataLoss when there are packs and no index."""
    if not path.exists():
        for key in store.keys("packs/"):
            raise missing(path, key)
        create_index(path)
    if path.stat().st_size == 0:
        raise DataLoss(f"the repository's index {path} is empty: run `snapshotd repair` to make it again from the packs")
    return Index(path, write=True)


def missing(path: Path, key: str) -> DataLoss:
    """There is a pack and no index."""
    return DataLoss(f"the repository's index {path} is missing although there are packs ({key}): run `snapshotd repair` to make it again")


def create_index(path: Path) -> None:
    """A new, empty index at `path`, durable, made under another name first. Replaces what is there (close it before)."""
    new = path.with_name(path.name + ".new")
    _unlink_all(new)
    try:
        try:
            os.close(os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
            conn = apsw.Connection(str(new), flags=apsw.SQLITE_OPEN_READWRITE)
            try:
                conn.execute(f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {INDEX_VERSION}; {_SCHEMA}").fetchall()
                conn.execute("PRAGMA journal_mode = WAL").fetchall()
            finally:
                conn.close()
        except apsw.Error as exc:  # on an empty file only the disk can be to blame
            if isinstance(exc, apsw.FullError):
                raise OutOfSpace(f"the repository's index {path} cannot be written because the disk is full: free some space") from exc
            raise OSError(errno.EIO, f"the repository's index {path} cannot be written ({exc}): check the disk") from exc
        _sync_file(new)
        for suffix in ("-wal", "-shm"):  # of an index that was taken away
            Path(f"{path}{suffix}").unlink(missing_ok=True)
        os.rename(new, path)
    except BaseException:
        _unlink_all(new)
        raise
    _sync_dir(path.parent)


def _unlink_all(path: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def _sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_dir(path: Path) -> None:
    fd = os.open(path, files.DIR_FLAGS)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _check_sqlite() -> None:
    version = tuple(int(part) for part in apsw.sqlite_lib_version().split("."))
    if version < OLDEST_SQLITE:
        raise Unsupported(
            f"SQLite {apsw.sqlite_lib_version()} can corrupt a database in WAL mode: "
            f"install an apsw that brings {'.'.join(map(str, OLDEST_SQLITE))} or newer"
        )


def _entry(row: Sequence) -> Entry:  # type: ignore[type-arg]
    try:
        entry = Entry(row[0], ObjectKind(row[1]), row[2], row[3], row[4], row[5], row[6], row[7])
        if len(entry.pack) == 16 and entry.offset >= 0 and entry.stored > 0 and entry.plain >= 0 and entry.depth >= 0:
            return entry
        what = "a place that cannot be"
    except (ValueError, TypeError):  # a damaged value can be of any type
        what = "values that cannot be"
    raise DataLoss(f"the index has an object with {what}: run `snapshotd repair` to make it again")
