"""From stored to published: a thread lets the fleet know what this node has stored, many snapshots at a time.

    1 the bucket has the packs (since the snapshots are stored), then the index segment that tells the others of them
    2 one PostgreSQL transaction has the rows of all these snapshots, moves each trajectory's head under its fence, and notes
      the segment                                                                                          <- the commit point
    3 this node notes up to where each trajectory is published; the others find them

The work list is the difference between the head of a trajectory and what is published of it, so a crash anywhere costs time and
no data: the segment is the same again, and the transaction finds what is there. A database that has lost commits (it was restored
from a backup) knows fewer segments of this node than it was told of: then the marks are corrected, and what it lost is published
again. Snapshots are published in the order of their line, each after those that it names. Steps never wait for any of it. While
PostgreSQL or the bucket is away, everything is kept and tried again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from snapshotd.engine.context import Context
from snapshotd.engine.node.base import Publisher
from snapshotd.engine.node.choosing import PublishedPart, PublishList
from snapshotd.engine.node.copying import roots_of, rows_of, trajectory_at
from snapshotd.engine.node.marks import PublishedMarks
from snapshotd.engine.node.shared import Claims, SharedHistory
from snapshotd.engine.node.tags import PublishedTags, TagChanges
from snapshotd.engine.storage.archiver import Archiver
from snapshotd.errors import Conflict, InternalError, NotFound, SnapshotdError, Unavailable
from snapshotd.failpoints import hit
from snapshotd.fleet.base import Claim
from snapshotd.repo.base import Peers
from snapshotd.types import (
    Image,
    ImageID,
    SideEffect,
    Snapshot,
    SnapshotID,
    SnapshotState,
    Trajectory,
    TrajectoryID,
    short,
)

LAST_S, LAST_POLL_S = 10.0, 0.2
"""Longest wait at the end of the daemon until everything is published, and the time between two looks."""
MERGE_S = 10.0
"""Time for which what other nodes have stored may go unnoticed, if nothing asks for it."""
_RETRY_S = (1.0, 5.0, 15.0)
_log = logging.getLogger(__name__)


class NodePublisher(Publisher):
    """See the module's text, and `node/base.py`."""

    def __init__(
        self,
        context: Context,
        archiver: Archiver,
        store_all: Callable[[], None],
        archive_again: Callable[[], None],
        shared: SharedHistory,
        claims: Claims,
        marks: PublishedMarks,
        chores: Sequence[Callable[[], None]],
    ) -> None:
        """`store_all`: returns when everything captured is stored. `archive_again`: called when snapshots are captured
        again. `chores`: further things to tell the fleet, called in each round."""
        self._chores = chores
        self._context, self._catalog, self._archiver = context, context.catalog, archiver
        self._store_all, self._archive_again = store_all, archive_again
        self._shared, self._claims, self._marks = shared, claims, marks
        self._changed = threading.Condition()
        self._list = PublishList(context.catalog, shared, claims, marks)
        self._tags = PublishedTags(context.catalog, shared.catalog, marks)
        self._peers: Peers | None = None
        self._due = True
        self._segment: int | None = None
        """This node's last segment that the database has been told of; None: the marks have to be compared with the database."""
        self._refusals: dict[TrajectoryID, str] = {}
        """Why trajectories could not be published when that was last tried."""
        self._rounds = 0
        self._failures = 0
        self.failure: SnapshotdError | None = None
        """Reason why the last round ended early; None when it did not."""
        self._closed = False
        self._unlisten: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._work, name="fleet-publish")

    def start(self) -> None:
        self._list.add_all()
        self._unlisten = self._context.events.watch.listen(self._hear)
        self._thread.start()

    def close(self) -> None:
        self._publish_last()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._unlisten()
        if self._thread.is_alive():
            self._thread.join()

    def _publish_last(self) -> None:
        """Wait for what sandboxes captured when they ended, unless the bucket or the database is away."""
        deadline = time.monotonic() + LAST_S
        if self._thread.is_alive():
            self._list.add_all()  # changes are not told of any more
        while self._thread.is_alive() and self.lag() and time.monotonic() < deadline:
            with self._changed:
                if self.failure is not None or self._closed:
                    return
                seen, self._due = self._rounds, True
                self._changed.notify_all()
                self._changed.wait_for(lambda seen=seen: self._rounds != seen, LAST_POLL_S)  # type: ignore[misc]

    def hear_of_stored(self) -> None:
        with self._changed:
            self._due = True
            self._changed.notify_all()

    def lag(self) -> int:
        return self._list.count_unpublished()

    def why_behind(self) -> str:
        failure = self.failure
        if failure is not None:
            return failure.message
        refusals = list(self._refusals.items())
        return next((why for one, why in refusals if self._marks.count_unpublished(one)), "")

    def is_published(self, snapshot: Snapshot) -> bool:
        return self._marks.is_published(snapshot)

    def publish(self, trajectory: TrajectoryID, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self._store_all()
        last = max((one.seq for one in self._marks.find_unpublished(trajectory)), default=-1)
        self._list.add(trajectory)
        self.hear_of_stored()
        while self._marks.published_seq(trajectory) < last:
            self._claims.claim(trajectory)
            with self._changed:
                seen = self._rounds
                while self._rounds == seen and not self._closed and time.monotonic() < deadline:
                    self._changed.wait(deadline - time.monotonic())
                refusal = self._refusals.get(trajectory) or (self.failure.message if self.failure is not None else "")
                if refusal:  # another round at once would end as this one did
                    self._changed.wait(min(_RETRY_S[0], deadline - time.monotonic()))
                if self._closed or time.monotonic() >= deadline:
                    why = f" ({refusal})" if refusal else ""
                    raise Unavailable(f"trajectory {short(trajectory)} is stored and not published yet{why}: try again")
            self.hear_of_stored()

    def merge(self) -> None:
        """Have this node's index know everything that is published by now. Unavailable, DataLoss, OSError."""
        peers = self._shared.peers()
        if self._segment is not None and peers.segments.get(self._shared.node, 0) < self._segment:
            self._segment = None
            self.hear_of_stored()
        if peers != self._peers:
            self._archiver.merge(peers)
            self._peers = peers

    def catch_up(self) -> bool:
        try:
            self._archiver.merge(self._shared.peers(), ahead=True)
        except (SnapshotdError, OSError) as exc:
            _log.warning("this node's index stays behind: %s", exc)
            return False
        return True

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _hear(self, event: dict[str, object]) -> None:
        trajectory = event.get("trajectory")
        if isinstance(trajectory, str) and event["event"] != "output":
            self._list.add(TrajectoryID(trajectory))

    def _work(self) -> None:
        merged_at, due_at = 0.0, 0.0
        while True:
            with self._changed:
                while not self._closed:
                    left_s = max(due_at, 0.0 if self._due else merged_at + MERGE_S) - time.monotonic()
                    if left_s <= 0:
                        break
                    self._changed.wait(left_s)
                if self._closed:
                    return
                self._due = False
            due_at = time.monotonic() + self._run_round()
            merged_at = time.monotonic()

    def _run_round(self) -> float:
        """Publish what there is, and merge. Returns the time to wait before the next try."""
        failure: SnapshotdError | None = None
        try:
            self._claims.check_lease()
            self._correct_marks()
            while not self._closed and self._publish_some():
                pass
            for chore in self._chores:
                chore()
            self.merge()
            if self._context.cache is not None:
                self._context.cache.give_room()
        except SnapshotdError as exc:
            failure = exc
        except OSError as exc:
            failure = InternalError(f"snapshots cannot be published: {exc}")
        with self._changed:
            self.failure, self._rounds = failure, self._rounds + 1
            self._changed.notify_all()
            if failure is None:
                self._failures = 0
                return 0.0
            delay_s = _RETRY_S[min(self._failures, len(_RETRY_S) - 1)]
            self._failures += 1
            self._due = True
        _log.warning("snapshots stay on this node, the next try is in %.0f s: %s", delay_s, failure.message)
        return delay_s

    def _correct_marks(self) -> None:
        if self._segment is None:
            if self._list.correct_marks():
                _log.warning("the fleet's database has less than this node has published: that is published again")
            self._segment = self._shared.segments.numbers().get(self._shared.node, 0)

    def _publish_some(self) -> bool:
        """Publish in one transaction. False when nothing is left."""
        parts, changed = self._list.choose()
        try:
            tags = self._tags.changes({one.id for part in parts for one in part.snapshots})
            if not parts and not changed and not tags.any:
                return False
            images = self._find_images(parts)
            stored_ns = self._shared.coordination.clock_ns() if parts else 0
            segment = self._put_segment(parts, images)
            lost = self._commit(parts, changed, tags, images, segment, stored_ns)
        except BaseException:
            self._list.add_again({part.trajectory.id for part in parts} | {line.id for line, _ in changed})
            raise
        hit("engine.publish.committed")
        self._segment = None if lost else max(segment or 0, self._segment or 0)
        for part in parts:
            if part.trajectory.id not in lost:
                self._marks.set_published(part.trajectory.id, part.snapshots[-1].seq)
        self._marks.set_told_tags(tags.now)
        return bool(parts) and not lost

    def _put_segment(self, parts: Sequence[PublishedPart], images: dict[ImageID, Image]) -> int | None:
        """Have the other nodes' indexes find what these snapshots need. Returns the number of this node's last segment."""
        if not parts:
            return None
        chosen = [snapshot for part in parts for snapshot in part.snapshots]
        try:
            segment = self._archiver.publish(
                roots_of(self._catalog.snapshots.record, chosen, images), self._shared.peers()
            )
        except Conflict as exc:
            self._give_back(exc)
            raise
        hit("engine.publish.segment")
        return segment

    def _commit(
        self,
        parts: Sequence[PublishedPart],
        changed: Sequence[tuple[Trajectory, Claim]],
        tags: TagChanges,
        images: dict[ImageID, Image],
        segment: int | None,
        stored_ns: int,
    ) -> set[TrajectoryID]:
        """Run the transaction. Returns the trajectories that cannot be published now."""
        lost: set[TrajectoryID] = set()
        with self._shared.together():
            for part in parts:
                if part.trajectory.id not in lost and not self._write(part, images, stored_ns):
                    lost.add(part.trajectory.id)
            for trajectory, claim in changed:
                self._write(PublishedPart(trajectory, claim, None, []), images, stored_ns)
            self._tags.write(tags)
            if segment is not None:
                self._shared.segments.note(self._shared.node, segment)
            hit("engine.publish.written")
        return lost

    def _write(self, part: PublishedPart, images: dict[ImageID, Image], stored_ns: int) -> bool:
        """Write the rows of a part, within the transaction. False: the trajectory is not this node's any more, or waits
        for one that is not."""
        shared, trajectory, head = self._shared, part.trajectory, part.head
        try:
            with shared.coordination.holding(part.claim):
                for row in rows_of(self._catalog, part.snapshots):
                    snapshot = row.snapshot
                    calls = [entry.id for entry in row.entries if entry.side_effect is SideEffect.IRREVERSIBLE]
                    intended = shared.coordination.find_recorded(calls) if calls else ()
                    with shared.coordination.publishing(
                        part.claim, head, snapshot.id, intended, stored_ns=stored_ns
                    ) as new:
                        if new:
                            needed = [images[snapshot.stack.image]] if snapshot.stack.image in images else []
                            line = trajectory_at(trajectory, snapshot.id, self._find_beginning(trajectory, snapshot))
                            shared.catalog.others.add_missing(needed, [line], [row])
                    head = snapshot.id
                self._write_facts(trajectory)
        except (Conflict, NotFound) as exc:
            _log.warning("trajectory %s is not published: %s", short(trajectory.id), exc.message)
            self._refusals[trajectory.id] = exc.message
            return False
        self._refusals.pop(trajectory.id, None)
        return True

    def _write_facts(self, trajectory: Trajectory) -> None:
        """Write the facts that change without a snapshot: status, environment, approvals, compensations."""
        published = self._shared.catalog.trajectories.get(trajectory.id)
        self._shared.catalog.others.add_missing(
            [],
            [replace(trajectory, head=published.head, began=published.began)],
            [],
            self._catalog.approvals.list(None, trajectory.id),
            self._catalog.compensations.of_trajectory(trajectory.id),
        )

    def _find_beginning(self, trajectory: Trajectory, snapshot: Snapshot) -> dict[SnapshotID, object]:
        """The snapshot where a trajectory's program began, if it is published with or before this one."""
        if trajectory.began is None:
            return {}
        began = self._catalog.snapshots.get(trajectory.began)
        known = began.seq <= snapshot.seq if began.trajectory == trajectory.id else self._marks.is_published(began)
        return {began.id: None} if known else {}

    # -- what is to be published ---------------------------------------------------------------------------------------

    def _find_images(self, parts: Sequence[PublishedPart]) -> dict[ImageID, Image]:
        needed = {part.trajectory.spec.image for part in parts}
        needed |= {snapshot.stack.image for part in parts for snapshot in part.snapshots}
        return {image.id: image for image in self._context.images.list() if image.id in needed}

    def _give_back(self, why: Conflict) -> None:
        """Capture unpublished snapshots again from their layers, since the fleet has collected what they build upon."""
        again = [one.id for one in self._list.find_unpublished() if one.state is SnapshotState.STORED]
        _log.error("%s", why.message)
        self._catalog.snapshots.set_state(again, SnapshotState.CAPTURED)
        self._archive_again()
