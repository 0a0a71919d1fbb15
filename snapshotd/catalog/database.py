"""One SQLite file: opening and migrating it, transactions, durability, and what SQLite's errors mean. Knows no table.

Only this module uses apsw. The standard library's SQLite is not used: versions before 3.51.3 can corrupt a database in WAL mode
(https://sqlite.org/wal.html#walresetbug), and Debian 12 carries 3.40.1.

A new file is built under another name and renamed into place, so that a catalog is never seen half made and an empty or cut file
is damage, never a fresh start.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import apsw

from snapshotd.catalog import schema
from snapshotd.errors import (
    NO_ROOM,
    Conflict,
    DataLoss,
    InternalError,
    LimitExceeded,
    NotFound,
    NotPermitted,
    OutOfSpace,
    SnapshotdError,
    Unsupported,
    VersionMismatch,
)

Row = tuple[Any, ...]
Value = str | bytes | int | float | None

OLDEST_SQLITE = (3, 51, 3)
_BUSY_TIMEOUT_MS = 5000
_CHECKPOINT_PAGES = 1000
"""`flush` copies the write-ahead log (WAL) into the database from this many 4 KiB pages on (SQLite's own default)."""
_CHECKPOINT_LIMIT_PAGES = 8000
"""A commit does it itself from here on, so that the WAL stays bounded (32 MiB) even if nobody flushes."""
_PRAGMAS = """
PRAGMA foreign_keys = ON;
PRAGMA mmap_size = 0;          -- a file error must be an error code, never SIGBUS
PRAGMA trusted_schema = OFF;
PRAGMA cell_size_check = ON;   -- find damaged pages when they are read
PRAGMA synchronous = NORMAL;   -- no fsync in a commit; see flush
"""

_REMEDY = "restore it from a backup, or make it again from the repository with `snapshotd daemon --rebuild-catalog`"


class Database:
    """One connection, guarded by a re-entrant lock: hold `lock` to read several things as of one moment."""

    def __init__(self, path: Path | Literal[":memory:"]) -> None:
        """Open, creating or migrating as needed. Errors: NotFound (no such folder), NotPermitted, VersionMismatch, DataLoss, OutOfSpace,
        Unsupported (SQLite too old), Conflict (another process is writing for longer than 5 s)."""
        _check_sqlite()
        self.lock = threading.RLock()
        self._name = str(path)
        self._path = None if path == ":memory:" else Path(path)
        self._conn: apsw.Connection | None = None
        self._wal_fd = -1
        self._wal_pages = 0
        self._lost: str | None = None
        self._flushing = threading.Lock()
        if self._path is not None:
            _prepare(self._path)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        with self._translated():
            self._conn = _connect(self._name, apsw.SQLITE_OPEN_READWRITE)
            self._conn.set_wal_hook(self._on_commit)
        _migrate(self)
        if self._path is not None:
            # Never open the database file itself a second time: closing any descriptor of it drops SQLite's POSIX locks. The WAL has none.
            self._wal_fd = os.open(f"{self._path}-wal", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            _sync_dir(self._path.parent)

    def close(self) -> None:
        with self._flushing, self.lock:
            if self._conn is not None:
                self._conn.close()
                self._conn = None
            if self._wal_fd >= 0:
                os.close(self._wal_fd)
                self._wal_fd = -1

    @property
    def connection(self) -> apsw.Connection:
        if self._conn is None:
            raise InternalError(f"the catalog {self._name} was used after it was closed")
        return self._conn

    def read(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """Run one statement and return all its rows. Writing statements belong inside `transaction`."""
        with self.lock, self._translated():
            return self.connection.execute(sql, values).fetchall()

    def read_one(self, sql: str, values: Sequence[Value] = ()) -> Row | None:
        """The first row, or None."""
        rows = self.read(sql, values)
        return rows[0] if rows else None

    def read_page(self, sql: str, values: Sequence[Value], *, rows: int, size: int) -> list[Row]:
        """The first rows: at most `rows`, ending early once their texts add up to `size` characters."""
        page: list[Row] = []
        with self.lock, self._translated():
            cursor = self.connection.execute(sql, values)
            for row in cursor:
                page.append(row)
                size -= sum(len(value) for value in row if isinstance(value, str))
                if len(page) >= rows or size <= 0:
                    break
            cursor.close(True)
        return page

    def insert(self, sql: str, values: Sequence[Value]) -> int:
        """Run one INSERT and return the new row's number."""
        with self._translated():
            self.connection.execute(sql, values).fetchall()
            return self.connection.last_insert_rowid()

    def write(self, sql: str, values: Sequence[Value] = ()) -> int:
        """Run one statement and return how many rows it changed."""
        with self._translated():
            self.connection.execute(sql, values).fetchall()
            return self.connection.changes()

    def write_many(self, sql: str, values: Iterator[Sequence[Value]]) -> None:
        """Run one statement once per item."""
        with self._translated():
            self.connection.executemany(sql, values).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """What is written inside becomes visible together at the end, or, on any exception, not at all. Does not nest."""
        with self.lock:
            conn = self.connection
            with self._translated():
                conn.execute("BEGIN IMMEDIATE").fetchall()
            try:
                yield
                with self._translated():
                    conn.execute("COMMIT").fetchall()
            finally:
                if conn.in_transaction:  # not after COMMIT, nor when SQLite itself rolled back (disk full)
                    with self._translated():
                        conn.execute("ROLLBACK").fetchall()

    def flush(self) -> None:
        """Return when everything committed so far survives power loss.

        A commit only appends to the WAL file (synchronous=NORMAL). One fsync of that file makes all its commits durable: after power loss
        SQLite replays it up to the last whole transaction. What was moved from the WAL into the database earlier was synced there by
        SQLite before the WAL was reused. The fsync runs without the lock, so commits go on meanwhile (they may wait 5-50 ms otherwise).
        A failed fsync is final, because the kernel forgets the dirty pages: DataLoss now and at every later flush.
        """
        if self._path is None:
            return
        with self._flushing:
            connection = self.connection
            if self._lost is None:
                try:
                    os.fdatasync(self._wal_fd)
                except OSError as exc:
                    self._lost = exc.strerror
            if self._lost is not None:
                raise DataLoss(
                    f"the latest commits to {self._name} could not be made durable ({self._lost}): check the disk, "
                    "restart the daemon, and look at what `snapshotd ls` still shows"
                )
            with self.lock, self._translated():
                if self._wal_pages >= _CHECKPOINT_PAGES:
                    connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)

    def _on_commit(self, connection: apsw.Connection, _name: str, pages: int) -> int:
        self._wal_pages = pages
        if pages >= _CHECKPOINT_LIMIT_PAGES:
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        return apsw.SQLITE_OK

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except apsw.Error as exc:
            raise self._meaning(exc) from exc

    def _meaning(self, exc: apsw.Error) -> SnapshotdError:
        what = f"the catalog {self._name}"
        number = self._conn.system_errno if self._conn is not None else 0
        if isinstance(exc, apsw.FullError) or (number in NO_ROOM and isinstance(exc, apsw.IOError | apsw.CantOpenError)):
            return OutOfSpace(f"{what} cannot be written because the disk is full: free some space and try again")
        if isinstance(exc, apsw.CorruptError | apsw.NotADBError):
            return DataLoss(f"{what} is damaged ({exc}): {_REMEDY}")
        if isinstance(exc, apsw.IOError):
            return DataLoss(f"{what} cannot be read or written ({exc}; {os.strerror(number)}): check the disk")
        if isinstance(exc, apsw.BusyError | apsw.LockedError):
            return Conflict(f"{what} is locked by another process: close whatever else has it open")
        if isinstance(exc, apsw.ReadOnlyError | apsw.PermissionsError | apsw.CantOpenError):
            return NotPermitted(f"{what} cannot be opened for writing ({exc}): check its owner and mode")
        if isinstance(exc, apsw.TooBigError):
            return LimitExceeded(f"a value is too long for {what}: SQLite takes at most 1,000,000,000 bytes in one row")
        return InternalError(f"{what} refused a statement ({type(exc).__name__}: {exc})")


def _check_sqlite() -> None:
    version = tuple(int(part) for part in apsw.sqlite_lib_version().split("."))
    if version < OLDEST_SQLITE:
        raise Unsupported(
            f"SQLite {apsw.sqlite_lib_version()} can corrupt a database in WAL mode: "
            f"install an apsw that brings {'.'.join(map(str, OLDEST_SQLITE))} or newer"
        )


def _connect(name: str, flags: int) -> apsw.Connection:
    conn = apsw.Connection(name, flags=flags)
    conn.set_busy_timeout(_BUSY_TIMEOUT_MS)  # before the first statement, which may meet a process that recovers the WAL
    conn.execute(_PRAGMAS).fetchall()
    return conn


def _prepare(path: Path) -> None:
    """Make sure that a whole catalog file is there, for its owner alone."""
    try:
        if path.exists():
            if path.stat().st_size == 0:
                raise DataLoss(f"the catalog {path} is empty, so its content is gone: {_REMEDY}")
            path.chmod(0o600)
        else:
            _create(path)
    except FileNotFoundError as exc:
        raise NotFound(f"the catalog {path} cannot be created because its folder does not exist: create it first") from exc
    except PermissionError as exc:
        raise NotPermitted(f"the catalog {path} cannot be opened ({exc.strerror}): run as the owner of the state directory") from exc
    except OSError as exc:
        if exc.errno in NO_ROOM:
            raise OutOfSpace(f"the catalog {path} cannot be created because the disk is full: free some space and try again") from exc
        raise


def _create(path: Path) -> None:
    """Build an empty database beside `path`, durable and in WAL mode, and rename it into place."""
    new = path.with_name(path.name + ".new")
    for suffix in ("", "-wal", "-shm", "-journal"):
        Path(f"{new}{suffix}").unlink(missing_ok=True)  # of a creation that was cut off
    try:
        os.close(os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))  # -wal and -shm get the same mode
        try:
            conn = _connect(str(new), apsw.SQLITE_OPEN_READWRITE)
            try:
                conn.execute(f"PRAGMA application_id = {schema.APPLICATION_ID}; PRAGMA journal_mode = WAL;").fetchall()
            finally:
                conn.close()
        except apsw.Error as exc:  # on an empty file only the disk can be to blame
            raise OSError(errno.ENOSPC if isinstance(exc, apsw.FullError | apsw.IOError) else errno.EIO, str(exc)) from exc
        fd = os.open(new, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError:
        for suffix in ("", "-wal", "-shm", "-journal"):
            Path(f"{new}{suffix}").unlink(missing_ok=True)
        raise
    new.rename(path)
    _sync_dir(path.parent)


def _migrate(database: Database) -> None:
    """Bring the schema to `schema.VERSION` in one transaction, or find that this is not possible."""
    name = database.connection.filename or ":memory:"
    found = _number(database, "application_id")
    version = _number(database, "user_version")
    if database.connection.filename and found != schema.APPLICATION_ID:
        raise DataLoss(f"{name} is not a catalog of snapshotd (application id {found:#x}): move it away or restore the right file")
    if version > schema.VERSION:
        raise VersionMismatch(
            f"the catalog {name} was written by a newer snapshotd (format {version}, this one knows {schema.VERSION}): "
            "use that version or a newer one"
        )
    if version < 0:
        raise DataLoss(f"the catalog {name} is damaged (format {version}): {_REMEDY}")
    if version < schema.VERSION:
        with database.transaction():
            for migration in schema.MIGRATIONS[version:]:
                database.write(migration)
            database.write(f"PRAGMA user_version = {schema.VERSION}")


def _number(database: Database, pragma: str) -> int:
    row = database.read_one(f"PRAGMA {pragma}")
    assert row is not None
    return int(row[0])


def _sync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
