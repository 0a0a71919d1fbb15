"""The snapshots of a node that are to be published next."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from snapshotd.catalog.base import Catalog
from snapshotd.engine.node.copying import named_by
from snapshotd.engine.node.marks import PublishedMarks
from snapshotd.engine.node.shared import Claims, SharedHistory
from snapshotd.errors import NotFound
from snapshotd.fleet.base import Claim
from snapshotd.types import Snapshot, SnapshotID, SnapshotState, Trajectory, TrajectoryID, TrajectoryStatus

BATCH = 256
"""Most snapshots in one transaction, so that the others wait for it a second at most (benchmarks: 117 commits a second)."""


@dataclass(frozen=True, slots=True)
class PublishedPart:
    """Consecutive snapshots of a trajectory, and the head that they follow in the fleet's catalog."""

    trajectory: Trajectory
    claim: Claim
    head: SnapshotID | None
    snapshots: list[Snapshot]


class PublishList:
    """The trajectories that are looked at. Catalog and marks say how much of each is to be published.
    Thread-safe; one thread chooses."""

    def __init__(self, catalog: Catalog, shared: SharedHistory, claims: Claims, marks: PublishedMarks) -> None:
        self._catalog, self._shared, self._claims, self._marks = catalog, shared, claims, marks
        self._lock = threading.Lock()
        self._dirty: set[TrajectoryID] = set()
        """Trajectories with snapshots that may not be published."""
        self._heard: set[TrajectoryID] = set()
        """Trajectories with facts that the fleet may not know."""

    def add_all(self) -> None:
        """Look at every trajectory, when the daemon begins."""
        for trajectory in self._catalog.trajectories.list():
            interrupted = trajectory.status is TrajectoryStatus.INTERRUPTED  # by the recovery of this daemon
            self.add(trajectory.id, facts=interrupted)

    def add(self, trajectory: TrajectoryID, *, facts: bool = True) -> None:
        """Look at a trajectory, which has something new."""
        with self._lock:
            self._dirty.add(trajectory)
            if facts:
                self._heard.add(trajectory)

    def add_again(self, trajectories: Collection[TrajectoryID]) -> None:
        """Look at the facts of these trajectories again: their publication has failed."""
        with self._lock:
            self._heard.update(trajectories)

    def correct_marks(self) -> bool:
        """Compare the marks with the heads that the database has. Where it knows less than this node was told (it was restored
        from a backup, or a standby that lacked its last commits took over), that is published again. True if it does."""
        owned = self._claims.claims()
        heads = {
            one: head for one, head in self._shared.coordination.heads_of(self._shared.node).items() if one in owned
        }
        known = self._catalog.snapshots.get_many(head for head in heads.values() if head is not None)
        behind = False
        for one, head in heads.items():
            if self._marks.is_foreign(one) or (head is not None and head not in known):
                continue  # the database knows more than this catalog
            own = known[head] if head is not None and known[head].trajectory == one else None
            seq = -1 if own is None else own.seq
            if seq < self._marks.published_seq(one):
                behind = True
                self._marks.set_published(one, seq)
                self.add(one)
        if behind:
            self._marks.set_told_tags({})
        return behind

    def find_unpublished(self) -> list[Snapshot]:
        """This node's snapshots that are not published."""
        return [snapshot for one in self._list_owned() for snapshot in self._marks.find_unpublished(one)]

    def count_unpublished(self) -> int:
        """The number of this node's snapshots that are not published."""
        return sum(self._marks.count_unpublished(one) for one in self._list_owned())

    def _list_owned(self) -> list[TrajectoryID]:
        with self._lock:
            dirty = sorted(self._dirty)
        owned = self._claims.claims()
        return [one for one in dirty if one in owned]

    def choose(self) -> tuple[list[PublishedPart], list[tuple[Trajectory, Claim]]]:
        """Choose the next snapshots, each after those that it names; and trajectories with nothing new but facts."""
        with self._lock:
            dirty, self._dirty = self._dirty, set()
            heard, self._heard = self._heard, set()
        try:
            owned = self._claims.claims()
            lines = {one: line for one in sorted(dirty) if (line := self._find_line(one, owned)) is not None}
            waiting = {one: self._marks.find_unpublished(one) for one in lines}
            parts = self._find_ready(lines, {one: left for one, left in waiting.items() if left})
        except BaseException:
            with self._lock:
                self._dirty |= dirty
                self._heard |= heard
            raise
        going = {part.trajectory.id for part in parts}
        changed = [lines[one] for one in sorted(heard & lines.keys() - going) if self._marks.published_seq(one) >= 0]
        with self._lock:
            self._dirty |= {one for one in dirty if waiting.get(one, one not in owned)}
            self._heard |= heard - lines.keys() - going
        return parts, changed

    def _find_ready(
        self, lines: dict[TrajectoryID, tuple[Trajectory, Claim]], waiting: dict[TrajectoryID, list[Snapshot]]
    ) -> list[PublishedPart]:
        """Find the parts that can be published now, and take them out of `waiting`."""
        parts: list[PublishedPart] = []
        upto: dict[TrajectoryID, int] = {}
        heads: dict[TrajectoryID, SnapshotID | None] = {}
        room, went_on = BATCH, True
        while went_on:
            went_on = False
            for one, left in waiting.items():
                ready = self._count_ready(left[:room], upto)
                if not ready:
                    continue
                if (
                    one not in heads
                ):  # snapshots that a crash left published and not noted are published again, without effect
                    heads[one] = self._shared.coordination.owner(one).head
                parts.append(PublishedPart(*lines[one], heads[one], left[:ready]))
                heads[one] = left[ready - 1].id
                waiting[one], room, went_on = left[ready:], room - ready, True
        return parts

    def _count_ready(self, left: list[Snapshot], upto: dict[TrajectoryID, int]) -> int:
        """The number of the first snapshots that are stored and name only what is published or goes before them."""
        for number, one in enumerate(left):
            named = (self._catalog.snapshots.get(name) for name in named_by(one))
            if one.state is SnapshotState.CAPTURED or not all(
                each.seq <= max(upto.get(each.trajectory, -1), self._marks.published_seq(each.trajectory))
                for each in named
            ):
                return number
            upto[one.trajectory] = one.seq
        return len(left)

    def _find_line(self, one: TrajectoryID, owned: Mapping[TrajectoryID, Claim]) -> tuple[Trajectory, Claim] | None:
        claim = owned.get(one)
        if claim is None:
            return None
        try:
            return self._catalog.trajectories.get(one), claim
        except NotFound:
            return None
