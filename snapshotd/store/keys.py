"""The form of a key, checked in one place, and the parts that all stores share."""

from __future__ import annotations

import re
from collections.abc import Sequence

from snapshotd.errors import UsageError

MAX_KEY_CHARS = 200
PART_PATTERN = re.compile(r"[a-z0-9._-]+")
Part = bytes | bytearray | memoryview


def is_part(name: str) -> bool:
    """True if `name` may stand between two slashes of a key."""
    return PART_PATTERN.fullmatch(name) is not None and name not in (".", "..")


def is_key(key: str) -> bool:
    """True if `key` is well formed (see base.py)."""
    return 1 <= len(key) <= MAX_KEY_CHARS and all(is_part(part) for part in key.split("/"))


def check_store_key(key: str) -> str:
    """Return `key`. UsageError when it is malformed: it never becomes a path or a request."""
    if not is_key(key):
        raise UsageError(
            f"{key[:300]!r} is not a key of a store; use 1 to {MAX_KEY_CHARS} of a-z 0-9 . _ - in parts joined by /"
        )
    return key


def check_range(offset: int, length: int | None) -> None:
    """UsageError for a negative offset or length."""
    if offset < 0 or (length is not None and length < 0):
        raise UsageError(f"a value cannot be read at offset {offset}, length {length}; neither may be negative")


def as_views(parts: Sequence[Part]) -> list[memoryview]:
    """The parts that are not empty, as views of bytes; nothing is copied."""
    return [view for part in parts if (view := memoryview(part).cast("B")).nbytes]
