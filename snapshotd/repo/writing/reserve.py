"""Space kept back for the index, so that garbage collection works on a disk that is full to the last block.

Forgetting objects writes the index's log before anything becomes free. `<index>.reserve` holds the blocks for that: it
is given up when an index cannot be opened or written for want of space, and made again when there is plenty.
"""

from __future__ import annotations

import os
from pathlib import Path

from snapshotd.kernel.files import allocated_bytes, reserve_file

RESERVE_BYTES = 6 << 20
"""SQLite's log is reused from its beginning after 1,000 pages of 4 KiB; one transaction on a full disk adds some
hundred."""
_PLENTY = 8
"""Made only if this many times its size is free."""


def path_of(index_path: Path) -> Path:
    return Path(f"{index_path}.reserve")


def make(index_path: Path) -> None:
    """Keep space back for an index, unless that was done, there is none yet or little is left. Never an error for want of
    space."""
    if not index_path.exists():
        return
    path = path_of(index_path)
    if allocated_bytes(path) >= RESERVE_BYTES:
        return
    free = os.statvfs(index_path.parent)
    if free.f_bavail * free.f_frsize < _PLENTY * RESERVE_BYTES:
        return
    reserve_file(path, RESERVE_BYTES)


def give_up(index_path: Path) -> bool:
    """Free the space. False when there was none kept back."""
    try:
        path_of(index_path).unlink()
    except FileNotFoundError:
        return False
    return True
