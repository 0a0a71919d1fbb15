"""Rows of other catalogs of a fleet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeVar

from snapshotd.catalog.database import CatalogDatabase, Row
from snapshotd.catalog.lookup import find
from snapshotd.catalog.parts import OtherCatalogs, SnapshotRow
from snapshotd.catalog.restore import add_missing_rows
from snapshotd.catalog.rows import encode_json
from snapshotd.catalog.splitting import split_trajectory
from snapshotd.catalog.tables.figures import Figures
from snapshotd.errors import NotFound
from snapshotd.types import Approval, Compensation, Image, SnapshotID, Trajectory, TrajectoryID

_Found = TypeVar("_Found")
_UNNEEDED = """
SELECT s.id FROM snapshots s WHERE s.id IN (SELECT value FROM json_each(?))
AND NOT EXISTS (SELECT 1 FROM tags WHERE snapshot = s.pk)
AND NOT EXISTS (SELECT 1 FROM trajectories WHERE head = s.pk OR forked_from = s.pk OR began = s.pk)
AND NOT EXISTS (SELECT 1 FROM approvals WHERE snapshot = s.pk AND status = 'pending')
"""


class OtherRows:
    """Rows that come from another catalog of a fleet, or are to be another trajectory's."""

    def __init__(self, db: CatalogDatabase, figures: Figures, tell: Callable[[TrajectoryID], object]) -> None:
        """`tell`: told of each trajectory that changed."""
        self._db, self._figures, self._tell = db, figures, tell
        self._catalogs: OtherCatalogs | None = None

    def look_up_in(self, catalogs: OtherCatalogs) -> None:
        """Look refs that mean nothing here up in these catalogs, too, from now on."""
        self._catalogs = catalogs

    def resolve(self, wanted: Literal["snapshot", "trajectory"], ref: str, get: Callable[[Row], _Found]) -> _Found:
        """The thing that a ref means: `get` of (snapshot id, trajectory id, ...). Here before elsewhere."""

        def look() -> tuple[_Found, TrajectoryID]:
            with self._db.lock:
                found = find(self._db, wanted, ref)
                return get(found), TrajectoryID(found[1])

        try:
            result, trajectory = look()
        except NotFound:
            if self._catalogs is None or not self._catalogs.find(wanted, ref):
                raise
            return look()[0]
        return look()[0] if self._catalogs is not None and self._catalogs.refresh(trajectory) else result

    def add_missing(
        self,
        images: Iterable[Image],
        trajectories: Sequence[Trajectory],
        snapshots: Iterable[SnapshotRow],
        approvals: Sequence[Approval] = (),
        compensations: Sequence[Compensation] = (),
    ) -> None:
        """Add those rows that are not here, all or none; so it can be repeated. The order is that of `Catalog.restore_rows`. A
        name or tag that is taken here is left out. A trajectory that is here gets the status, exit code, network and
        environment of the given one, and its head, unless that is an earlier snapshot. Approvals and compensations are as they
        are given afterwards."""
        with self._db.transaction():
            add_missing_rows(self._db, images, trajectories, snapshots, approvals, compensations)
        for trajectory in trajectories:
            self._tell(trajectory.id)

    def choose_unneeded(self, snapshots: Sequence[SnapshotID]) -> list[SnapshotID]:
        """Choose the ones of `snapshots` that are here, and whose files no tag, head, fork, beginning of a program or pending approval here
        needs, in the same order."""
        found = {one for (one,) in self._db.read(_UNNEEDED, (encode_json(list(snapshots)),))}
        return [one for one in snapshots if one in found]

    def split_trajectory(self, trajectory_id: TrajectoryID, first: SnapshotID, side: TrajectoryID) -> None:
        """Make a new trajectory `side`, a nameless fork, of a trajectory's own snapshots from `first` on, with their
        conversation, journal, approvals and compensations. The rest is interrupted; where nothing is left, the trajectory itself
        becomes `side`. Not an error when that was done. NotFound."""
        with self._db.lock:
            with self._db.transaction():
                split_trajectory(self._db, trajectory_id, first, side)
            self._figures.forget(trajectory_id)
        for one in (trajectory_id, side):
            self._tell(one)
