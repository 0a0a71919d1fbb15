"""The vault in two files of a directory: `secrets.key` and `secrets.db`.

Tables (`user_version` 1):

    meta      key, value                    `check`: proof that the key file belongs to this database
    secrets   trajectory, marker, sealed    an original: version byte 1, nonce (12 bytes), AES-256-GCM ciphertext with its tag (16 bytes)

The associated data of a ciphertext is its trajectory and its marker, so that no row can stand in for another one. Nonces are random: with
the bounds below, a repetition in one vault is out of reach.

Both files are made under other names and renamed, the key first, so an empty or cut one is damage, never a fresh start.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import apsw
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

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
from snapshotd.secrets.base import MARKER, Found, Vault
from snapshotd.secrets.key import VaultKey, load_key, sync_dir
from snapshotd.types import TrajectoryID

KEY_NAME = "secrets.key"
DATABASE_NAME = "secrets.db"
MAX_KEPT = 100_000
"""Secrets of one trajectory, and ..."""
MAX_KEPT_BYTES = 64 << 20
"""... bytes of their originals."""

_VERSION = 1
_APPLICATION_ID = 0x736E7073  # "snps"
_OLDEST_SQLITE = (3, 51, 3)  # older ones have the WAL-reset bug
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE secrets (trajectory TEXT NOT NULL, marker TEXT NOT NULL, sealed BLOB NOT NULL, PRIMARY KEY (trajectory, marker)) WITHOUT ROWID;
"""
_BUSY_TIMEOUT_MS = 5000
_PRAGMAS = (
    "PRAGMA mmap_size = 0; PRAGMA trusted_schema = OFF; PRAGMA cell_size_check = ON; "
    "PRAGMA synchronous = NORMAL;"
)
_SEALED_VERSION = b"\1"
_NONCE_BYTES = 12
_OVERHEAD_BYTES = len(_SEALED_VERSION) + _NONCE_BYTES + 16
_REMEDY = "restore secrets.db and secrets.key together from a backup"


