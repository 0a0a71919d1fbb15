"""Identity: the keyed hashes that objects are known by, as 32 raw bytes inside the repository and 64 hexadecimal
characters outside.

Contents (and chunks, which are contents) are hashed with the repository's key itself, so that their ids equal the
spool's. Trees, records and inner lists are hashed with keys derived from it, so that bytes of one kind can never pass
for another.
"""

from __future__ import annotations

import re

import blake3

from snapshotd.errors import NotFound

_HEX = re.compile(r"[0-9a-f]{64}")


class Identity:
    """The hashes of one repository. Immutable and thread-safe."""

    def __init__(self, key: bytes) -> None:
        self._content = key
        self._tree = _derive(key, "snapshotd 1 tree")
        self._record = _derive(key, "snapshotd 1 record")
        self._list = _derive(key, "snapshotd 1 inner list")

    def content(self, data: bytes | bytearray | memoryview) -> bytes:
        return blake3.blake3(data, key=self._content).digest()

    def content_hasher(self) -> blake3.blake3:
        """A hasher for a content that comes in pieces."""
        return blake3.blake3(key=self._content)

    def tree(self, data: bytes) -> bytes:
        return blake3.blake3(data, key=self._tree).digest()

    def record(self, data: bytes) -> bytes:
        return blake3.blake3(data, key=self._record).digest()

    def inner_list(self, data: bytes) -> bytes:
        return blake3.blake3(data, key=self._list).digest()


def raw_id(object_id: str, what: str) -> bytes:
    """An id's bytes. NotFound for a string that is no id."""
    if not _HEX.fullmatch(object_id):
        raise NotFound(f"{object_id[:80]!r} is not the id of a {what}")
    return bytes.fromhex(object_id)


def _derive(key: bytes, context: str) -> bytes:
    return blake3.blake3(key, derive_key_context=context).digest()
