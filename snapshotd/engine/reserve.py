"""Disk space kept back, so that a sandbox that fills the disk cannot keep the daemon from starting, or a user from removing things.

A file of `RESERVE_BYTES` in the state directory is given up when the disk is full and made again when there is space.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from snapshotd.kernel.files import reserve_file

RESERVE_BYTES = 32 << 20
_LOW_BYTES = 16 << 20
_PLENTY_BYTES = 512 << 20
_log = logging.getLogger(__name__)


def adjust(state_dir: Path) -> None:
    """Give the reserve up if the disk is nearly full, make it if there is plenty. Never fails for lack of space."""
    path = state_dir / "reserve"
    st = os.statvfs(state_dir)
    free = st.f_bavail * st.f_frsize
    if free < _LOW_BYTES and path.exists():
        _log.warning("the disk of %s is full: the reserve of %d bytes is given up until there is space again", state_dir, RESERVE_BYTES)
        path.unlink()
    elif free > _PLENTY_BYTES and not path.exists():
        reserve_file(path, RESERVE_BYTES)
