"""Proves that layers are on the disk as they were written, so that what is read from them is what was acknowledged.

The kernel tells of a write that failed once, to a file that has been open since before: so the store's own descriptors
are asked, and the answer is remembered.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable
from pathlib import Path

from snapshotd.errors import DataLoss, Unsupported
from snapshotd.layers import witness_main
from snapshotd.layers.witness import Witness
from snapshotd.types import LayerID

FAILED = (
    "the file system of the layers reported an error (the daemon's and the kernel's logs say which): snapshots that are not "
    "stored are lost, stored ones are whole; look after the disk, then restart the daemon (`snapshotd daemon --stop`)"
)


class Proof:
    """Asks the file system that holds a store's layers what became of them. Thread-safe."""

    def __init__(self, root: Path, fd: int, image: Path | None, witness: Witness | None, missing: str) -> None:
        """`fd`: the caller's descriptor of `root`; the rest as in `LayerStore`."""
        self.failed = False
        """A write failed: what was not proven before may be other bytes than were written."""
        self.missing = missing
        """Reason why the layers cannot be reached; empty: they can."""
        self.earlier = witness is None or witness.proven
        """The layers that were found are what an earlier daemon acknowledged, unless the power was lost since."""
        self._root, self._fd, self._image, self._witness = root, fd, image, witness
        self._image_fd = -1 if image is None else os.open(image, os.O_RDONLY | os.O_CLOEXEC)
        self._syncing = threading.Lock()
        self._proven: set[LayerID] = set()

    def close(self) -> None:
        """Close the files, and let the witness end. Nothing is proven afterwards."""
        if self._image_fd >= 0:
            os.close(self._image_fd)
        if self._witness is not None:
            self._witness.close()

    def watch(self) -> None:
        """Have a witness tell if what is captured from now on is written. Before that, no layer may be left that must
        not be trusted. OSError."""
        if self._witness is not None and not self.missing:
            self._witness.watch(self._root, self._image)

    def settle(self) -> None:
        """Have the next daemon trust the layers. Nothing may be captured any more. OSError: they are not durable."""
        self.sync()
        if self._witness is not None and not self.missing:
            self._witness.settle()

    def fail(self) -> None:
        """Note that the file system reported an error."""
        self.failed = True

    def sync(self) -> None:
        """Return when all that was written is durable. OSError: some of it is not, and never will be; so says every later
        call."""
        with self._syncing:
            if self.failed:
                raise OSError(errno.EIO, FAILED)
            try:
                witness_main.sync(self._fd, self._image_fd)
            except OSError:
                self.failed = True
                raise

    def check(self) -> None:
        """DataLoss: a write to the layers failed. Unsupported: they cannot be reached."""
        if self.missing:
            raise Unsupported(self.missing)
        if self.failed:
            raise DataLoss(FAILED)

    def prove(self, layers: Iterable[LayerID]) -> None:
        """Return when sealed layers are on the disk as they were written, so that what is read from them is right. Errors
        as `check`. Cost: nothing if they were proven before, else a syncfs."""
        wanted = set(layers)
        self.check()
        if wanted <= self._proven:
            return
        try:
            self.sync()
        except OSError as exc:
            raise DataLoss(FAILED) from exc
        self._proven |= wanted

    def forget(self, layer: LayerID) -> None:
        """Forget a layer that is gone, or whose id another one has."""
        self._proven.discard(layer)
