"""Compression of what the file holds. One byte says how, the rest is content:

0   as it is
1   a zstd frame (RFC 8878) with the dictionary of dictionary.py
"""

from __future__ import annotations

import threading
from functools import cache

import zstandard

from snapshotd.errors import DataLoss
from snapshotd.integrations.langgraph import dictionary

_PLAIN, _ZSTD = b"\x00", b"\x01"
_SMALL_BYTES, _SMALL_LEVEL, _LARGE_LEVEL = 4096, 6, 1
"""A message takes 10 µs at level 6. Larger values get the level that keeps up with the disk."""
_LEAST_BYTES = 32
_MOST_BYTES = 1 << 30
"""SQLite holds no more in one row."""


@cache
def _shared(level: int) -> zstandard.ZstdCompressionDict:
    found = zstandard.ZstdCompressionDict(dictionary.CONTENT, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    found.precompute_compress(level=level)
    return found


class _Own(threading.local):
    """Contexts of zstd: one thread at a time may use each."""

    def __init__(self) -> None:
        small, large = (
            zstandard.ZstdCompressor(level=level, dict_data=_shared(level), write_checksum=False, write_dict_id=False)
            for level in (_SMALL_LEVEL, _LARGE_LEVEL)
        )
        self.small, self.large = small, large
        self.back = zstandard.ZstdDecompressor(dict_data=_shared(_SMALL_LEVEL), max_window_size=1 << 27)


_OWN = _Own()


def compress(data: bytes) -> bytes:
    """The stored form, never more than one byte longer than `data`."""
    if len(data) >= _LEAST_BYTES:
        smaller = (_OWN.small if len(data) <= _SMALL_BYTES else _OWN.large).compress(data)
        if len(smaller) < len(data):
            return _ZSTD + smaller
    return _PLAIN + data


def expand(stored: bytes) -> bytes:
    """The content of a stored form. DataLoss: it is not one."""
    if stored[:1] == _PLAIN:
        return stored[1:]
    try:
        if stored[:1] == _ZSTD and zstandard.frame_content_size(stored[1:23]) <= _MOST_BYTES:
            return _OWN.back.decompress(stored[1:])
    except zstandard.ZstdError as exc:
        raise DataLoss(f"a stored value cannot be unpacked ({exc}): restore the file from a backup") from exc
    raise DataLoss("a stored value has an unknown form: restore the file from a backup")
