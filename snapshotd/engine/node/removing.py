"""From removed here to removed in the fleet: a node lets the others know of its trajectories that were removed (`rm`).

The fleet keeps a trajectory as long as a fork of it on any node is published, or a reader has pinned a snapshot of it. The work
list is what this node's catalog says was removed, so a crash anywhere costs time alone.
"""

from __future__ import annotations

import logging
import threading
import time
from itertools import islice

from snapshotd.catalog.base import Catalog
from snapshotd.engine.node.marks import PublishedMarks
from snapshotd.engine.node.shared import Claims, SharedHistory
from snapshotd.errors import Conflict, NotFound
from snapshotd.failpoints import hit
from snapshotd.fleet.base import Claim
from snapshotd.types import TrajectoryID, short

_AT_ONCE = 256
AGAIN_S = 60.0
"""Time after which a trajectory that the fleet had to keep is looked at again."""
_log = logging.getLogger(__name__)


class Removals:
    """See the module's text. Thread-safe."""

    def __init__(self, catalog: Catalog, shared: SharedHistory, claims: Claims, marks: PublishedMarks) -> None:
        self._catalog, self._shared, self._claims, self._marks = catalog, shared, claims, marks
        self._one_at_a_time = threading.Lock()
        self._kept: set[TrajectoryID] = set()
        self._again_at = 0.0

    def publish(self, *, all_of_them: bool = False) -> None:
        """Remove from the fleet what was removed here; with `all_of_them`, also look at those that it had to keep lately.
        Unavailable."""
        with self._one_at_a_time:
            if all_of_them or time.monotonic() >= self._again_at:
                self._kept.clear()
                self._again_at = time.monotonic() + AGAIN_S
            while due := self._due():
                self._remove(due)

    def _due(self) -> dict[TrajectoryID, Claim]:
        claimed = self._claims.claims()
        removed = self._catalog.trajectories.removed() - self._kept
        return dict(
            islice(((one, claimed[one]) for one in sorted(removed & claimed.keys()) if self._is_gone(one)), _AT_ONCE)
        )

    def _is_gone(self, trajectory: TrajectoryID) -> bool:
        """False if it was imported again."""
        try:
            self._catalog.trajectories.get(trajectory)
        except NotFound:
            return True
        return False

    def _remove(self, due: dict[TrajectoryID, Claim]) -> None:
        left = dict(due)
        self._claims.give_up(list(due))
        try:
            with self._shared.together():
                while gone := [
                    one for one, claim in left.items() if self._remove_one(claim)
                ]:  # a fork goes before its origin
                    for one in gone:
                        del left[one]
                hit("engine.remove.published")
        except BaseException:
            self._claims.keep(list(due))
            raise
        self._claims.keep(list(left))
        self._kept.update(left)
        for one in due.keys() - left.keys():
            self._marks.set_published(one, -1)

    def _remove_one(self, claim: Claim) -> bool:
        catalog, trajectory = self._shared.catalog, claim.trajectory
        try:
            with self._shared.coordination.holding(claim):
                self._shared.collection.remove_trajectory(trajectory)
                try:
                    catalog.trajectories.remove(trajectory)
                except NotFound:
                    return True  # nothing of it was published
                catalog.trajectories.forget_removed([trajectory])
        except NotFound:
            return True
        except Conflict as exc:
            _log.info("the fleet keeps %s, which was removed here: %s", short(trajectory), exc.message)
            return False
        return True
