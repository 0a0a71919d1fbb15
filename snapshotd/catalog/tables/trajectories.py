"""Trajectories in the catalog's database."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Collection, Sequence

from snapshotd.catalog import rows
from snapshotd.catalog.database import CatalogDatabase, Row, Value
from snapshotd.catalog.inserts import REFUSED, WARNINGS, add_snapshot, add_stack, add_trajectory
from snapshotd.catalog.lines import add_line, position_of, set_began
from snapshotd.catalog.lookup import check_name, id_range, no_such, read_row, snapshot_numbers, trajectory_number
from snapshotd.catalog.tables.figures import Figures
from snapshotd.catalog.tables.requests import add_request
from snapshotd.catalog.tenancy import own_condition
from snapshotd.errors import Conflict, InternalError
from snapshotd.terms import number_of
from snapshotd.types import Network, RequestKey, Snapshot, SnapshotID, Trajectory, TrajectoryID, TrajectoryStatus, short

_USERS = (
    (
        "was forked from it",
        "SELECT t.id FROM trajectories t JOIN snapshots s ON s.pk = t.forked_from WHERE s.trajectory = ?1",
    ),
    (
        "goes on from a conversation in it",
        "SELECT t.id FROM snapshots s JOIN lines l ON l.forked_from = s.pk JOIN trajectories t ON t.pk = l.trajectory"
        " WHERE s.trajectory = ?1",
    ),
    (
        "began its program in it",
        "SELECT t.id FROM trajectories t JOIN snapshots s ON s.pk = t.began WHERE s.trajectory = ?1",
    ),
)
"""The reasons that keep a trajectory, and the rows that give them. The trajectory's own rows do not count."""
_BUILT_ON_IT = "FROM snapshots b JOIN snapshots s ON s.base = b.pk WHERE b.trajectory = ?1 AND s.trajectory <> ?1"
"""Snapshots of others that derive their trees from its (after a rewind to one)."""

_INHERITED_COMPENSATIONS = """
UPDATE compensations SET trajectory = (SELECT l.trajectory FROM entries e JOIN lines l ON l.pk = e.line WHERE e.id = compensations.entry)
WHERE trajectory = ?1
AND EXISTS (SELECT 1 FROM entries e JOIN lines l ON l.pk = e.line WHERE e.id = compensations.entry AND l.trajectory <> ?1)
"""
"""A fork's compensation stays with the call, which is an ancestor's: the call must not be compensated again."""

_REMOVED = "removed/"
"""Begin of the names of facts, one for each removed trajectory whose id is still known."""


