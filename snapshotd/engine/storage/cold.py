"""Snapshots whose layers were evicted: they start at once all the same, and their layers come back.

Everything in which a cold snapshot differs from its image is one new layer. It is written in the background (by a child
process) and served meanwhile through FUSE; a sandbox that began on the FUSE form moves over to the real layer at its
next pivot, because both have one id. Without FUSE (not installed, or its process cannot start) a start waits until the
layer is written.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from snapshotd.engine.context import Context
from snapshotd.engine.storage.child import EngineChild
from snapshotd.errors import DataLoss, InternalError, NotFound, SandboxFailed, SnapshotdError, Unsupported
from snapshotd.failpoints import hit
from snapshotd.trees.base import RestoreReport
from snapshotd.types import ImageID, LayerID, Snapshot, SnapshotState, Stack, TreeID, new_id, short

_log = logging.getLogger(__name__)

WRITE_DELAY_S = 0.5
"""Delay before the layer of a cold snapshot is written, if it can be used before that: the caller is about to start a
command, which would wait for processors and disk (at load 14, of 2 processors: 250 ms to the first command's output,
instead of the hot 54)."""
_WRITERS = 8
"""Layers are written one at a time. The others of these threads wait for the delay, or for their turn."""


class LazyServer(Protocol):
    """The FUSE mount that serves layers that are not there yet (fuse/lazy.py)."""

    def start(self) -> object:
        """Mount, unless it is mounted: then the first `open_layer` need not wait for it. Unsupported: it never will,
        and has told the log so. InternalError: the process was killed."""

    def open_layer(self, tree: TreeID, below: TreeID, shift: int) -> int:
        """O_PATH descriptor of the layer that makes `tree` of `below`, its ids shifted up by `shift`. Starts the mount
        if need be, with the errors of `start`. OSError, SandboxFailed."""

    def server(self) -> object | None:
        """Names the process that serves now; None if there is none. Layers that another process had opened are gone."""

    def drop_layer(self, tree: TreeID, below: TreeID, shift: int) -> None:
        """Free the memory that the layer takes: no stack uses it any more."""

    def close(self) -> None: ...


@dataclass(slots=True)
class _Rebuilt:
    """A layer that was written from the repository, or is being written."""

    layer: LayerID
    shifts: set[int] = field(default_factory=set)
    """The id shifts with which it was opened as it is served; none: it is not served while it is written."""
    written: Future[None] = field(init=False)

    @property
    def failed(self) -> bool:
        return self.written.done() and self.written.exception() is not None

    @property
    def there(self) -> bool:
        return self.written.done() and self.written.exception() is None


class Cold:
    """Gives any readable snapshot a stack that can be mounted now. Thread-safe."""

    def __init__(
        self,
        context: Context,
        merged: Callable[[Stack], Stack],
        rebuilder: EngineChild,
        lazy: LazyServer,
        store_all: Callable[[], None],
        came_back: Callable[[], None],
    ) -> None:
        """`store_all`: returns when everything captured is stored. `came_back`: called when a layer was written."""
        self._context, self._merged, self._rebuilder, self._lazy = context, merged, rebuilder, lazy
        self._store_all, self._came_back = store_all, came_back
        self._lock = threading.Lock()
        self._rebuilt: dict[tuple[ImageID, TreeID], _Rebuilt] = {}
        self._writers = ThreadPoolExecutor(_WRITERS, "rebuild-layer")
        self._closing = threading.Event()

    def take(self, snapshot: Snapshot) -> Stack:
        """A stack with the snapshot's files, all of it there and held; the caller releases its layers. DataLoss,
        OutOfSpace, and why a snapshot that is captured on a layer that was never written cannot be stored."""
        store = self._context.store
        if snapshot.state is not SnapshotState.PRUNED:
            for stack in (self._merged(snapshot.stack), snapshot.stack):
                if store.hold(stack.layers):
                    return stack
        if snapshot.tree is None:
            snapshot = self._wait_until_stored(snapshot)
        if snapshot.tree is None:
            raise gone_error(snapshot)
        return self._stack_of_cold(snapshot, snapshot.tree)

    def _wait_until_stored(self, snapshot: Snapshot) -> Snapshot:
        """Read a snapshot anew, and store it first if it is only captured. It may have been stored and evicted since
        the caller read it, or its layer was being written when the daemon died (see `_store_what_has_no_layers`)."""
        catalog = self._context.catalog
        now = catalog.snapshots.get(snapshot.id)
        if now.state is SnapshotState.CAPTURED:
            self._store_all()
            now = catalog.snapshots.get(snapshot.id)
        return now

    def prepare(self) -> None:
        """Mount the server of cold layers, so that the first cold snapshot starts as quickly as the next."""
        self._can_serve()

    def _can_serve(self) -> bool:
        """False if there will never be a mount."""
        try:
            self._lazy.start()
        except Unsupported:
            return False
        except SnapshotdError as exc:
            _log.warning("cold snapshots are not served yet: %s", exc.message)
        return True

    def restore(self, tree: TreeID, path: bytes, target: Path) -> RestoreReport:
        """Write a directory of a stored tree into an empty directory, which the child process can open by this path. The
        tree is pinned by the caller."""
        answer = self._rebuilder.ask({"op": "restore", "tree": tree, "path": path.hex(), "target": str(target)})
        return RestoreReport(answer["files"], answer["directories"], answer["bytes"], tuple(answer["warnings"]))

    def write_image(self, tree: TreeID, target: Path) -> None:
        """Write an image's root from its stored tree into an empty directory of the layer store."""
        for warning in self._rebuilder.ask({"op": "image", "tree": tree, "target": str(target)})["warnings"]:
            _log.warning("image of tree %s: %s", tree, warning)

    def server(self) -> object | None:
        """Names the server of layers that are not written yet; None if there is none."""
        return self._lazy.server()

    def trees(self) -> set[TreeID]:
        """The trees of layers that are being written or served."""
        with self._lock:
            return {tree for (_, tree), item in self._rebuilt.items() if not item.there}

    def is_hot(self, snapshot: Snapshot) -> bool:
        """True if all of the snapshot's layers are on disk."""
        hot = self._context.store.hold(snapshot.stack.layers)
        if hot:
            self._context.store.release(snapshot.stack.layers)
        return hot

    def close(self) -> None:
        """Stop rebuilding; an unfinished layer is begun again when it is needed. Idempotent."""
        self._closing.set()
        self._rebuilder.close()
        self._writers.shutdown()
        self._lazy.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _stack_of_cold(self, snapshot: Snapshot, tree: TreeID) -> Stack:
        image = self._context.image(snapshot.stack.image)
        if image is None or image.tree is None:
            raise DataLoss(
                f"the image of snapshot {short(snapshot.id)} is missing, so it cannot be started; `snapshotd restore` its files"
            )
        if tree == image.tree:
            return Stack(image.id)
        with self._lock:
            rebuilt = self._rebuilt.get((image.id, tree))
            if rebuilt is None or rebuilt.failed or not self._context.store.hold([rebuilt.layer]):
                rebuilt = self._begin(image.id, tree, image.tree)
        if not (rebuilt.there or (rebuilt.shifts and self._can_serve())):
            try:
                rebuilt.written.result()
            except SnapshotdError:
                self._context.store.release([rebuilt.layer])
                raise
        return Stack(image.id, (rebuilt.layer,))

    def _begin(self, image: ImageID, tree: TreeID, below: TreeID) -> _Rebuilt:
        """Announce the layer, held once, and start writing it."""
        store = self._context.store
        self._forget_evicted()
        rebuilt = _Rebuilt(LayerID(new_id()))
        try:
            os.close(self._lazy.open_layer(tree, below, 0))
            rebuilt.shifts.add(0)
        except Unsupported:
            pass  # the layer can be used when it is written
        except (OSError, SnapshotdError) as exc:
            _log.warning("tree %s is not served while its files are written: %s", tree, exc)
        store.expect(rebuilt.layer, lambda shift: self._open(rebuilt, tree, below, shift))
        store.hold([rebuilt.layer])
        rebuilt.written = self._writers.submit(self._write, rebuilt.layer, bool(rebuilt.shifts), tree, below)
        rebuilt.written.add_done_callback(lambda written: self._log_failure(tree, written))
        self._rebuilt[image, tree] = rebuilt
        return rebuilt

    def _log_failure(self, tree: TreeID, written: Future[None]) -> None:
        failure = written.exception()
        if failure is not None and not self._closing.is_set():
            _log.error("the layer of tree %s cannot be written: %s", tree, failure)

    def _forget_evicted(self) -> None:
        """Forget layers that came back and were evicted again: no stack uses them, in either form. Caller holds the
        lock."""
        for (image_id, tree), rebuilt in list(self._rebuilt.items()):
            if not rebuilt.there or (self._context.store.root / rebuilt.layer).exists():
                continue
            del self._rebuilt[image_id, tree]
            image = self._context.image(image_id)
            if image is not None and image.tree is not None:
                for shift in rebuilt.shifts:
                    self._lazy.drop_layer(tree, image.tree, shift)

    def _open(self, rebuilt: _Rebuilt, tree: TreeID, below: TreeID, shift: int) -> int:
        """The layer as it is served. Where nothing is served any more, when it is written. SnapshotdError, OSError."""
        rebuilt.shifts.add(shift)
        try:
            return self._lazy.open_layer(tree, below, shift)
        except Unsupported:
            rebuilt.written.result()
        if shift:
            raise SandboxFailed(
                "the snapshot's files have just been written, and were to be read through FUSE; repeat the command"
            )
        return self._context.store.open_upper(rebuilt.layer)

    def _rebuild(self, tree: TreeID, below: TreeID) -> tuple[LayerID, dict[str, Any]]:
        """Write a new layer, once more if only other nodes knew where something is. SnapshotdError, OSError."""
        caught_up = False
        while True:
            made = self._context.store.create()
            try:
                return made, self._rebuilder.ask({"op": "rebuild", "tree": tree, "below": below, "layer": made})
            except SnapshotdError as exc:
                self._context.store.remove(made)
                if caught_up or not isinstance(exc, DataLoss | NotFound) or not self._context.ownership.catch_up():
                    raise
                caught_up = True

    def _write(self, layer: LayerID, served: bool, tree: TreeID, below: TreeID) -> None:
        """Write the layer and publish it. A layer that is `served` stays so on failure. SnapshotdError."""
        store = self._context.store
        made: LayerID | None = None
        try:
            if served:
                self._closing.wait(WRITE_DELAY_S)
            made, answer = self._rebuild(tree, below)
            for warning in answer["warnings"]:
                _log.warning("layer of tree %s: %s", tree, warning)
            store.drop_work(made)
            hit("engine.cold.built")
            store.publish(made, layer)
            store.sizes.note(layer, answer["bytes"])  # not earlier: a layer with a known size may be evicted
            self._came_back()
        except (SnapshotdError, OSError) as exc:
            if made is not None:
                store.remove(made)
            if not served:
                store.forget(layer)
            if isinstance(exc, SnapshotdError):
                raise
            raise InternalError(f"a layer cannot be written: {exc}; check the disk") from exc


def gone_error(snapshot: Snapshot) -> SnapshotdError:
    """The error that tells why a snapshot has no files (any more)."""
    if snapshot.state is SnapshotState.PRUNED:
        return NotFound(
            f"the files of snapshot {short(snapshot.id)} were given up by the retention policy; its call and conversation are still there, "
            f"`snapshotd log {short(snapshot.trajectory)}` shows which snapshots have theirs"
        )
    if snapshot.state is SnapshotState.LOST:
        return DataLoss(
            f"snapshot {short(snapshot.id)} was lost when the machine went down or a write to the disk failed before it was stored, "
            f"or is damaged; "
            f"`snapshotd log {short(snapshot.trajectory)}` shows the last good one before it"
        )
    return DataLoss(
        f"a layer of snapshot {short(snapshot.id)} is missing, and it is not stored yet; repeat the command when the daemon has stored it, "
        f"or else restore the state from a backup"
    )
