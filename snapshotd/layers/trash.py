"""Layers that are being deleted: each is renamed first, so that a layer is there or not there, also after a crash."""

from __future__ import annotations

import errno
import os
import threading

from snapshotd.kernel import files
from snapshotd.types import LayerID

_PREFIX = ".evicted-"


class Trash:
    """The trash of one layer store, whose directory is `fd`. Thread-safe, but for two calls with one layer."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def take(self, layer: LayerID) -> None:
        """Rename a layer into the trash. FileNotFoundError, OSError (ENOSPC)."""
        try:
            os.rename(layer, _PREFIX + layer, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except OSError as exc:
            if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            files.remove_tree(self._fd, _PREFIX + layer)  # an earlier one of that id, whose removal was cut off
            os.rename(layer, _PREFIX + layer, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def remove(self, layer: LayerID) -> None:
        """Delete a layer that was taken. Cost: proportional to its entries."""
        with self._lock:
            files.remove_tree(self._fd, _PREFIX + layer)

    def empty(self) -> None:
        """Delete what is left of removals that were cut off."""
        with self._lock:
            for name in os.listdir(self._fd):
                if name.startswith(_PREFIX):
                    files.remove_tree(self._fd, name)
