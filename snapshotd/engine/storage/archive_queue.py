"""From captured to stored: a thread archives snapshots in the background, oldest first, in batches.

    1 the child applies a snapshot's own layers to its base's stored tree, and takes its outputs and its record     (archiver.py)
    2 after a batch one flush: packs durable, then the index; then the layers themselves, which proves that what was read
      from them is what was written: a write to them that failed is told there, and only there
    3 the catalog says `stored`, with the tree; then it is flushed                                                    <- the commit point
    4 the spool drops the outputs of these snapshots, and layers beyond the budget are evicted

The work list is in the catalog alone (state `captured`), so a crash anywhere costs time and no data: the batch runs
again, and finds its chunks in the packs or leaves them as garbage. When the disk is full the same batch is tried again
later; callers that wait get the error.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from snapshotd.engine.context import Context
from snapshotd.engine.storage import records
from snapshotd.engine.storage.archiver import ArchivedTree, Archiver
from snapshotd.errors import DataLoss, InternalError, NotFound, OutOfSpace, SnapshotdError, Unavailable
from snapshotd.failpoints import hit
from snapshotd.layers.proof import FAILED
from snapshotd.types import BlobID, ImageID, RecordID, Snapshot, SnapshotID, SnapshotState, TrajectoryID, TreeID, short

_log = logging.getLogger(__name__)

DELAY_S = 0.3
"""Time from the first captured snapshot to the begin of its batch, if no caller waits: steps that follow one another
share a flush."""
BATCH = 64
MAX_BACKLOG = 2048
"""More captured snapshots than this, and steps wait: a disk that cannot keep up must slow the agents down, not fill
with layers."""
_RETRY_S = (1.0, 5.0, 15.0)
TAGS_RECORD = "tags_record"
"""Catalog fact: the record with the latest tags."""
_STRIKES = 3
_STUCK_S = 60.0
"""After so long a snapshot that could not be stored is tried again, as it is for each caller who waits."""
_REMEMBERED_RECORDS = 1024


@dataclass(frozen=True, slots=True)
class _Done:
    snapshot: Snapshot
    tree: TreeID
    record: RecordID
    archived: ArchivedTree | None
    warnings: tuple[str, ...]


class Archive:
    """See the module's text. Thread-safe."""

    def __init__(self, context: Context, archiver: Archiver) -> None:
        self._catalog, self._proof, self._batches = context.catalog, context.store.proof, _Batches(context, archiver)
        self._after_batch: Callable[[], object] = lambda: None
        self._changed = threading.Condition()
        self._due_at: float | None = None
        self._tags_changed = False
        self._waiters = 0
        self._rounds = 0
        self._backlog = len(context.catalog.snapshots.unstored())
        """Number of snapshots that are captured and not stored, or were removed since the last batch."""
        self._failures = 0
        self.failure: SnapshotdError | None = None
        """Reason why the last batch could not be stored; None when it could."""
        self._storing = threading.Lock()
        self._closed = False
        if self._backlog:
            self._due_at = time.monotonic()
        self._thread = threading.Thread(target=self._work, name="archive")

    def start(self, after_batch: Callable[[], object]) -> None:
        """Begin to store. `after_batch` is called after each batch."""
        self._after_batch = after_batch
        self._thread.start()

    def kick(self) -> None:
        """Store a snapshot that was captured, soon."""
        with self._changed:
            self._backlog += 1
            self._soon()

    def evict_soon(self) -> None:
        """Evict the layers beyond the budget with the next batch, or soon."""
        with self._changed:
            self._soon()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Hold storing back. Inside the block every object in the repository is either referred to by the catalog or
        garbage."""
        with self._storing:
            self._batches.archiver.begin()
            yield

    def retry(self) -> None:
        """Try again the snapshots that could not be stored, after a repair."""
        with self._changed:
            self._batches.retry()
            self._due_at = time.monotonic()
            self._changed.notify_all()

    def save_tags_soon(self) -> None:
        """Save the tags in the repository with the next batch, or soon."""
        with self._changed:
            self._tags_changed = True
            self._soon()

    @property
    def stuck(self) -> str | None:
        """Reason why some snapshot cannot be stored though others can."""
        return next((why.message for why in list(self._batches.stuck.values())), None)

    def admit(self) -> None:
        """Wait while too many snapshots wait to be stored. Returns at once when storing fails, because the wait would
        have no end."""
        with self._changed:
            while self._backlog > MAX_BACKLOG and self.failure is None and not self._closed:
                self._changed.wait(1.0)

    def wait(self) -> None:
        """Return when everything captured so far is stored. Raises why it is not: OutOfSpace, InternalError,
        DataLoss, Unsupported (the layers cannot be reached)."""
        if self._proof.failed:
            self._proof.check()
        wanted = set(self._catalog.snapshots.unstored())
        with self._changed:
            self._waiters += 1
            self._batches.try_stuck()
            self._batches.archiver.hurry(waited_for=True)
        try:
            self._wait(wanted)
        finally:
            with self._changed:
                self._waiters -= 1
                if not self._waiters:
                    self._batches.archiver.hurry(waited_for=False)

    def _wait(self, wanted: set[SnapshotID]) -> None:
        with self._changed:
            self._due_at = time.monotonic()
            self._changed.notify_all()
            while wanted and not self._closed:
                seen = self._rounds
                while self._rounds == seen and not self._closed:
                    self._changed.wait(1.0)
                if self.failure is not None:
                    raise type(self.failure)(self.failure.message)
                for snapshot in wanted & self._batches.stuck.keys():
                    why = self._batches.stuck[snapshot]
                    raise type(why)(
                        f"snapshot {short(snapshot)} is captured, but cannot be stored yet, and is tried again each minute: "
                        f"{why.message}"
                    )
                wanted &= set(self._catalog.snapshots.unstored())
        if wanted:
            raise InternalError("the daemon is going down; captured snapshots are stored after the next start")

    def close(self) -> None:
        """End. Captured snapshots stay captured until the next start. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._batches.archiver.close()
        self._thread.join()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _soon(self) -> None:
        """Caller holds the lock."""
        if self._due_at is None:
            self._due_at = time.monotonic() + DELAY_S
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (due_at := self._next_at()) > time.monotonic():
                    self._changed.wait(None if due_at == math.inf else due_at - time.monotonic())
                if self._closed:
                    return
                self._due_at = None
            self._round()

    def _next_at(self) -> float:
        """The time of the next batch. Caller holds the lock."""
        due_at = math.inf if self._due_at is None else self._due_at
        # While nothing can be stored, the batch itself is tried again, with pauses.
        return due_at if self.failure is not None else min(due_at, self._batches.stuck_until())

    def _round(self) -> None:
        """Store one batch, and plan the next one if more is left."""
        failure: SnapshotdError | None = None
        left: list[SnapshotID] = []
        try:
            with self._storing:
                self._batches.archiver.begin()
                todo = self._batches.todo()
                if todo:
                    self._proof.check()
                    self._batches.store(todo[:BATCH], lambda: self._closed)
                if self._tags_changed:
                    self._save_tags()
            left = self._batches.todo()
        except SnapshotdError as exc:
            failure = exc
        except OSError as exc:
            failure = InternalError(f"snapshots cannot be stored: {exc}")
        if failure is not None and not self._proof.missing:
            failure = self._check_layers() or failure
        with self._changed:
            self.failure, self._rounds = failure, self._rounds + 1
            if failure is None:
                self._failures, self._backlog = 0, len(left)
                if left:
                    self._due_at = time.monotonic()
            elif not self._closed and not self._proof.missing:
                delay = _RETRY_S[min(self._failures, len(_RETRY_S) - 1)]
                self._failures += 1
                self._due_at = time.monotonic() + delay
                _log.error("snapshots stay captured, the next try is in %.0f s: %s", delay, failure.message)
            self._changed.notify_all()
        if failure is None and not self._closed:
            try:
                self._after_batch()
            except (SnapshotdError, OSError) as exc:
                _log.error("layers cannot be evicted: %s", exc)  # the next batch tries again

    def _check_layers(self) -> SnapshotdError | None:
        """Find out why nothing could be stored. If a write to the layers has failed, every snapshot that is not stored
        is marked as lost: nobody can tell whether its files are those that were acknowledged. Returns that error; None:
        the layers are good."""
        try:
            self._proof.sync()
            return None
        except OSError as exc:
            reason = exc.strerror
        try:
            lost = self._catalog.snapshots.unstored()
            self._catalog.snapshots.set_state(lost, SnapshotState.LOST)
            if lost:
                _log.error("a write to the layers failed (%s): %d are lost: %s", reason, len(lost), " ".join(lost))
        except SnapshotdError as exc:  # the next try marks them, or the next start
            _log.error("snapshots that are lost cannot be marked so: %s", exc.message)
        return DataLoss(FAILED)

    def _save_tags(self) -> None:
        self._tags_changed = False
        try:
            self._batches.save_tags()
        except BaseException:
            self._tags_changed = True
            raise


