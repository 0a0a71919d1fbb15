"""Compression of what the file holds. One byte says how, the rest is content:

0   as it is
1   a zstd frame (RFC 8878) with the dictionary of dictionary.py
"""

from __future__ import annotations

from collections import deque
from functools import cache

import zstandard

from snapshotd.errors import DataLoss
from snapshotd.integrations.langgraph import dictionary

_PLAIN, _ZSTD = b"\x00", b"\x01"
_LEVEL = 1
"""With the dictionary a message becomes as small as at level 6 (441 bytes of 785, and 442), in half of the time (6 µs)."""
_LEAST_BYTES = 32
_MOST_BYTES = 1 << 30
"""SQLite holds no more in one row."""


@cache
def _load_dictionary() -> zstandard.ZstdCompressionDict:
    found = zstandard.ZstdCompressionDict(dictionary.CONTENT, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    found.precompute_compress(level=_LEVEL)
    return found


class _Contexts:
    """One thread at a time may use them."""

    def __init__(self) -> None:
        self.there = zstandard.ZstdCompressor(
            level=_LEVEL, dict_data=_load_dictionary(), write_checksum=False, write_dict_id=False
        )
        self.back = zstandard.ZstdDecompressor(dict_data=_load_dictionary(), max_window_size=1 << 27)


_FREE: deque[_Contexts] = deque()
"""A graph runs its tasks in threads of its own each time: contexts of a thread would be made for each run. So many are
made as were in use at once."""


def _take() -> _Contexts:
    try:
        return _FREE.pop()
    except IndexError:
        return _Contexts()


def compress(data: bytes) -> bytes:
    """The stored form, never more than one byte longer than `data`."""
    if len(data) >= _LEAST_BYTES:
        contexts = _take()
        smaller = contexts.there.compress(data)
        _FREE.append(contexts)
        if len(smaller) < len(data):
            return _ZSTD + smaller
    return _PLAIN + data


def expand(stored: bytes) -> bytes:
    """The content of a stored form. DataLoss: it is not one."""
    if stored[:1] == _PLAIN:
        return stored[1:]
    try:
        if stored[:1] == _ZSTD and zstandard.frame_content_size(stored[1:23]) <= _MOST_BYTES:
            contexts = _take()
            content = contexts.back.decompress(stored[1:])
            _FREE.append(contexts)
            return content
    except zstandard.ZstdError as exc:
        raise DataLoss(f"a stored value cannot be unpacked ({exc}): restore the file from a backup") from exc
    raise DataLoss("a stored value has an unknown form: restore the file from a backup")
