"""The work after a step: followers are told at once, so that they learn of a step before its agent goes on. Out of the
agent's way, changed files are counted, and layers merged. One thread, one queue, oldest first.

The archive makes snapshots durable (archive.py); this thread tells it of each one.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace

from snapshotd.engine.base import LookedAt
from snapshotd.engine.context import Context
from snapshotd.engine.markers import is_marker
from snapshotd.engine.pauses import Pauses
from snapshotd.engine.sandbox.root import Captured
from snapshotd.engine.storage.archive_queue import Archive
from snapshotd.engine.storage.linkgroups import LinkGroups
from snapshotd.engine.storage.look import shared_stacks
from snapshotd.engine.storage.merging import Merger
from snapshotd.engine.storage.worker import Worker
from snapshotd.errors import NotFound, SnapshotdError
from snapshotd.terms import main_argument
from snapshotd.types import FileChanges, Snapshot, Stack, TrajectoryID

_log = logging.getLogger(__name__)
MAX_COUNTED_BEHIND = 16
"""Longest queue with which changes are still counted in layers. With a longer one, counting would only fall further
behind, because its cost grows with the depth of the stack."""
_NEWEST = 16
"""Steps of a run that may have ended and not been told of: one, or one of each call that runs beside others."""


class Background:
    """See the module's text. Thread-safe."""

    def __init__(self, context: Context, merger: Merger, links: LinkGroups, worker: Worker, archive: Archive) -> None:
        self._context, self._merger, self._links, self._worker, self._archive = context, merger, links, worker, archive
        self.pauses = Pauses()
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="background")
        self._thread.start()

    def submit(self, snapshot: Snapshot, captured: Captured | None = None) -> None:
        """Tell of a step, and queue the work after it. Blocks only while the archive is hopelessly behind."""
        self.pauses.add(snapshot.pause_ns)
        self._tell(snapshot, captured)
        self._enqueue(snapshot, captured)

    def go_on(self, snapshots: Iterable[Snapshot]) -> None:
        """Queue the work after steps of an earlier daemon, which has not counted their changes."""
        for snapshot in snapshots:
            self._enqueue(snapshot, None)

    def tell_missed(self, trajectory: TrajectoryID, since_ns: int) -> None:
        """Tell of the last steps of a run that began at this time, if the daemon that took them died before it did. Its
        agent has not gone on yet."""
        events = self._context.events.follow(trajectory, wait=False)
        told = {event["id"] for event in events if event["event"] == "snapshot"}
        for snapshot in self._context.catalog.snapshots.of_trajectory(trajectory, _NEWEST):
            if snapshot.created_at_ns >= since_ns and snapshot.id not in told:
                self._tell(snapshot, None)

    def _enqueue(self, snapshot: Snapshot, captured: Captured | None) -> None:
        self._queue.put(lambda: self._settle(snapshot, captured))
        self._archive.kick()
        self._archive.admit()

    def wait(self) -> None:
        """Return when every snapshot submitted so far is counted."""
        done = threading.Event()
        self.run_later(done.set)
        done.wait()

    def run_later(self, action: Callable[[], object]) -> None:
        """Have an action run in the queue's turn. It logs its own errors and must not raise."""
        self._queue.put(action)

    def close(self) -> None:
        """Finish the queue and end. Idempotent."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (action := self._queue.get()) is not None:
            action()

    def _settle(self, snapshot: Snapshot, captured: Captured | None) -> None:
        if captured is not None and captured.cleanup is not None:
            captured.cleanup()
        try:
            files = self._count(snapshot) if snapshot.files is None else None
            if files is not None:
                self._context.catalog.snapshots.set_files(snapshot.id, files)
            self._tell_more(snapshot, files)
        except NotFound:
            return  # removed meanwhile
        except SnapshotdError as exc:
            _log.error("cannot count the files of snapshot %s: %s", snapshot.id, exc.message)
        try:
            self._context.store.make_ahead()
        except (SnapshotdError, OSError) as exc:
            _log.warning("no layer could be made ahead: %s", exc)  # the next step makes its own, or says why it cannot
        if captured is None or captured.method in ("pivot", "delta"):
            self._links.learn(snapshot.stack)
            while self._merger.work(snapshot.stack):
                pass  # steps may come faster than they are settled

    def _count(self, snapshot: Snapshot) -> FileChanges | None:
        """The number of changed files. None: the layers are not there (a cold sandbox), or the queue is too long; the archive
        counts in the trees then."""
        store = self._context.store
        before, after = Stack(snapshot.stack.image), snapshot.stack
        if snapshot.parent is not None:
            before, after = shared_stacks(self._context.catalog.snapshots.get(snapshot.parent), snapshot)
        if before == after:
            return FileChanges()
        if self._queue.qsize() > MAX_COUNTED_BEHIND:
            return None
        layers = {*before.layers, *after.layers}
        if any(store.lazy(layer) for layer in layers) or not store.hold(layers):
            return None
        try:
            return self._worker.count(before, after)
        finally:
            store.release(layers)

    def _tell_more(self, snapshot: Snapshot, files: FileChanges | None) -> None:
        """Tell watchers of what was not known at the commit, or took time to look up."""
        found = self._context.catalog.figures.facts([snapshot.id]).get(snapshot.id)
        if files is None and found is None:
            return
        known = snapshot if files is None else replace(snapshot, files=files)
        if found is None:
            self._tell_watchers(known)
        else:
            marker = is_marker(self._context.catalog, known)
            self._tell_watchers(LookedAt(known, found, marker))

    def _tell_watchers(self, told: Snapshot | LookedAt) -> None:
        snapshot = told.snapshot if isinstance(told, LookedAt) else told
        event = {"event": "snapshot", "trajectory": snapshot.trajectory, "snapshot": told}
        self._context.events.watch.publish(event)

    def _tell(self, snapshot: Snapshot, captured: Captured | None) -> None:
        self._tell_watchers(snapshot)
        log = self._context.events.live(snapshot.trajectory)
        if log is None:
            return
        event = {
            "event": "snapshot",
            "id": snapshot.id,
            "seq": snapshot.seq,
            "tool": snapshot.call.name,
            "argument": main_argument(snapshot.call.arguments),
            "status": snapshot.call.status,
            "files": None if snapshot.files is None else asdict(snapshot.files),
            "pause_ms": round(snapshot.pause_ns / 1e6, 3),
            "method": snapshot.method,
            **({"reused": snapshot.base} if snapshot.method == "reused" else {}),
            **({"reason": captured.reason} if captured is not None and captured.reason else {}),
        }
        try:
            log.append(event)
        except OSError as exc:  # the disk is full; the step is committed, and its agent must not hear of this
            _log.error("followers of %s are not told of snapshot %s: %s", snapshot.trajectory, snapshot.id, exc)