class _Batches:
    """The storing of batches, one at a time, and what is known from earlier ones."""

    def __init__(self, context: Context, archiver: Archiver) -> None:
        self._context, self.archiver = context, archiver
        self._strikes: Counter[SnapshotID] = Counter()
        self.stuck: dict[SnapshotID, SnapshotdError] = {}
        """Snapshots that cannot be stored, with the reason; tried again after a while."""
        self._stuck_until = math.inf
        self._records: dict[TrajectoryID, RecordID] = {}

    def retry(self) -> None:
        """Forget what could not be stored."""
        self._strikes.clear()
        self.stuck.clear()

    def stuck_until(self) -> float:
        """The time when those that are stuck are tried again."""
        return self._stuck_until if self.stuck else math.inf

    def try_stuck(self) -> None:
        """Try the stuck snapshots with the next batch. One that fails again does not hold up the others."""
        self._stuck_until = 0.0

    def save_tags(self) -> None:
        """Store the present tags, which the database of a fleet has already. Errors: as of a batch."""
        if self._context.config.fleet:
            return
        catalog = self._context.catalog
        record = self.archiver.archive_record(records.encode_tags(catalog.refs.tags(), time.time_ns()), None)
        self.archiver.flush()
        catalog.set_meta(TAGS_RECORD, record)

    def todo(self) -> list[SnapshotID]:
        unstored = self._context.catalog.snapshots.unstored()
        if time.monotonic() >= self._stuck_until:
            self.stuck.clear()
            self._stuck_until = math.inf
        return [snapshot for snapshot in unstored if snapshot not in self.stuck]

    def store(self, ids: list[SnapshotID], cut_off: Callable[[], bool]) -> None:
        """Store these, up to the commit point; once `cut_off`, the ones done so far."""
        done: dict[SnapshotID, _Done] = {}
        images: dict[ImageID, TreeID] = {}
        try:
            for snapshot_id in ids:
                if cut_off():
                    break
                self._store_one(snapshot_id, done, images)
            self.archiver.flush()
            self._context.store.proof.prove(layer for item in done.values() for layer in item.snapshot.stack.layers)
        except BaseException:
            self._records.clear()  # the records of this batch may not exist
            raise
        catalog = self._context.catalog
        for image, tree in images.items():
            catalog.images.set_tree(image, tree)
        for item in done.values():
            if item.archived is not None:
                for layer, size in zip(item.snapshot.stack.layers, reversed(item.archived.layer_bytes), strict=False):
                    self._context.store.sizes.note(layer, size)
            own = item.snapshot.warnings if item.snapshot.state is SnapshotState.CAPTURED else ()
            catalog.snapshots.set_stored(
                item.snapshot.id, item.tree, item.record, tuple(dict.fromkeys((*own, *item.warnings)))
            )
        self._context.secrecy.vault.flush()  # the records hold markers
        catalog.flush()
        hit("engine.archive.stored")
        self._count_files(done)
        self._empty_spool(done)

    def _store_one(self, snapshot_id: SnapshotID, done: dict[SnapshotID, _Done], images: dict[ImageID, TreeID]) -> None:
        context = self._context
        try:
            snapshot = context.catalog.snapshots.get(snapshot_id)
            trajectory = context.catalog.trajectories.get(snapshot.trajectory)
        except NotFound:
            return  # removed meanwhile
        image = context.image(snapshot.stack.image)
        if image is None:
            raise InternalError(f"the image {snapshot.stack.image} of snapshot {snapshot_id} is not in the catalog")
        below = image.tree or images.get(image.id)
        try:
            if below is None:
                below = images[image.id] = self.archiver.archive_image(image.id)
            archived = self._archive_tree(snapshot, below, done)
        except (OutOfSpace, Unavailable):
            raise  # no other snapshot can be stored either
        except SnapshotdError as exc:
            self._give_up(snapshot_id, exc)
            return
        for warning in archived.warnings:
            _log.warning("snapshot %s: %s", short(snapshot_id), warning)
        stored = replace(snapshot, tree=archived.tree, state=SnapshotState.STORED, warnings=archived.warnings)
        try:
            data = records.encode_from(context.catalog, stored, replace(image, tree=below))
        except NotFound:
            return  # removed meanwhile
        record = self.archiver.archive_record(data, self._records.get(trajectory.id))
        if len(self._records) > _REMEMBERED_RECORDS:
            self._records.clear()
        self._records[trajectory.id] = record
        done[snapshot_id] = _Done(
            snapshot, archived.tree, record, archived if archived.layer_bytes else None, archived.warnings
        )

    def _give_up(self, snapshot_id: SnapshotID, why: SnapshotdError) -> None:
        """Set a snapshot aside that cannot be stored, so that the others are. An error that may be an accident makes
        the whole batch run again."""
        if snapshot_id not in self._context.catalog.snapshots.unstored():
            return  # removed meanwhile
        layers = self._context.catalog.snapshots.get(snapshot_id).stack.layers
        hot = self._context.store.hold(layers)
        if hot:
            self._context.store.release(layers)
        elif isinstance(why, NotFound | DataLoss):  # with its layers there, it is the repository that must be repaired
            _log.error("snapshot %s is lost: it was not stored, and %s", snapshot_id, why.message)
            self._context.catalog.snapshots.set_state([snapshot_id], SnapshotState.LOST)
            return
        self._strikes[snapshot_id] += 1
        if isinstance(why, InternalError) and self._strikes[snapshot_id] < _STRIKES:
            raise why
        _log.error("snapshot %s stays captured, it cannot be stored yet: %s", snapshot_id, why.message)
        self.stuck[snapshot_id] = why
        self._stuck_until = time.monotonic() + _STUCK_S

    def _archive_tree(self, snapshot: Snapshot, image: TreeID, done: dict[SnapshotID, _Done]) -> ArchivedTree:
        """Apply the snapshot's own layers to its base's tree, or all its layers to the image's tree if the base has
        none."""
        outputs = snapshot.call.outputs
        if snapshot.base is None:
            return self.archiver.archive_tree(tuple(reversed(snapshot.stack.layers)), image, outputs)
        earlier = done.get(snapshot.base) or self._find_snapshot(snapshot.base)
        base = earlier.tree if earlier is not None else None
        if base is not None:
            try:
                return self.archiver.archive_tree(
                    tuple(reversed(snapshot.stack.layers[: snapshot.own_layers])), base, outputs
                )
            except (NotFound, DataLoss) as exc:
                _log.warning("snapshot %s is archived from all its layers: %s", snapshot.id, exc.message)
        return self.archiver.archive_tree(tuple(reversed(snapshot.stack.layers)), image, outputs)

    def _count_files(self, done: dict[SnapshotID, _Done]) -> None:
        """Count changed files of snapshots that could not be counted in their layers (a cold sandbox's)."""
        for item in done.values():
            current = self._find_snapshot(item.snapshot.id)
            if current is None or current.files is not None or current.parent is None:
                continue
            parent = self._find_snapshot(current.parent)
            if parent is not None and parent.tree is not None:
                self._context.catalog.snapshots.set_files(current.id, self.archiver.count(parent.tree, item.tree))

    def _find_snapshot(self, snapshot_id: SnapshotID) -> Snapshot | None:
        try:
            return self._context.catalog.snapshots.get(snapshot_id)
        except NotFound:
            return None

    def _empty_spool(self, done: dict[SnapshotID, _Done]) -> None:
        mine: set[BlobID] = {blob for item in done.values() for blob in item.snapshot.call.outputs}
        if mine:
            for blob in mine - self._context.catalog.snapshots.unstored_blobs():
                self._context.spool.remove(blob)
