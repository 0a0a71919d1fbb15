"""The key of a vault: one file, made once, for its owner alone, and the keys derived from it.

Bytes: magic "snapsec1", the 32 bytes of the key, BLAKE3-128 of the 40 bytes above.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import blake3

from snapshotd.errors import DataLoss
from snapshotd.kernel import files

_MAGIC = b"snapsec1"
_KEY_BYTES = 32
_CHECK_BYTES = 16
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class VaultKey:
    """Keys for three uses, each derived for it alone."""

    def __init__(self, key: bytes) -> None:
        self._digests = _derive(key, "snapshotd 2026 secrets: digests in markers")
        self.sealing = _derive(key, "snapshotd 2026 secrets: AES-256-GCM of originals")
        self.check = _derive(key, "snapshotd 2026 secrets: proof that key and vault belong together")

    def digest(self, value: bytes) -> str:
        """16 hexadecimal characters. Means nothing without the key."""
        return blake3.blake3(value, key=self._digests).hexdigest(8)


def load_key(path: Path, may_create: bool) -> VaultKey:
    """The key in a file, which is made if it `may_create`. DataLoss when it is damaged, or missing where it should
    be."""
    try:
        data = _read(path)
    except FileNotFoundError:
        if not may_create:
            raise DataLoss(
                f"the key {path} is missing, and without it no recorded secret can be read: restore it from a backup"
            ) from None
        return VaultKey(_create(path))
    except PermissionError:
        raise
    except OSError as exc:
        raise DataLoss(
            f"the key {path} cannot be read ({exc.strerror}): check the disk, or restore it from a backup"
        ) from exc
    end = len(_MAGIC) + _KEY_BYTES
    if data[: len(_MAGIC)] != _MAGIC or _checksum(data[:end]) != data[end:]:
        raise DataLoss(
            f"the key {path} is damaged, and without it no recorded secret can be read: restore it from a backup"
        )
    return VaultKey(data[len(_MAGIC) : end])


def _read(path: Path) -> bytes:
    fd = os.open(path, _READ)
    try:
        os.fchmod(fd, 0o600)
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def _create(path: Path) -> bytes:
    """Durable before it is used."""
    key = secrets.token_bytes(_KEY_BYTES)
    files.create_file(path, _MAGIC + key + _checksum(_MAGIC + key))
    return key


def _checksum(data: bytes) -> bytes:
    return blake3.blake3(data).digest(_CHECK_BYTES)


def _derive(key: bytes, context: str) -> bytes:
    return blake3.blake3(key, derive_key_context=context).digest()
