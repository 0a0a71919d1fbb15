"""The vault in two files of a directory: `secrets.key` and `secrets.db`.

Tables (`user_version` 1):

    meta      key, value                    `check`: proof that the key file belongs to this database
    secrets   trajectory, marker, sealed    an original: version byte 1, nonce (12 bytes), AES-256-GCM ciphertext with its tag (16 bytes)

The associated data of a ciphertext is its trajectory and its marker, so that no row can stand in for another one.
Nonces are random: with the bounds below, a repetition in one vault is out of reach. The key is made before the
database.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from snapshotd.errors import DataLoss
from snapshotd.secrets.base import MARKER, Found
from snapshotd.secrets.key import load_key
from snapshotd.sqlite import Database, Form, create, creating
from snapshotd.types import TrajectoryID

KEY_NAME = "secrets.key"
DATABASE_NAME = "secrets.db"
MAX_KEPT = 100_000
"""Secrets of one trajectory, and ..."""
MAX_KEPT_BYTES = 64 << 20
"""... bytes of their originals."""

_VERSION = 1
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE secrets (trajectory TEXT NOT NULL, marker TEXT NOT NULL, sealed BLOB NOT NULL, PRIMARY KEY (trajectory, marker)) WITHOUT ROWID;
"""
_SEALED_VERSION = b"\1"
_NONCE_BYTES = 12
_OVERHEAD_BYTES = len(_SEALED_VERSION) + _NONCE_BYTES + 16
_REMEDY = "restore secrets.db and secrets.key together from a backup"
_APPLICATION_ID = 0x736E7073  # "snps"
_FORM = Form(
    "the vault", _APPLICATION_ID, _VERSION, _VERSION, _REMEDY, pragmas="PRAGMA cell_size_check = ON;", keeps_log=True
)


class Vault:
    """The text of `base.py` holds for all methods."""

    def __init__(self, directory: Path, is_new: Callable[[], bool] = lambda: True) -> None:
        """Open, creating as needed, the vault in an existing directory. `is_new`: whether nothing can have been kept in
        it yet. The errors of `base.py`, of `sqlite.Database` and of `load_key`; DataLoss also when there is a key without a
        database and the vault is not new."""
        self._path = directory / DATABASE_NAME
        self._sizes: dict[TrajectoryID, tuple[int, int]] = {}
        """Number and bytes of the secrets of each trajectory that this process has kept secrets for."""
        with creating(f"{_FORM.what} {self._path}"):
            exists = self._path.exists()
            if not exists and (directory / KEY_NAME).exists() and not is_new():
                raise DataLoss(
                    f"the vault {self._path} is missing, and the recorded secrets were in it: restore it from a backup, or "
                    f"remove {directory / KEY_NAME}, too, to go on without them"
                )
            self._key = load_key(directory / KEY_NAME, may_create=not exists)
        if not exists:
            check = f"INSERT INTO meta VALUES ('check', x'{self._key.check.hex()}')"
            create(self._path, _FORM, f"PRAGMA user_version = {_VERSION}; {_SCHEMA} {check}")
        self._db = Database(self._path, _FORM)
        try:
            if self._db.read("SELECT value FROM meta WHERE key = 'check'") != [(self._key.check,)]:
                raise DataLoss(f"the key {directory / KEY_NAME} does not belong to the vault {self._path}: {_REMEDY}")
        except BaseException:
            self._db.close()
            raise
        self._cipher = AESGCM(self._key.sealing)

    def close(self) -> None:
        """Release the files. Idempotent. Any other call afterwards is a defect."""
        self._db.close()

    def marker(self, found: Found) -> str:
        """The marker that stands for a secret. Keeps nothing; about 1 us."""
        return f"[secret:{found.name}:{self._key.digest(found.value)}]"

    def keep(self, trajectory: TrajectoryID, found: Sequence[Found]) -> list[str]:
        """Keep the originals for a trajectory, in one transaction, and return their markers in order. Keeping one again
        changes nothing.

        A vault keeps a bounded number of secrets for a trajectory. Beyond that, markers cannot be revealed: an agent that
        prints millions of made-up tokens neither fills the disk nor has them recorded in plain text.
        """
        markers = [self.marker(item) for item in found]
        with self._db.transaction():
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
        if count >= MAX_KEPT or size + len(value) > MAX_KEPT_BYTES or self._read_sealed(trajectory, marker) is not None:
            return
        self._db.write(
            "INSERT INTO secrets VALUES (?, ?, ?)", (trajectory, marker, self._seal(trajectory, marker, value))
        )
        self._sizes[trajectory] = (count + 1, size + len(value))

    def reveal(self, marker: str, owners: Collection[TrajectoryID]) -> bytes | None:
        """The original, if one of `owners` has kept it; None if not, or if this is no marker."""
        if not MARKER.fullmatch(marker):
            return None
        with self._db.lock:
            for owner in owners:
                if (sealed := self._read_sealed(owner, marker)) is not None:
                    return self._unseal(owner, marker, sealed)
        return None

    def forget(self, trajectory: TrajectoryID) -> None:
        """Delete a trajectory's secrets. None is no error."""
        with self._db.transaction():
            self._db.write("DELETE FROM secrets WHERE trajectory = ?", (trajectory,))
            self._sizes.pop(trajectory, None)

    def flush(self) -> None:
        """Return when everything kept so far is durable against power loss."""
        self._db.flush()

    def _size(self, trajectory: TrajectoryID) -> tuple[int, int]:
        if trajectory not in self._sizes:
            sums = "SELECT count(*), coalesce(sum(length(sealed)), 0) FROM secrets WHERE trajectory = ?"
            count, size = self._db.read(sums, (trajectory,))[0]
            if len(self._sizes) >= 10_000:
                self._sizes.clear()
            self._sizes[trajectory] = (count, size - count * _OVERHEAD_BYTES)
        return self._sizes[trajectory]

    def _read_sealed(self, trajectory: TrajectoryID, marker: str) -> bytes | None:
        rows = self._db.read("SELECT sealed FROM secrets WHERE trajectory = ? AND marker = ?", (trajectory, marker))
        return rows[0][0] if rows else None

    def _seal(self, trajectory: TrajectoryID, marker: str, value: bytes) -> bytes:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return _SEALED_VERSION + nonce + self._cipher.encrypt(nonce, value, _associated_data(trajectory, marker))

    def _unseal(self, trajectory: TrajectoryID, marker: str, sealed: bytes) -> bytes:
        try:
            version, nonce, ciphertext = sealed[:1], sealed[1 : 1 + _NONCE_BYTES], sealed[1 + _NONCE_BYTES :]
            if version == _SEALED_VERSION and len(sealed) >= _OVERHEAD_BYTES:
                return self._cipher.decrypt(nonce, ciphertext, _associated_data(trajectory, marker))
        except (InvalidTag, TypeError):  # a damaged value can be of any type
            pass
        raise DataLoss(f"the original of {marker} of trajectory {trajectory} in {self._path} is damaged: {_REMEDY}")


def _associated_data(trajectory: TrajectoryID, marker: str) -> bytes:
    return f"snapshotd secret 1\0{trajectory}\0{marker}".encode()
