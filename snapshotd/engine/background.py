"""What happens after a step, out of the agent's way: count changed files, tell followers, make durable, merge.

One thread, one queue, oldest first. Durability is batched: one flush stores everything captured so far (a syncfs costs about as much for
fifty snapshots as for one), `FLUSH_DELAY_S` after the first, or at once when somebody waits for it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import dataclass

from snapshotd.engine.context import Context
from snapshotd.engine.linkgroups import LinkGroups
from snapshotd.engine.merging import Merger
from snapshotd.engine.sandbox import Captured
from snapshotd.engine.worker import Worker
from snapshotd.errors import InternalError, NotFound, SnapshotdError
from snapshotd.types import FileChanges, Snapshot, SnapshotID, SnapshotState, Stack

_log = logging.getLogger(__name__)


FLUSH_DELAY_S = 0.5


@dataclass(slots=True)
class _Job:
    snapshot: Snapshot | None
    captured: Captured | None
    done: threading.Event | None = None
    flush: bool = False


class Background:
    """See the module's text. `submit` never blocks; `wait` returns when everything submitted before it is done."""

    def __init__(self, context: Context, merger: Merger, links: LinkGroups, worker: Worker) -> None:
        self._context, self._merger, self._links, self._worker = context, merger, links, worker
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._unflushed: list[SnapshotID] = []
        self._flush_at = 0.0
        self.failure: str | None = None
        """Why nothing is made durable any more, if a flush failed. A failed flush is never retried: what it covered may be gone."""
        self._thread = threading.Thread(target=self._work, name="background")
        self._thread.start()

    def submit(self, snapshot: Snapshot, captured: Captured | None = None) -> None:
        self._queue.put(_Job(snapshot, captured))

    def wait(self, *, stored: bool) -> None:
        """Return when every snapshot submitted so far is counted and, if asked for, stored. InternalError when storing failed."""
        done = threading.Event()
        self._queue.put(_Job(None, None, done, stored))
        done.wait()
        if stored and self.failure:
            raise InternalError(f"snapshots cannot be made durable: {self.failure}; check the disk, then restart the daemon")

    def close(self) -> None:
        """Finish what is queued and end. Idempotent."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while True:
            try:
                job = self._queue.get(timeout=max(0.0, self._flush_at - time.monotonic()) if self._unflushed else None)
            except queue.Empty:
                self._flush()
                continue
            if job is None:
                self._flush()
                return
            if job.snapshot is not None:
                self._settle(job.snapshot, job.captured)
                if not self._unflushed:
                    self._flush_at = time.monotonic() + FLUSH_DELAY_S
                self._unflushed.append(job.snapshot.id)
            if job.flush:
                self._flush()
            if job.done is not None:
                job.done.set()

    def _settle(self, snapshot: Snapshot, captured: Captured | None) -> None:
        if captured is not None and captured.cleanup is not None:
            captured.cleanup()
        try:
            files = self._count(snapshot)
            self._context.catalog.set_files(snapshot.id, files)
        except NotFound:
            return  # removed meanwhile
        except SnapshotdError as exc:
            _log.error("cannot count the files of snapshot %s: %s", snapshot.id, exc.message)
            files = FileChanges()
        self._tell(snapshot, captured, files)
        try:
            self._context.store.make_ahead()
        except (SnapshotdError, OSError) as exc:
            _log.warning("no layer could be made ahead: %s", exc)  # the next step makes its own, or says why it cannot
        if captured is None or captured.method == "pivot":
            self._links.learn(snapshot.stack)
            self._merger.work(snapshot.stack)

    def _count(self, snapshot: Snapshot) -> FileChanges:
        if snapshot.parent is None:
            return self._worker.count(Stack(snapshot.stack.image), snapshot.stack)
        parent = self._context.catalog.get_snapshot(snapshot.parent)
        return FileChanges() if parent.stack == snapshot.stack else self._worker.count(parent.stack, snapshot.stack)

    def _tell(self, snapshot: Snapshot, captured: Captured | None, files: FileChanges) -> None:
        log = self._context.events.live(snapshot.trajectory)
        if log is None:
            return
        log.append({
            "event": "snapshot", "id": snapshot.id, "seq": snapshot.seq, "tool": snapshot.call.name, "status": snapshot.call.status,
            "files": {"added": files.added, "changed": files.changed, "deleted": files.deleted, "bytes": files.bytes},
            "pause_ms": round(snapshot.pause_ns / 1e6, 3), "method": snapshot.method,
            **({"reason": captured.reason} if captured is not None and captured.reason else {}),
        })  # fmt: skip

    def _flush(self) -> None:
        if not self._unflushed or self.failure:
            return
        batch, self._unflushed = self._unflushed, []
        try:
            self._context.store.flush()
            self._context.spool.flush()
            self._context.catalog.set_state(batch, SnapshotState.STORED)
            self._context.catalog.flush()
        except (OSError, SnapshotdError) as exc:
            self.failure = str(exc)
            _log.error("flush failed, %d snapshots stay captured only: %s", len(batch), exc)
