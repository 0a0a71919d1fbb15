"""Disk space kept back, so that a sandbox that fills the disk cannot keep the daemon from starting, or a user from removing things.

A file of `RESERVE_BYTES` in the state directory is given up when the disk is full and made again when there is space.
"""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

from snapshotd.errors import NO_ROOM

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
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, RESERVE_BYTES)
        except OSError as exc:
            path.unlink()
            if exc.errno not in (*NO_ROOM, errno.EOPNOTSUPP):
                raise
        finally:
            os.close(fd)
