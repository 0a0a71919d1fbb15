"""The sizes of sealed layers: an xattr on the directory of each, and their sum in memory."""

from __future__ import annotations

import errno
import os

from snapshotd.errors import NO_ROOM
from snapshotd.kernel.marks import CLASS
from snapshotd.types import LayerID

_SIZE = f"{CLASS}snapshotd.bytes"


class LayerSizes:
    """The sizes of the layers of a store. The store's lock guards it, but for `read`. `fd`: the store's directory."""

    def __init__(self) -> None:
        self._sized: dict[LayerID, int] | None = None
        self._unnoted: dict[LayerID, int] = {}
        """Sizes for which there was no room on the disk."""

    def note(self, fd: int, layer: LayerID, size_bytes: int) -> None:
        """See `LayerStore.note_size`."""
        try:
            os.setxattr(f"/proc/self/fd/{fd}/{layer}", _SIZE, str(size_bytes).encode())
        except FileNotFoundError:
            return
        except OSError as exc:
            if exc.errno not in (*NO_ROOM, errno.EOPNOTSUPP):
                raise
            self._unnoted[layer] = size_bytes  # after a restart it is unknown, and the layer is not evicted
        if self._sized is not None:
            self._sized[layer] = size_bytes

    def known(self, fd: int) -> dict[LayerID, int]:
        """The known sizes. Cost: nothing per layer on disk, but for the first time."""
        if self._sized is None:
            self._sized = {layer: size for layer, (size, _) in self.read(fd).items()}
        return self._sized

    def moved(self, made: LayerID, layer: LayerID) -> None:
        """A layer has another id."""
        for sizes in (self._sized, self._unnoted):
            if sizes is not None and made in sizes:
                sizes[layer] = sizes.pop(made)

    def gone(self, layer: LayerID) -> None:
        """The layer is no more."""
        if self._sized is not None:
            self._sized.pop(layer, None)
        self._unnoted.pop(layer, None)

    def read(self, fd: int) -> dict[LayerID, tuple[int, int]]:
        """See `LayerStore.sizes`."""
        found = {}
        for layer in layers_in(fd):
            path = f"/proc/self/fd/{fd}/{layer}"
            try:
                used = os.stat(path).st_mtime_ns
                found[layer] = (self._unnoted.get(layer) or int(os.getxattr(path, _SIZE)), used)
            except OSError as exc:
                if exc.errno not in (errno.ENODATA, errno.ENOENT, errno.EOPNOTSUPP):
                    raise
        return found


def layers_in(fd: int) -> list[LayerID]:
    """Every layer directory of a store."""
    return [LayerID(name) for name in os.listdir(fd) if name != "images" and not name.startswith(".")]
