"""Disk space kept back, so that a sandbox that fills the disk cannot keep the daemon from starting, or a user from
removing files.

A file in the state directory is given up when the disk is full and made again when there is space. It takes
`MAX_BYTES`, or on a disk with less to spare the `_SHARE`th part of the free space.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from snapshotd.kernel.files import allocated_bytes, reserve_file

MAX_BYTES = 32 << 20
MIN_BYTES = 4 << 20
"""A start on a disk that is full to the last block, and a removal, write less than 1 MiB."""
_SHARE = 16
_log = logging.getLogger(__name__)


def adjust(state_dir: Path) -> None:
    """Give the reserve up if less than half of its size is free, make or enlarge it if there is plenty. Never fails for
    lack of space."""
    path = state_dir / "reserve"
    size = allocated_bytes(path)
    st = os.statvfs(state_dir)
    free = st.f_bavail * st.f_frsize
    wanted = min(free // _SHARE, MAX_BYTES)
    if free < size // 2:
        _log.warning(
            "the disk of %s is full: the reserve of %d bytes is given up until there is space again", state_dir, size
        )
        path.unlink(missing_ok=True)
    elif wanted >= max(MIN_BYTES, 2 * size):
        reserve_file(path, wanted)
