"""Tags, and what the refs of people mean: a tag, a name, the beginning of an id."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

from snapshotd.catalog.database import CatalogDatabase, Row
from snapshotd.catalog.inserts import add_tag
from snapshotd.catalog.lookup import (
    CANDIDATES,
    check_name,
    check_unique,
    find_tag,
    id_range,
    no_such,
    searchable,
    snapshot_numbers,
)
from snapshotd.catalog.parts import OtherCatalogs
from snapshotd.catalog.tables.requests import add_request
from snapshotd.catalog.tables.snapshots import SnapshotTable
from snapshotd.catalog.tables.trajectories import TrajectoryTable
from snapshotd.catalog.tenancy import is_own, own_condition
from snapshotd.errors import Ambiguous, NotFound
from snapshotd.types import ID_FORM, ID_HEX_CHARS, RequestKey, Snapshot, SnapshotID, Trajectory, TrajectoryID, short

_Found = TypeVar("_Found")


class References:
    """Snapshots and trajectories by what people call them. The present tenant finds its own."""

    def __init__(self, db: CatalogDatabase, trajectories: TrajectoryTable, snapshots: SnapshotTable) -> None:
        self._db, self._trajectories, self._snapshots = db, trajectories, snapshots
        self._catalogs: OtherCatalogs | None = None

    def look_up_in(self, catalogs: OtherCatalogs) -> None:
        """Look refs that mean nothing here up in these catalogs, too, from now on."""
        self._catalogs = catalogs

    def find_snapshot(self, ref: str) -> Snapshot:
        """By tag, unique id prefix (>= 4 characters), or a trajectory's name or unique id prefix (its head). An exact id wins
        over all, a tag or name over a prefix. NotFound; Ambiguous lists up to five candidates, or both that an older version
        gave one name; so it is for a name and a prefix that are the same."""
        return self._resolve("snapshot", ref, lambda found: self._snapshots.get(found[0]))

    def find_trajectory(self, ref: str) -> Trajectory:
        """The trajectory that a ref means: its name, unique id prefix, or the tag or unique id prefix of one of its snapshots. Errors as
        `find_snapshot`."""
        return self._resolve("trajectory", ref, lambda found: self._trajectories.get(found[1]))

    def tag(self, snapshot_id: SnapshotID, name: str, *, move: bool = False, request: RequestKey | None = None) -> None:
        """Give a snapshot a tag. Conflict when another snapshot has it, unless `move`, or when a trajectory has that
        name, or a tenant that is not the present one; UsageError when it is malformed, or could be taken for an id."""
        check_name(name)
        with self._db.transaction():
            add_tag(self._db, snapshot_numbers(self._db, snapshot_id)[0], name, move=move)
            add_request(self._db, request, [snapshot_id])

    def untag(self, name: str) -> None:
        """Remove a tag. NotFound."""
        with self._db.transaction():
            if not searchable(name) or self._find_tag(name) is None:
                raise no_such("tag", name)
            self._db.write("DELETE FROM tags WHERE name = ?", (name,))

    def tags(self) -> dict[str, SnapshotID]:
        """Every tag and its snapshot."""
        return dict(
            self._db.read(
                "SELECT name, snapshots.id FROM tags JOIN snapshots ON snapshots.pk = tags.snapshot ORDER BY name"
            )
        )

    def _resolve(self, wanted: Literal["snapshot", "trajectory"], ref: str, get: Callable[[Row], _Found]) -> _Found:
        """The thing that a ref means: `get` of (snapshot id, trajectory id, ...). Here before elsewhere."""

        def look() -> tuple[_Found, TrajectoryID]:
            with self._db.lock:
                found = self._find(wanted, ref)
                return get(found), TrajectoryID(found[1])

        try:
            result, trajectory = look()
        except NotFound:
            if self._catalogs is None or not self._catalogs.find(wanted, ref):
                raise
            return look()[0]
        return look()[0] if self._catalogs is not None and self._catalogs.refresh(trajectory) else result

    def _find(self, wanted: str, ref: str) -> Row:
        """(snapshot id, trajectory id, ...) that `ref` means to the present tenant: an exact id before all, then a name, then the
        beginning of an id. NotFound. Ambiguous: it fits several, also a name that an older version gave and the beginning of an id."""
        if not ref or not searchable(ref):
            raise no_such(wanted, ref)
        begun = self._find_beginning(ref) if ID_FORM.fullmatch(ref) else []
        if begun and len(ref) == ID_HEX_CHARS:
            return begun[0][1:]
        called = self._find_named(ref)
        if called is None:
            begun = begun or self._find_beginning(ref)
            if not begun:
                raise no_such(wanted, ref)
            check_unique(ref, [row[0] for row in begun])
            return begun[0][1:]
        clash = next((row for row in begun if row[1:] != called[:2]), None)
        if clash is not None:
            raise Ambiguous(
                f"{ref} is a name, of snapshot {short(called[0])}, and the beginning of the id {short(clash[0])}: type more of "
                f"the id of the one you mean; a tag is taken away with `snapshotd tag --delete {ref}`"
            )
        return called

    def _find_named(self, ref: str) -> Row | None:
        """(snapshot id, trajectory id, ...) of the row with exactly the name `ref`. Ambiguous: an older version gave it to
        a snapshot and to a trajectory."""
        tag = self._find_tag(ref)
        name = self._db.read_one(
            "SELECT s.id, t.id FROM trajectories t JOIN snapshots s ON s.pk = t.head WHERE t.name = ?", (ref,)
        )
        if name is not None and not is_own(self._db, name[1]):
            name = None
        if tag is not None and name is not None:
            raise Ambiguous(
                f"{ref} is a tag of snapshot {short(tag[0])} and the name of trajectory {short(name[1])}: type the id of the one you mean, "
                f"or take the tag away with `snapshotd tag --delete {ref}`"
            )
        return tag or name

    def _find_tag(self, name: str) -> Row | None:
        """As `find_tag`, if the present tenant may know of it."""
        found = find_tag(self._db, name)
        return found if found is not None and is_own(self._db, found[1]) else None

    def _find_beginning(self, ref: str) -> list[Row]:
        """(id, snapshot id, trajectory id) of snapshots and trajectories whose id begins with `ref`: a few, so that the caller
        sees whether `ref` is unique."""
        condition, values = own_condition()
        bounds = (*id_range(ref), *values, CANDIDATES + 1)
        return self._db.read(
            "SELECT s.id, s.id, t.id FROM snapshots s JOIN trajectories t ON t.pk = s.trajectory"
            f" WHERE s.id >= ? AND s.id < ? AND {condition} LIMIT ?",
            bounds,
        ) + self._db.read(
            "SELECT t.id, s.id, t.id FROM trajectories t JOIN snapshots s ON s.pk = t.head"
            f" WHERE t.id >= ? AND t.id < ? AND {condition} LIMIT ?",
            bounds,
        )