class FileVault(Vault):
    """See the module's text."""

    def __init__(self, directory: Path) -> None:
        """Open, creating as needed, the vault in an existing directory. The errors of `base`; NotFound when there is no directory;
        Unsupported when SQLite is too old; Conflict when another process has been writing for 5 s."""
        _check_sqlite()
        self._path = directory / DATABASE_NAME
        self._lock = threading.RLock()
        self._flushing = threading.Lock()
        self._conn: apsw.Connection | None = None
        self._wal_fd = -1
        self._lost: str | None = None
        self._sizes: dict[TrajectoryID, tuple[int, int]] = {}
        """Of trajectories that this process has kept something for: number and bytes of what they have."""
        try:
            with self._translated():
                exists = self._path.exists()
                self._key = load_key(directory / KEY_NAME, may_create=not exists)
                if not exists:
                    _create(self._path, self._key)
                self._open()
        except BaseException:
            self.close()
            raise
        self._cipher = AESGCM(self._key.sealing)

    def _open(self) -> None:
        if self._path.stat().st_size == 0:
            raise DataLoss(f"the vault {self._path} is empty, so the originals of recorded secrets are gone: {_REMEDY}")
        self._path.chmod(0o600)
        self._conn = apsw.Connection(str(self._path), flags=apsw.SQLITE_OPEN_READWRITE)
        self._conn.set_busy_timeout(_BUSY_TIMEOUT_MS)
        self._conn.execute(_PRAGMAS).fetchall()
        found, version = (self._rows(f"PRAGMA {pragma}")[0][0] for pragma in ("application_id", "user_version"))
        if found != _APPLICATION_ID:
            raise DataLoss(f"{self._path} is not a vault of snapshotd (application id {found:#x}): {_REMEDY}")
        if version > _VERSION:
            raise VersionMismatch(
                f"the vault {self._path} was written by a newer snapshotd (format {version}, this one knows {_VERSION}): use that version"
            )
        if version < _VERSION:
            raise DataLoss(f"the vault {self._path} is damaged (format {version}): {_REMEDY}")
        if self._rows("SELECT value FROM meta WHERE key = 'check'") != [(self._key.check,)]:
            raise DataLoss(f"the key {self._path.with_name(KEY_NAME)} does not belong to the vault {self._path}: {_REMEDY}")
        # Never open the database file itself a second time: closing any descriptor of it drops SQLite's POSIX locks. The WAL has none.
        self._wal_fd = os.open(f"{self._path}-wal", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        sync_dir(self._path.parent)

    def close(self) -> None:
        with self._flushing, self._lock:
            if self._conn is not None:
                self._conn.close()
                self._conn = None
            if self._wal_fd >= 0:
                os.close(self._wal_fd)
                self._wal_fd = -1

    def marker(self, found: Found) -> str:
        return f"[secret:{found.name}:{self._key.digest(found.value)}]"

    def keep(self, trajectory: TrajectoryID, found: Sequence[Found]) -> list[str]:
        markers = [self.marker(item) for item in found]
        with self._transaction():
            before = self._size(trajectory)
            try:
                for marker, item in dict(zip(markers, found, strict=True)).items():
                    self._keep_one(trajectory, marker, item.value)
            except BaseException:
                self._sizes[trajectory] = before
                raise
        return markers

    def _keep_one(self, trajectory: TrajectoryID, marker: str, value: bytes) -> None:
        count, size = self._size(trajectory)
        if count >= MAX_KEPT or size + len(value) > MAX_KEPT_BYTES or self._sealed(trajectory, marker) is not None:
            return
        self._rows("INSERT INTO secrets VALUES (?, ?, ?)", (trajectory, marker, self._seal(trajectory, marker, value)))
        self._sizes[trajectory] = (count + 1, size + len(value))

    def reveal(self, marker: str, owners: Collection[TrajectoryID]) -> bytes | None:
        if not MARKER.fullmatch(marker):
            return None
        with self._lock, self._translated():
            for owner in owners:
                if (sealed := self._sealed(owner, marker)) is not None:
                    return self._unseal(owner, marker, sealed)
        return None

    def inherit(self, heir: TrajectoryID, owners: Collection[TrajectoryID]) -> None:
        with self._transaction():
            self._sizes.pop(heir, None)
            for owner in owners:
                last = ""
                while rows := self._rows(
                    "SELECT marker, sealed FROM secrets WHERE trajectory = ? AND marker > ? ORDER BY marker LIMIT 500", (owner, last)
                ):
                    for marker, sealed in rows:
                        value = self._seal(heir, marker, self._unseal(owner, marker, sealed))
                        self._rows("INSERT OR IGNORE INTO secrets VALUES (?, ?, ?)", (heir, marker, value))
                    last = rows[-1][0]

    def forget(self, trajectory: TrajectoryID) -> None:
        with self._transaction():
            self._rows("DELETE FROM secrets WHERE trajectory = ?", (trajectory,))
            self._sizes.pop(trajectory, None)

    def flush(self) -> None:
        """One fsync of the WAL, without the lock. A failed one is final, because the kernel forgets the pages: DataLoss from then on."""
        with self._flushing:
            self._connection()
            if self._lost is None:
                try:
                    os.fdatasync(self._wal_fd)
                except OSError as exc:
                    self._lost = exc.strerror
            if self._lost is not None:
                raise DataLoss(f"the latest secrets in {self._path} could not be made durable ({self._lost}): check the disk and restart")

    def _size(self, trajectory: TrajectoryID) -> tuple[int, int]:
        if trajectory not in self._sizes:
            sums = "SELECT count(*), coalesce(sum(length(sealed)), 0) FROM secrets WHERE trajectory = ?"
            count, size = self._rows(sums, (trajectory,))[0]
            if len(self._sizes) >= 10_000:
                self._sizes.clear()
            self._sizes[trajectory] = (count, size - count * _OVERHEAD_BYTES)
        return self._sizes[trajectory]

    def _sealed(self, trajectory: TrajectoryID, marker: str) -> bytes | None:
        rows = self._rows("SELECT sealed FROM secrets WHERE trajectory = ? AND marker = ?", (trajectory, marker))
        return rows[0][0] if rows else None

    def _seal(self, trajectory: TrajectoryID, marker: str, value: bytes) -> bytes:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return _SEALED_VERSION + nonce + self._cipher.encrypt(nonce, value, _bound_to(trajectory, marker))

    def _unseal(self, trajectory: TrajectoryID, marker: str, sealed: bytes) -> bytes:
        try:
            version, nonce, ciphertext = sealed[:1], sealed[1 : 1 + _NONCE_BYTES], sealed[1 + _NONCE_BYTES :]
            if version == _SEALED_VERSION and len(sealed) >= _OVERHEAD_BYTES:
                return self._cipher.decrypt(nonce, ciphertext, _bound_to(trajectory, marker))
        except (InvalidTag, TypeError):  # a damaged value can be of any type
            pass
        raise DataLoss(f"the original of {marker} of trajectory {trajectory} in {self._path} is damaged: {_REMEDY}")

    def _rows(self, sql: str, values: Sequence[str | bytes] = ()) -> list[tuple]:  # type: ignore[type-arg]
        return self._connection().execute(sql, values).fetchall()

    def _connection(self) -> apsw.Connection:
        if self._conn is None:
            raise InternalError(f"the vault {self._path} was used after it was closed")
        return self._conn

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """What is written inside becomes visible together, or, on any exception, not at all."""
        with self._lock, self._translated():
            conn = self._connection()
            conn.execute("BEGIN IMMEDIATE").fetchall()
            try:
                yield
                conn.execute("COMMIT").fetchall()
            finally:
                if conn.in_transaction:
                    conn.execute("ROLLBACK").fetchall()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (apsw.Error, OSError) as exc:
            raise self._meaning(exc) from exc

    def _meaning(self, exc: apsw.Error | OSError) -> SnapshotdError:
        what = f"the vault {self._path}"
        number = exc.errno if isinstance(exc, OSError) else self._conn.system_errno if self._conn is not None else 0
        if isinstance(exc, apsw.FullError) or number in NO_ROOM:
            return OutOfSpace(f"{what} cannot be written because the disk is full: free some space and try again")
        if isinstance(exc, FileNotFoundError):
            return NotFound(f"{what} cannot be opened because {exc.filename} does not exist: create the state directory first")
        if isinstance(exc, apsw.ReadOnlyError | apsw.PermissionsError | apsw.CantOpenError | PermissionError):
            return NotPermitted(f"{what} cannot be opened for writing ({exc}): check its owner and mode")
        if isinstance(exc, apsw.CorruptError | apsw.NotADBError):
            return DataLoss(f"{what} is damaged ({exc}): {_REMEDY}")
        if isinstance(exc, apsw.IOError | OSError):
            return DataLoss(f"{what} cannot be read or written ({exc}): check the disk")
        if isinstance(exc, apsw.BusyError | apsw.LockedError):
            return Conflict(f"{what} is locked by another process: close whatever else has it open")
        if isinstance(exc, apsw.TooBigError):
            return LimitExceeded(f"a secret is too long for {what}")
        return InternalError(f"{what} refused a statement ({type(exc).__name__}: {exc})")


def _bound_to(trajectory: TrajectoryID, marker: str) -> bytes:
    return f"snapshotd secret 1\0{trajectory}\0{marker}".encode()


def _create(path: Path, key: VaultKey) -> None:
    """An empty vault, durable, made under another name first."""
    new = path.with_name(path.name + ".new")
    _unlink_all(new)
    try:
        os.close(os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))  # -wal and -shm get the same mode
        conn = apsw.Connection(str(new), flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            conn.execute(f"PRAGMA application_id = {_APPLICATION_ID}; PRAGMA user_version = {_VERSION}; {_SCHEMA}").fetchall()
            conn.execute("INSERT INTO meta VALUES ('check', ?)", (key.check,)).fetchall()
            conn.execute("PRAGMA journal_mode = WAL").fetchall()
        finally:
            conn.close()
        fd = os.open(new, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        new.rename(path)
    except BaseException:
        _unlink_all(new)
        raise
    sync_dir(path.parent)


def _unlink_all(path: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def _check_sqlite() -> None:
    version = tuple(int(part) for part in apsw.sqlite_lib_version().split("."))
    if version < _OLDEST_SQLITE:
        raise Unsupported(
            f"SQLite {apsw.sqlite_lib_version()} can corrupt a database in WAL mode: "
            f"install an apsw that brings {'.'.join(map(str, _OLDEST_SQLITE))} or newer"
        )
