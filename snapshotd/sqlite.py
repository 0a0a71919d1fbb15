"""SQLite as snapshotd uses it: making, opening, committing to and flushing a file, and the meaning of SQLite's errors.
Knows no table.

Only this module uses apsw. The standard library's SQLite is not used: versions before 3.51.3 can corrupt a database in
WAL mode (https://sqlite.org/wal.html#walresetbug), and Debian 12 carries 3.40.1.

A new file is built under another name and renamed into place, so that a database is never seen half made and an empty
or cut file is damage, never a fresh start. A database file itself is never opened a second time while it is in use:
closing any descriptor of it drops SQLite's POSIX locks. Its log (WAL) has none.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import apsw
import apsw.sqlite_extra

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
    check_format,
)
from snapshotd.kernel import turns
from snapshotd.kernel.files import closing_fd, sync_dir

Row = tuple[Any, ...]
Value = str | bytes | int | float | None

OLDEST_SQLITE = (3, 51, 3)
_CHECKSUM_BYTES = 8
"""Bytes at the end of each page, which SQLite leaves to its checksum layer (https://sqlite.org/cksumvfs.html). It
verifies reads of a database whose pages have this number of bytes."""
_BUSY_TIMEOUT_MS = 10_000
_CHECKPOINT_PAGES = 1000
"""`flush` copies the WAL into the database from this many 4 KiB pages on (SQLite's own default)."""
_CHECKPOINT_LIMIT_PAGES = 8000
"""From this length on a commit does the checkpoint itself, so that the WAL stays bounded (32 MiB) even without
flushes."""
_LOG_STEP_BYTES, _LOG_LEAST_BYTES = 1 << 20, 64 << 10
"""`Database._make_room` adds so many bytes to a log with less than the second number left."""
_LOG_HEADER_BYTES, _FRAME_BYTES = 32, 4096 + 24
"""https://sqlite.org/fileformat2.html#walformat"""
_PRAGMAS = "PRAGMA mmap_size = 0; PRAGMA trusted_schema = OFF;"
"""Without a map of the file an error of it is an error code, never SIGBUS."""
_BESIDE = ("-wal", "-shm", "-journal")


@dataclass(frozen=True, slots=True)
class Form:
    """A kind of database.

    `what`: with its article, for messages. `application_id`, `version`: the marks in the file; a version from `oldest`
    on can be read. `remedy`: what to do when it is damaged. `durable_commits`: a commit survives power loss when it has
    returned, and a disk that fails is an OSError, after which any commit may be lost; else `flush` makes commits
    durable, and a failing disk is DataLoss. `pragmas`: further ones. `checksums`: each page has a checksum, so that no
    changed byte is believed. `keeps_log`: the log stays when the last one closes, empty, so that a missing log is a lost
    one.
    """

    what: str
    application_id: int
    version: int
    oldest: int
    remedy: str
    durable_commits: bool = False
    pragmas: str = ""
    checksums: bool = False
    keeps_log: bool = False


class Database:
    """One connection, guarded by a re-entrant lock: hold `lock` to read several things as of one moment.

    Errors of every method: DataLoss (damaged), OutOfSpace, Conflict (another process is writing for 10 s),
    NotPermitted, LimitExceeded (a value is too long), InternalError; OSError as its form says.
    """

    def __init__(self, path: Path | Literal[":memory:"], form: Form, *, write: bool = True) -> None:
        """Open an existing file. Also: VersionMismatch (its version is newer, or too old), Unsupported (SQLite is)."""
        _check_sqlite()
        self.form = form
        self.lock = threading.RLock()
        self.name = f"{form.what} {path}"
        self._path = None if path == ":memory:" else Path(path)
        self._write = write
        self._conn: apsw.Connection | None = None
        self._wal_fd, self._wal_pages, self._wal_bytes = -1, 0, 0
        self._lost: str | None = None
        self._flushing = threading.Lock()
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        form, path = self.form, self._path
        if path is not None:
            self._check_file(path)
        with self._translate_errors():
            self._conn = _connect(str(path or ":memory:"), form, self._write)
            self._conn.set_wal_hook(self._on_commit)
            if form.keeps_log:
                _keep_log(self._conn)
            application, version = self.pragma("application_id"), self.pragma("user_version")
            checksum_bytes = _reserve_bytes(self._conn, -1)
        if path is None:
            return
        if application != form.application_id:
            raise DataLoss(
                f"{self.name} is another program's database (application id {application:#x}): {form.remedy}"
            )
        if version <= 0 < form.oldest:
            raise DataLoss(f"{self.name} is damaged (format {version}): {form.remedy}")
        check_format(self.name, version, form.version, form.oldest)
        if form.checksums and checksum_bytes != _CHECKSUM_BYTES:
            raise DataLoss(f"{self.name} is damaged (its pages have no checksums): {form.remedy}")
        if self._write:
            self._wal_fd = os.open(f"{path}-wal", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            sync_dir(path.parent)  # the WAL's name

    def _check_file(self, path: Path) -> None:
        try:
            if path.exists() and path.stat().st_size == 0:
                raise DataLoss(f"{self.name} is empty, so its content is gone: {self.form.remedy}")
            if path.exists() and self._write:
                path.chmod(0o600)
        except PermissionError as exc:
            raise NotPermitted(
                f"{self.name} cannot be opened ({exc.strerror}): run as the owner of the state directory"
            ) from exc

    def close(self) -> None:
        """Idempotent. The last one to close folds the WAL into the file."""
        with self._flushing, self.lock:
            if self._conn is not None:
                if self.form.keeps_log and self._write:
                    with suppress(apsw.Error):  # only a longer log is left
                        self._conn.execute("PRAGMA journal_size_limit = 0").fetchall()
                self._conn.close()
                self._conn = None
            if self._wal_fd >= 0:
                os.close(self._wal_fd)
                self._wal_fd = -1

    @property
    def connection(self) -> apsw.Connection:
        if self._conn is None:
            raise InternalError(f"{self.name} was used after it was closed")
        return self._conn

    def pragma(self, name: str) -> int:
        """The value of a pragma that is a number."""
        return int(row[0]) if (row := self.read_one(f"PRAGMA {name}")) else 0

    def read(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """Run one statement and return all its rows. Writing statements belong inside `transaction`."""
        with self.lock:
            try:
                return self.connection.execute(sql, values).fetchall()
            except apsw.Error as exc:  # not `_translate_errors`, which takes as long as a small statement
                raise self._meaning(exc) from exc

    def read_one(self, sql: str, values: Sequence[Value] = ()) -> Row | None:
        """The first row, or None."""
        rows = self.read(sql, values)
        return rows[0] if rows else None

    def read_page(self, sql: str, values: Sequence[Value], *, rows: int, size: int) -> list[Row]:
        """The first rows: at most `rows`, ending early once their texts add up to `size` characters. Not for a holder
        of `lock`."""
        turns.give_way()  # not below: a step may wait for the lock
        page: list[Row] = []
        with self.lock, self._translate_errors():
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
        self.read(sql, values)
        return self.connection.last_insert_rowid()

    def write(self, sql: str, values: Sequence[Value] = ()) -> int:
        """Run one statement and return how many rows it changed."""
        self.read(sql, values)
        return self.connection.changes()

    def write_many(self, sql: str, values: Iterable[Sequence[Value]]) -> None:
        """Run one statement once per item."""
        with self._translate_errors():
            self.connection.executemany(sql, values).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Writes inside become visible together at the end, or, on any exception, not at all. Does not nest."""
        with self.lock:
            self.read("BEGIN IMMEDIATE")
            try:
                yield
                if self.form.durable_commits:
                    self._make_room()
                self.read("COMMIT")
            finally:
                if self.connection.in_transaction:  # not after COMMIT, nor when SQLite itself rolled back (disk full)
                    self.read("ROLLBACK")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Reads inside see one moment, whatever other processes write meanwhile. Does not nest, nor in
        `transaction`."""
        with self.lock:
            self.read("BEGIN")
            try:
                yield
            finally:
                if self.connection.in_transaction:
                    self.read("COMMIT")

    def flush(self) -> None:
        """Return when everything committed so far survives power loss. Nothing to do where commits are durable.

        Otherwise a commit only appends to the WAL file (synchronous=NORMAL). One fsync of that file makes all its
        commits durable: after power loss SQLite replays it up to the last whole transaction. Pages that were moved from
        the WAL into the database earlier were synced there by SQLite before the WAL was reused. The fsync runs without
        the lock, so commits go on meanwhile (they may wait 5-50 ms otherwise). A failed fsync is final, because the
        kernel forgets the dirty pages: DataLoss now and at every later flush.
        """
        with self._flushing:
            _ = self.connection  # a defect if it is closed
            if self._wal_fd < 0 or self.form.durable_commits:
                return
            if self._lost is None:
                try:
                    os.fdatasync(self._wal_fd)
                except OSError as exc:
                    self._lost = exc.strerror
            if self._lost is not None:
                raise DataLoss(
                    f"the latest commits to {self.name} could not be made durable ({self._lost}): check the disk, "
                    "restart the daemon, and look at what `snapshotd ls` still shows"
                )
            with self.lock:
                if self._wal_pages >= _CHECKPOINT_PAGES:
                    self.checkpoint()

    def fold(self) -> None:
        """Put everything that is in the WAL into the file itself, durably; `close` only tries this. No other process
        may have it open."""
        if self.pragma("wal_checkpoint(TRUNCATE)"):
            raise Conflict(f"{self.name} is in use by another process: close the other program")

    def checkpoint(self) -> None:
        """Put what is in the WAL into the file itself, durably, as far as no other process reads an earlier state."""
        with self.lock, self._translate_errors():
            self.connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)

    def problems(self) -> list[str]:
        """The problems that SQLite's own checks find; [] if there are none. Reads the whole file, over a connection of
        its own: so no thread waits for the lock, and a page that is damaged on the disk is not answered from memory."""
        connection = self.connection
        try:
            with self._translate_errors():
                if self._path is not None:
                    connection = _connect(str(self._path), self.form, False)
                found = connection.execute("PRAGMA integrity_check(100)")
                rows = [
                    str(row[0]).replace(f"error code={apsw.SQLITE_IOERR_DATA}", "it does not match its checksum")
                    for row in found
                ]
                if rows == ["ok"]:
                    missing = connection.execute("PRAGMA foreign_key_check").fetchall()[:100]
                    rows = [
                        f"a row of {table} names one of {parent} that does not exist" for table, _, parent, _ in missing
                    ]
        except DataLoss as exc:  # too damaged even for the check
            return [exc.message]
        finally:
            if connection is not self._conn:
                connection.close()
        return rows

    def _on_commit(self, connection: apsw.Connection, _name: str, pages: int) -> int:
        self._wal_pages = pages
        if self.form.durable_commits:
            if pages >= _CHECKPOINT_PAGES:
                with suppress(apsw.Error):  # as SQLite's own hook: the commit is whole, and a later one tries again
                    connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        elif pages >= _CHECKPOINT_LIMIT_PAGES:
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        return apsw.SQLITE_OK

    def _make_room(self) -> None:
        """Lengthen the log with zeros before a commit needs them. Within a transaction, so no one else writes to it.

        A commit that lengthens a file waits for the file system's journal, too: 0.3 to 3 ms on ext4, where one into
        existing blocks takes 0.1 to 0.5 (16 KiB and fdatasync, medians on a busy disk). SQLite takes zeros for its end: a frame
        counts only if it has the log's salt and checksum.
        """
        if self._wal_fd < 0:
            return
        used = _LOG_HEADER_BYTES + self._wal_pages * _FRAME_BYTES
        if self._wal_bytes - used >= _LOG_LEAST_BYTES:
            return
        size = self._wal_bytes = os.fstat(self._wal_fd).st_size
        if size - used >= _LOG_LEAST_BYTES or size > _CHECKPOINT_PAGES * _FRAME_BYTES:
            return
        made = 0
        with suppress(OSError):  # a full disk
            made = os.pwrite(self._wal_fd, bytes(_LOG_STEP_BYTES), size)
        if made < _LOG_STEP_BYTES:
            os.ftruncate(self._wal_fd, size)  # the commit may still have room, and so may other files

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except apsw.Error as exc:
            raise self._meaning(exc) from exc

    def _meaning(self, exc: apsw.Error) -> SnapshotdError | OSError:
        number = self._conn.system_errno if self._conn is not None else 0
        return _meaning(exc, number, self.name, self.form)


def create(path: Path, form: Form, script: str = "") -> None:
    """A new database at `path`, for its owner alone, durable and in WAL mode, filled by `script`. Replaces an existing
    one (close it before). NotFound (no such folder), NotPermitted, OutOfSpace, Unsupported (SQLite is too old),
    OSError."""
    _check_sqlite()
    with creating(f"{form.what} {path}"):
        _create(path, form, script)


@contextmanager
def creating(what: str) -> Iterator[None]:
    """Say in words why the files of a database cannot be looked for or made."""
    try:
        yield
    except FileNotFoundError as exc:
        raise NotFound(f"{what} cannot be created because its folder does not exist: create it first") from exc
    except PermissionError as exc:
        raise NotPermitted(
            f"{what} cannot be created ({exc.strerror}): run as the owner of the state directory"
        ) from exc
    except OSError as exc:
        if exc.errno in NO_ROOM:
            raise OutOfSpace(
                f"{what} cannot be created because the disk is full: free some space and try again"
            ) from exc
        raise


def _create(path: Path, form: Form, script: str) -> None:
    new = path.with_name(path.name + ".new")
    remove(new)  # left by a creation that was cut off
    try:
        # -wal and -shm get the same mode
        os.close(os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        try:
            with closing(_connect(str(new), form, True)) as conn:
                if form.checksums:
                    _reserve_bytes(conn, _CHECKSUM_BYTES)
                conn.execute(
                    f"PRAGMA application_id = {form.application_id}; BEGIN; {script}; COMMIT; PRAGMA journal_mode = WAL"
                ).fetchall()
        except apsw.Error as exc:  # on an empty file only the disk can be to blame
            raise OSError(
                errno.ENOSPC if isinstance(exc, apsw.FullError | apsw.IOError) else errno.EIO, str(exc)
            ) from exc
        with closing_fd(os.open(new, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)) as fd:
            os.fsync(fd)
        for suffix in _BESIDE:  # files of a database that was taken away
            Path(f"{path}{suffix}").unlink(missing_ok=True)
        new.rename(path)
    except BaseException:
        remove(new)
        raise
    sync_dir(path.parent)


def read_without_log(path: Path, form: Form, sql: str, values: Sequence[Value] = ()) -> list[Row]:
    """The rows of one statement as the file alone has them; makes no log, so that one that is missing stays missing. The
    errors of `Database.read`."""
    _check_sqlite()
    with closing(
        apsw.Connection(f"{path.absolute().as_uri()}?immutable=1", apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
    ) as connection:
        try:
            return connection.execute(sql, values).fetchall()
        except apsw.Error as exc:
            raise _meaning(exc, connection.system_errno, f"{form.what} {path}", form) from exc


def remove(path: Path) -> None:
    """Remove a database that is not open anywhere, with SQLite's files beside it. A missing one is no error.
    OSError."""
    for suffix in ("", *_BESIDE):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def set_aside(path: Path, kept: Path) -> None:
    """Give a database that is not open anywhere, and may be missing, another name in its folder, with SQLite's files
    beside it. The file goes first: cut off half way, there is no database without the log that belongs to it.
    OSError."""
    for suffix in ("", *_BESIDE):
        with suppress(FileNotFoundError):
            os.rename(f"{path}{suffix}", f"{kept}{suffix}")


def _reserve_bytes(connection: apsw.Connection, count: int) -> int:
    """Bytes at the end of each page that are not SQLite's; sets them, from the next `VACUUM` or the first page on,
    unless `count` is -1."""
    number = ctypes.c_int(count)
    connection.file_control("main", apsw.SQLITE_FCNTL_RESERVE_BYTES, ctypes.addressof(number))
    return number.value


def _keep_log(connection: apsw.Connection) -> None:
    on = ctypes.c_int(1)
    connection.file_control("main", apsw.SQLITE_FCNTL_PERSIST_WAL, ctypes.addressof(on))


@cache
def _load_checksums() -> None:
    """Load the checksum layer for every connection from now on. It leaves files without checksums alone. Unsupported."""
    try:
        with closing(apsw.Connection(":memory:")) as connection:
            apsw.sqlite_extra.load(connection, "cksumvfs")
    except (LookupError, apsw.sqlite_extra.NotAvailable, apsw.Error) as exc:
        raise Unsupported(
            f"SQLite's checksums cannot be loaded ({exc}): install apsw from PyPI, whose wheels have them"
        ) from exc


def _connect(name: str, form: Form, write: bool) -> apsw.Connection:
    conn = apsw.Connection(name, flags=apsw.SQLITE_OPEN_READWRITE if write else apsw.SQLITE_OPEN_READONLY)
    conn.set_busy_timeout(_BUSY_TIMEOUT_MS)  # before the first statement: a process may be recovering the WAL
    # A plan depends on the statement alone, so a statement is not planned anew for each set of values.
    conn.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
    conn.execute(
        f"{_PRAGMAS} PRAGMA synchronous = {'FULL' if form.durable_commits else 'NORMAL'}; {form.pragmas}"
    ).fetchall()
    return conn


def _check_sqlite() -> None:
    version = tuple(int(part) for part in apsw.sqlite_lib_version().split("."))
    if version < OLDEST_SQLITE:
        raise Unsupported(
            f"SQLite {apsw.sqlite_lib_version()} can corrupt a database in WAL mode: "
            f"install an apsw that brings {'.'.join(map(str, OLDEST_SQLITE))} or newer"
        )
    _load_checksums()


def _meaning(exc: apsw.Error, number: int, what: str, form: Form) -> SnapshotdError | OSError:
    full = number in NO_ROOM and isinstance(exc, apsw.IOError | apsw.CantOpenError)
    # The first to open a database makes its -shm anew, and SQLite does not keep that error's number.
    if isinstance(exc, apsw.FullError) or full or getattr(exc, "extendedresult", None) == apsw.SQLITE_IOERR_SHMSIZE:
        return OutOfSpace(f"{what} cannot be written because the disk is full: free some space and try again")
    if isinstance(exc, apsw.CorruptError | apsw.NotADBError):
        return DataLoss(f"{what} is damaged ({exc}): {form.remedy}")
    if getattr(exc, "extendedresult", None) == apsw.SQLITE_IOERR_DATA:
        return DataLoss(f"{what} is damaged (a page does not match its checksum): {form.remedy}")
    if isinstance(exc, apsw.IOError):
        said = f"{what} cannot be read or written ({exc}; {os.strerror(number)}): check the disk"
        return OSError(number or errno.EIO, said) if form.durable_commits else DataLoss(said)
    if isinstance(exc, apsw.BusyError | apsw.LockedError):
        return Conflict(f"{what} is locked by another process: close the other program")
    if isinstance(exc, apsw.ReadOnlyError | apsw.PermissionsError | apsw.CantOpenError):
        return NotPermitted(f"{what} cannot be opened ({exc}): check that it exists, its owner and mode")
    if isinstance(exc, apsw.SQLError) and str(exc).startswith("no such "):
        return DataLoss(f"{what} lacks a table or column ({exc}): {form.remedy}")
    if isinstance(exc, apsw.TooBigError):
        return LimitExceeded(f"a value is too long for {what}: SQLite takes at most 1,000,000,000 bytes in one row")
    return InternalError(f"{what} refused a statement ({type(exc).__name__}: {exc})")
