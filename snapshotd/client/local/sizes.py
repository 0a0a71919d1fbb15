"""Amounts of memory and disk as people write them: `512m`, `2g`, with binary units."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from snapshotd.errors import UsageError

LIMITS = ("memory", "cpus", "pids", "disk")
"""The keywords of a sandbox's limits."""
DIGITS_MOST = 16
"""Longer numbers are above every limit, and those of thousands of digits are refused by `int` in its own words."""

_SIZE = re.compile(r"(\d+)([bkmgt]?)(?:i?b)?", re.IGNORECASE)
_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def size_bytes(text: str) -> int | None:
    """So many bytes; None if it is no such amount."""
    match = _SIZE.fullmatch(text.strip())
    return int(match[1]) * _UNITS[match[2].lower()] if match and len(match[1]) <= DIGITS_MOST else None


def size_given(keyword: str, size: int | str | None) -> int | None:
    """A keyword's value as bytes. UsageError for text that is no amount."""
    if not isinstance(size, str):
        return size
    count = size_bytes(size)
    if count is None:
        raise UsageError(
            f"{keyword}={size[:80]!r} is no amount: give bytes as a number, or text such as '512m' or '2g'"
        )
    return count


def limit_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """The limits among the keywords of a sandbox, as the API takes them. UsageError for text that is no amount."""
    limits = {
        "memory_bytes": size_given("memory", options.get("memory")),
        "cpus": options.get("cpus"),
        "pids": options.get("pids"),
        "disk_bytes": size_given("disk", options.get("disk")),
    }
    return {key: value for key, value in limits.items() if value is not None}