class TrajectoryTable:
    """Trajectories: how each was created, its status, and its head."""

    def __init__(self, db: CatalogDatabase, figures: Figures) -> None:
        self._db, self._figures = db, figures
        self._listener: Callable[[TrajectoryID], object] = lambda _: None

    def notify(self, listener: Callable[[TrajectoryID], object]) -> None:
        """Call `listener` from now on after a trajectory began, changed its status, or was removed, in place of an earlier
        listener. It must not block or raise."""
        self._listener = listener

    def tell(self, trajectory_id: TrajectoryID) -> None:
        """Tell the listener of a trajectory that another part of the catalog has changed."""
        self._listener(trajectory_id)

    def add(self, items: Sequence[tuple[Trajectory, Snapshot | None]], *, request: RequestKey | None = None) -> None:
        """Record new trajectories, all or none, as what `request` (if any) has made. With a snapshot: it is the first
        one and the head. Without one (a fork): the head is the existing snapshot `forked_from`. Conflict when a name is
        taken, by another trajectory or as a tag."""
        with self._db.transaction():
            for trajectory, snapshot in items:
                check_name(trajectory.name or "")
                self._begin(trajectory, snapshot)
            add_request(self._db, request, [trajectory.id for trajectory, _ in items])
        for trajectory, _ in items:
            self._listener(trajectory.id)

    def _begin(self, trajectory: Trajectory, snapshot: Snapshot | None) -> None:
        origin, messages = None, 0
        if trajectory.forked_from is not None:
            origin, messages = snapshot_numbers(self._db, trajectory.forked_from)
        first = snapshot.id if snapshot is not None else trajectory.forked_from
        if first is None or trajectory.head != first:
            raise InternalError(f"trajectory {trajectory.id} must begin at its head, not at {first}")
        number = add_trajectory(self._db, trajectory, origin)
        if snapshot is None:
            add_line(self._db, number, origin, messages)
        else:
            if snapshot.trajectory != trajectory.id or snapshot.parent != trajectory.forked_from:
                raise InternalError(
                    f"snapshot {snapshot.id} does not fit the trajectory {trajectory.id} that it is to begin"
                )
            self._begin_with(number, snapshot, origin)
        set_began(self._db, number, trajectory.began)

    def _begin_with(self, trajectory: int, snapshot: Snapshot, origin: int | None) -> None:
        """A trajectory's own first snapshot, which adds no messages."""
        continued = None if snapshot.continues is None else position_of(self._db, snapshot.continues)
        number, messages, state = (
            (None, 0, None) if continued is None else (continued.number, continued.messages, continued.state)
        )
        if snapshot.messages != messages and (snapshot.follows is None or snapshot.messages > messages):
            raise InternalError(
                f"snapshot {snapshot.id} does not continue {snapshot.continues} ({number_of(messages, 'message')})"
            )
        line = add_line(self._db, trajectory, number, snapshot.messages)
        follows = None if snapshot.follows is None else number
        place = rows.Place(trajectory, line, origin, add_stack(self._db, snapshot.stack), follows, state)
        head = add_snapshot(self._db, snapshot, place)
        self._db.write("UPDATE trajectories SET head = ? WHERE pk = ?", (head, trajectory))

    def get(self, trajectory_id: TrajectoryID) -> Trajectory:
        """The trajectory of this id. NotFound."""
        select = rows.TRAJECTORY_SELECT + "WHERE t.id = ?"
        return rows.decode_trajectory(read_row(self._db, "trajectory", trajectory_id, select))

    def list(self, status: TrajectoryStatus | None = None) -> builtins.list[Trajectory]:
        """All, or those in one status; oldest first."""
        where, values = ("", ()) if status is None else ("WHERE t.status = ? ", (status.value,))
        found = self._db.read(f"{rows.TRAJECTORY_SELECT}{where}ORDER BY t.pk", values)
        return [rows.decode_trajectory(row) for row in found]

    def of_tenant(self, tenant: str, among: TrajectoryID | None = None) -> set[TrajectoryID]:
        """The ids of a tenant's trajectories: all, or the one of `among` if it is one. They have no user's folder."""
        condition, values = own_condition(tenant)
        if among is not None:
            condition, values = f"t.id = ? AND {condition}", (among, *values)
        found = self._db.read(f"SELECT t.id FROM trajectories t WHERE {condition}", values)
        return {TrajectoryID(row[0]) for row in found}

    def set_status(self, trajectory_id: TrajectoryID, status: TrajectoryStatus, exit_code: int | None = None) -> None:
        """Change a trajectory's status (and exit code, if given). NotFound."""
        self._update("status = ?, exit_code = coalesce(?, exit_code)", status.value, exit_code, trajectory_id)
        self._listener(trajectory_id)

    def set_began(self, trajectory_id: TrajectoryID, snapshot_id: SnapshotID) -> None:
        """Record at which snapshot the trajectory's program was started from the top. NotFound."""
        with self._db.transaction():
            set_began(self._db, trajectory_number(self._db, trajectory_id), snapshot_id)

    def set_network(self, trajectory_id: TrajectoryID, network: Network) -> None:
        """Replace the network that a trajectory's sandbox reaches. NotFound."""
        self._update("network = ?", str(network), trajectory_id)

    def set_env(self, trajectory_id: TrajectoryID, env: tuple[tuple[str, str], ...]) -> None:
        """Replace the environment of a trajectory's commands. NotFound."""
        self._update("env = ?", rows.encode_pairs(env), trajectory_id)

    def draw_fence(self, trajectory_id: TrajectoryID) -> int:
        """A new fence for the trajectory's writer: a holder of an older, smaller one cannot write any more. NotFound."""
        return int(self._update("fence = fence + 1", trajectory_id)[0])

    def _update(self, change: str, *values: Value) -> Row:
        """Change a trajectory, whose id is the last of the values. Returns its fence. NotFound."""
        with self._db.transaction():
            row = self._db.read_one(f"UPDATE trajectories SET {change} WHERE id = ? RETURNING fence", values)
        if row is None:
            raise no_such("trajectory", str(values[-1]))
        return row

    def check_removable(self, trajectory_id: TrajectoryID, gone: Collection[TrajectoryID] = ()) -> None:
        """Raises the errors that `remove` would raise now, or once those of `gone` are removed; changes nothing."""
        self._find_removable(trajectory_id, gone)

    def _find_removable(self, trajectory_id: TrajectoryID, gone: Collection[TrajectoryID] = ()) -> int:
        """As `check_removable`. Returns the trajectory's row."""
        own = trajectory_number(self._db, trajectory_id)
        for why, users in _USERS:
            found = self._db.read(f"{users} AND t.pk <> ?1", (own,))
            user = next((one for (one,) in found if one not in gone), None)
            if user is not None:
                raise Conflict(
                    f"trajectory {short(trajectory_id)} cannot be removed because trajectory {short(user)} {why}: remove that first"
                )
        waiting = self._db.read(
            f"SELECT s.id, (SELECT id FROM trajectories WHERE pk = s.trajectory) {_BUILT_ON_IT} AND s.state = 'captured'",
            (own,),
        )
        for snapshot, owner in waiting:
            if owner in gone:
                continue
            raise Conflict(
                f"trajectory {short(trajectory_id)} cannot be removed because snapshot {short(snapshot)} of trajectory "
                f"{short(owner)} was made from it and is not stored yet: try again when it is, or remove that trajectory first"
            )
        return own

    def remove(self, trajectory_id: TrajectoryID) -> None:
        """Forget a trajectory with its snapshots, calls, messages and tags. NotFound; Conflict while a fork of one of
        its snapshots exists (the message names it), or while a captured snapshot elsewhere has one of its snapshots as
        `base` (after a rewind to it). Snapshots elsewhere that are not captured lose such a base. The caller collects
        layers and blobs."""
        with self._db.lock:
            with self._db.transaction():
                self._remove((self._find_removable(trajectory_id),), trajectory_id)
            self._figures.forget(trajectory_id)
        self._listener(trajectory_id)

    def _remove(self, own: tuple[int], trajectory_id: TrajectoryID) -> None:
        """`own`: the trajectory's row."""
        db = self._db
        db.write(  # a stored snapshot needs no base; a lost one could only be derived from all of its layers
            "UPDATE snapshots SET base = NULL,"
            " own_layers = (SELECT json_array_length(layers) FROM stacks WHERE stacks.pk = snapshots.stack)"
            f" WHERE pk IN (SELECT s.pk {_BUILT_ON_IT})",
            own,
        )
        stacks, states = (
            rows.encode_json(
                [
                    n
                    for (n,) in db.read(f"SELECT DISTINCT {column} FROM snapshots WHERE trajectory = ?", own)
                    if n is not None
                ]
            )
            for column in ("stack", "agent_state")
        )
        for table in ("tags", "damaged_outputs"):
            db.write(f"DELETE FROM {table} WHERE snapshot IN (SELECT pk FROM snapshots WHERE trajectory = ?)", own)
        for kind in (WARNINGS, REFUSED):
            db.write(
                "DELETE FROM meta WHERE key IN (SELECT ? || '/' || id FROM snapshots WHERE trajectory = ?)",
                (kind, *own),
            )
        db.write(_INHERITED_COMPENSATIONS, own)
        for table in ("messages", "entries"):
            db.write(f"DELETE FROM {table} WHERE line IN (SELECT pk FROM lines WHERE trajectory = ?)", own)
        for table in ("approvals", "compensations"):
            db.write(f"DELETE FROM {table} WHERE trajectory = ?", own)
        db.write("DELETE FROM trajectories WHERE pk = ?", own)
        db.write("INSERT INTO meta VALUES (? || ?, '') ON CONFLICT DO NOTHING", (_REMOVED, trajectory_id))
        for table in ("snapshots", "lines"):
            db.write(f"DELETE FROM {table} WHERE trajectory = ?", own)
        for table, column, numbers in (("stacks", "stack", stacks), ("states", "agent_state", states)):
            db.write(
                f"DELETE FROM {table} WHERE pk IN (SELECT CAST(value AS BIGINT) FROM json_each(?))"
                f" AND NOT EXISTS (SELECT 1 FROM snapshots s WHERE s.{column} = {table}.pk)",
                (numbers,),
            )

    def removed(self) -> set[TrajectoryID]:
        """Ids of trajectories that were removed, until `forget_removed`: packs that a crash has left may hold them."""
        found = self._db.read("SELECT key FROM meta WHERE key >= ? AND key < ?", id_range(_REMOVED))
        return {TrajectoryID(key.removeprefix(_REMOVED)) for (key,) in found}

    def forget_removed(self, trajectories: Collection[TrajectoryID]) -> None:
        """Forget even the ids of removed trajectories: no pack holds them."""
        ids = rows.encode_json([*trajectories])
        with self._db.transaction():
            self._db.write("DELETE FROM meta WHERE key IN (SELECT ? || value FROM json_each(?))", (_REMOVED, ids))
