"""The disk limits of live uppers: the file system's project quotas, where it has them."""

from __future__ import annotations

import os
import threading

from snapshotd.errors import NO_ROOM, OutOfSpace
from snapshotd.kernel import files, quota
from snapshotd.layers.sizes import LayerSizes
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

    def __init__(self, fd: int, sizes: LayerSizes) -> None:
        self._fd, self._sizes = fd, sizes
        self.enforced = quota.enforces_limits(fd)
        """The file system keeps the limits of live uppers."""
        self._project = _FIRST_PROJECT
        self._lock = threading.Lock()
        st = os.fstatvfs(fd)
        self._disk_bytes = int(st.f_blocks * st.f_frsize * DISK_SHARE)

    def room(self, stack: Stack, disk_bytes: int) -> quota.Used:
        """The space above `stack` for a sandbox whose layers may take `disk_bytes` together (0: `DISK_SHARE`). A layer
        whose size is not known yet counts as nothing."""
        left = max((disk_bytes or self._disk_bytes) - self._sizes.total(stack.layers), DISK_LEAST_BYTES)
        return quota.Used(left, left // _BYTES_PER_INODE)

    def limit(self, layer: LayerID, room: quota.Used) -> None:
        """Let an empty layer that becomes a live upper take no more than this, where the file system can see to it.
        Before anything is in it. OutOfSpace, OSError.

        Only upper and work count to the project: a directory that hands its project on takes no hard link from
        elsewhere (EXDEV), as merges and copies make them, so no layer is made in one that does.
        """
        if not self.enforced:
            return
        try:
            project = self._new_project(room)
            for part in ("upper", "work"):
                with files.closing_fd(os.open(f"{layer}/{part}", files.DIR_FLAGS, dir_fd=self._fd)) as fd:
                    quota.join(fd, project)
        except OSError as exc:
            raise no_room(exc, "limit a layer") from exc

    def _new_project(self, room: quota.Used) -> int:
        """A project that no file has, limited to `room`. Ids of an earlier daemon's layers are passed over. OSError."""
        with self._lock:
            while quota.read_use(self._fd, self._project).inodes:
                self._project += 1
            self._project += 1
            project = self._project - 1
        quota.limit(self._fd, project, room.bytes, room.inodes)
        return project


def no_room(exc: OSError, doing: str) -> OSError | OutOfSpace:
    """The error in words if the disk is full; else as it is."""
    if exc.errno in NO_ROOM:
        return OutOfSpace(
            f"cannot {doing}: the state directory's disk is full; free space or remove trajectories with `snapshotd rm`"
        )
    return exc
