"""JSON texts that a user has sent or written: read in a time that has a bound.

Python reads a text without a pause for other threads, and 16 MiB of small values take it three seconds (measured: lists
without content, keys). A long string costs nothing, so the bound is one of parts.
"""

from __future__ import annotations

import json
from typing import Any

from snapshotd.errors import LimitExceeded

MOST_PARTS = 100_000
"""About 50 ms of reading."""
_BYTES_OF_A_PART = 10


def parse(data: bytes) -> Any:
    """The value of a JSON text that a user has sent or written. ValueError: it is none. LimitExceeded: it has so many
    parts that reading it would hold the interpreter, and so all others."""
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside = b"".join(plain.split(b'"')[::2]) if plain.count(b'"') <= 2 * MOST_PARTS else plain
    if len(outside) > _BYTES_OF_A_PART * MOST_PARTS or sum(map(outside.count, (b",", b"[", b"{"))) > MOST_PARTS:
        raise LimitExceeded(f"a JSON text from an agent may have {MOST_PARTS} parts, and this one has more")
    try:
        return json.loads(data.decode(errors="replace"))
    except RecursionError as exc:
        raise ValueError("it nests too deep") from exc
