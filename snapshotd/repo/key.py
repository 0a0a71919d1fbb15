"""The key of the repository's identity hash: one file, made once.

Bytes: magic "snapkey1", the 32 bytes of the key, XXH3-128 of the 40 bytes above (big-endian).
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import xxhash

from snapshotd.errors import DataLoss
from snapshotd.kernel import files

_MAGIC = b"snapkey1"
_KEY_BYTES = 32
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


def load_key(directory: Path) -> bytes:
    """The repository's key (32 bytes), made if this is a new repository. DataLoss when it is damaged, or missing while
    there are blobs or an index."""
    path = directory / "key"
    try:
        fd = os.open(path, _READ)
    except FileNotFoundError:
        if any((directory / name).exists() for name in ("blobs", "index.db")):
            raise DataLoss(
                f"the key of the repository {directory} is missing, and without it no blob can be checked: restore {path}"
            ) from None
        return _create_key(directory)
    try:
        data = os.read(fd, 4096)
    finally:
        os.close(fd)
    end = len(_MAGIC) + _KEY_BYTES
    if data[: len(_MAGIC)] != _MAGIC or xxhash.xxh3_128_digest(data[:end]) != data[end:]:
        raise DataLoss(
            f"the key of the repository {directory} is damaged, and without it no blob can be checked: restore {path}"
        )
    return data[len(_MAGIC) : end]


def _create_key(directory: Path) -> bytes:
    """Write a new key, durably, before any blob uses it: no blob can be checked without it."""
    key = secrets.token_bytes(_KEY_BYTES)
    files.create_file(directory / "key", _MAGIC + key + xxhash.xxh3_128_digest(_MAGIC + key))
    files.sync_dir(directory.parent)
    return key
