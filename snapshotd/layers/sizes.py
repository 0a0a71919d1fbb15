"""The sizes of sealed layers: an xattr on the directory of each, and their sum in memory."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable

from snapshotd.errors import NO_ROOM
from snapshotd.kernel.abilities import Marks
from snapshotd.types import LayerID


class LayerSizes:
    """The sizes of the layers of a store, whose directory is `fd`. Thread-safe.

    The attribute is of the kind that only root can set (`trusted`), or, like overlayfs's `marks`, of a user's (`user`): no
    sandbox sees the directory that has it."""

    def __init__(self, fd: int, marks: Marks) -> None:
        self._fd = fd
        self._name = f"{marks.prefix.decode().partition('.')[0]}.snapshotd.bytes"
        self._lock = threading.RLock()
        self._sized: dict[LayerID, int] | None = None
        self._unnoted: dict[LayerID, int] = {}
        """Sizes for which there was no room on the disk."""

    def note(self, layer: LayerID, size_bytes: int) -> None:
        """Remember how much space a sealed layer takes. Not an error when it is gone."""
        with self._lock:
            try:
                os.setxattr(self._path(layer), self._name, str(size_bytes).encode())
            except FileNotFoundError:
                return
            except OSError as exc:
                if exc.errno not in (*NO_ROOM, errno.EOPNOTSUPP):
                    raise
                self._unnoted[layer] = size_bytes  # after a restart it is unknown, and the layer is not evicted
            if self._sized is not None:
                self._sized[layer] = size_bytes

    def total(self, layers: Iterable[LayerID] | None = None) -> int:
        """Disk use of all layers, or of some, as far as it is known. Cost: nothing per layer on disk, but for the first
        time."""
        with self._lock:
            if self._sized is None:
                self._sized = {layer: size for layer, (size, _) in self.read().items()}
            return sum(self._sized.values() if layers is None else (self._sized.get(layer, 0) for layer in layers))

    def move(self, made: LayerID, layer: LayerID) -> None:
        """Note that a layer has another id."""
        with self._lock:
            for sizes in (self._sized, self._unnoted):
                if sizes is not None and made in sizes:
                    sizes[layer] = sizes.pop(made)

    def forget(self, layer: LayerID) -> None:
        """Forget a layer that is no more."""
        with self._lock:
            if self._sized is not None:
                self._sized.pop(layer, None)
            self._unnoted.pop(layer, None)

    def read(self) -> dict[LayerID, tuple[int, int]]:
        """For each layer whose size is known: size in bytes, time of last use in ns."""
        found = {}
        for layer in layers_in(self._fd):
            path = self._path(layer)
            try:
                used = os.stat(path).st_mtime_ns
                found[layer] = (self._unnoted.get(layer) or int(os.getxattr(path, self._name)), used)
            except OSError as exc:
                if exc.errno not in (errno.ENODATA, errno.ENOENT, errno.EOPNOTSUPP):
                    raise
        return found

    def _path(self, layer: LayerID) -> str:
        return f"/proc/self/fd/{self._fd}/{layer}"


def layers_in(fd: int) -> list[LayerID]:
    """Every layer directory of a store."""
    return [LayerID(name) for name in os.listdir(fd) if name != "images" and not name.startswith(".")]
