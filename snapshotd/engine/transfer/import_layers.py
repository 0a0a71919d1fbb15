"""The layers of a bundle that is taken in: each through the hardened ingest, and runs of neighbours merged."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from snapshotd.engine.transfer.bundle_reading import BundleReader, LayerStream
from snapshotd.errors import UsageError
from snapshotd.formats.ingest import TarLimits, ingest_tar
from snapshotd.formats.tar_reader import BLOCK
from snapshotd.layers.merge import merge
from snapshotd.layers.store import LayerStore
from snapshotd.trees.base import Warnings
from snapshotd.types import LayerID, SnapshotID, Stack

FAN_IN = 16
"""Number of neighbours that become one layer: a stack of 10,000 snapshots stays below 50."""
_PADDING_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class BundleLimits:
    """Bounds of one bundle, unpacked: its bytes, and the entries of all its layers together."""

    bytes: int = 256 << 30
    entries: int = 10_000_000


@dataclass(slots=True)
class BundleLine:
    """State of an imported line: its last snapshot (`parent`), the last one with files (`base`), and that one's layers
    (`stack`)."""

    stack: Stack
    parent: SnapshotID | None = None
    base: SnapshotID | None = None
    messages: int = 0
    seq: int = -1
    whole: bool = True
    """Nothing lies below: the next layer is a whole tree."""
    levels: list[int] = field(default_factory=list)
    """Number of merges of each of our layers on top of the stack, newest first; the whole tree is not among them."""


class ImportedLayers:
    """`made`: all layers so far, pinned, including those that were made only to be merged. `left`: what remains of the
    limits."""

    def __init__(self, store: LayerStore, limits: BundleLimits, warnings: Warnings) -> None:
        self._store, self.left, self._warnings = store, limits, warnings
        self.made: list[LayerID] = []

    def take(self, reader: BundleReader, number: int, line: BundleLine, *, has_files: bool) -> int:
        """Take the snapshot's layer, if it has one, on top of the line's stack. Returns how many it has of its own."""
        stream = reader.layer(number)
        if stream is None:
            if has_files and line.whole:
                raise UsageError("the bundle is malformed: it lacks the files of its first snapshot")
            return 0
        if not has_files:
            raise UsageError("the bundle is malformed: it holds files of a snapshot that has none")
        self._compact(line)
        layer = self._create()
        fd = self._store.read_upper(layer)
        try:
            limits = TarLimits(self.left.entries, self.left.bytes)
            report = ingest_tar(
                stream, fd, oci_whiteouts=False, overlay_marks=not line.whole, marks=self._store.marks, limits=limits
            )
        finally:
            os.close(fd)
        _to_the_end(stream)
        self._store.drop_work(layer)
        entries = self.left.entries - report.files - report.directories
        self.left = BundleLimits(self.left.bytes - report.bytes, entries)
        for warning in report.warnings:
            self._warnings.add(f"snapshot {number + 1}: {warning}")
        line.stack = line.stack.push(layer)
        if not line.whole:
            line.levels.insert(0, 0)
        line.whole = False
        return 1

    def _compact(self, line: BundleLine) -> None:
        """Merge runs of neighbours on top of the stack, as often as there is one: the kernel takes 500 layers, and
        every snapshot's row lists its own."""
        layers = line.stack.layers
        while (end := _run(line.levels)) is not None:
            start = end - FAN_IN
            merged = self._create()
            fds: list[int] = []
            try:
                fds.extend(self._store.read_upper(layer) for layer in layers[start:end])
                target = self._store.read_upper(merged)
                fds.append(target)
                merge(fds[:-1], target)
            finally:
                for fd in fds:
                    os.close(fd)
            self._store.drop_work(merged)
            layers = (*layers[:start], merged, *layers[end:])
            line.levels[start:end] = [line.levels[start] + 1]
        line.stack = Stack(line.stack.image, layers)

    def _create(self) -> LayerID:
        layer = self._store.create()
        self.made.append(layer)
        return layer

    def settle(self, needed: set[LayerID]) -> None:
        """Let go of all: the ones that no row needs are removed."""
        for layer in self.made:
            if layer in needed:
                self._store.unpin([layer])
            else:
                self._store.remove(layer)


def _run(levels: list[int]) -> int | None:
    """The end of the oldest run of `FAN_IN` neighbours that were merged equally often."""
    end = len(levels)
    while end >= FAN_IN:
        start = end
        while start > 0 and levels[start - 1] == levels[end - 1]:
            start -= 1
        if end - start >= FAN_IN:
            return end
        end = start
    return None


def _to_the_end(stream: LayerStream) -> None:
    """Skip the second half of the end marker, and the zeros that tars are padded with."""
    for _ in range(_PADDING_BYTES // BLOCK):
        rest = stream.read(BLOCK)
        if not rest:
            return
        if rest.strip(b"\0"):
            break
    raise UsageError("the bundle is malformed: something follows the end of a layer")
