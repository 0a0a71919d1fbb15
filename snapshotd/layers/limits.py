"""The disk limits of live uppers: the file system's project quotas, where it has them."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

from snapshotd.kernel import quota
from snapshotd.types import LayerID, Stack

DISK_SHARE = 0.5
"""Part of the layers' file system that one sandbox may take if no limit is given."""
DISK_LEAST_BYTES = 16 << 20
"""Space that a sandbox at its limit may still use in a step, so that it can remove files and report."""
_BYTES_PER_INODE = 4096
_FIRST_PROJECT = 1 << 24
"""Projects below this are left to other users of the file system."""


class DiskLimits:
    """The limits of one layer store, whose directory is `fd`. Thread-safe."""

    def __init__(self, fd: int) -> None:
        self.enforced = quota.enforced(fd)
        """The file system keeps the limits of live uppers."""
        self._project = _FIRST_PROJECT
        self._lock = threading.Lock()
        st = os.fstatvfs(fd)
        self._disk_bytes = int(st.f_blocks * st.f_frsize * DISK_SHARE)

    def room(self, stack: Stack, disk_bytes: int, known: Mapping[LayerID, int]) -> quota.Used:
        """See `LayerStore.room`. `known`: sizes of layers."""
        disk_bytes = disk_bytes or self._disk_bytes
        left = max(disk_bytes - sum(known.get(layer, 0) for layer in stack.layers), DISK_LEAST_BYTES)
        return quota.Used(left, left // _BYTES_PER_INODE)

    def project(self, fd: int, room: quota.Used) -> int:
        """A project that no file has, limited to `room`. Ids of an earlier daemon's layers are passed over. OSError."""
        with self._lock:
            while quota.used(fd, self._project).inodes:
                self._project += 1
            self._project += 1
            project = self._project - 1
        quota.limit(fd, project, room.bytes, room.inodes)
        return project
