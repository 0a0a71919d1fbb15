"""The catalog in a database that speaks SQL. See `base.py` for the meaning of each method, `schema.py` for the tables,
`database.py` for what a database must do.

Cost: every lookup and `commit_snapshot` is O(log n) in the size of the catalog; a list costs time in proportion to its
length; `referenced_*` scan once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from snapshotd.catalog import entries, lines, rows
from snapshotd.catalog.base import Catalog, SnapshotRow
from snapshotd.catalog.commits import begin_trajectory, commit, set_began, writer
from snapshotd.catalog.database import CatalogDatabase, Row, Value
from snapshotd.catalog.inserts import WARNINGS, add_tag, set_sentences
from snapshotd.catalog.lookup import (
    check_name,
    find_own_tag,
    no_such,
    read_row,
    searchable,
    snapshot_numbers,
    trajectory_number,
)
from snapshotd.catalog.removal import check_removable, forget_removed, remove_trajectory, removed_trajectories
from snapshotd.catalog.restore import restore_rows
from snapshotd.catalog.snapshots import all_snapshots, count_snapshots, forget_outputs, get_snapshots, newest_snapshots
from snapshotd.catalog.tables.approvals import ApprovalTable, Compensations
from snapshotd.catalog.tables.experiments import ExperimentTable
from snapshotd.catalog.tables.figures import Figures
from snapshotd.catalog.tables.images import ImageTable
from snapshotd.catalog.tables.others import OtherRows
from snapshotd.catalog.tables.requests import RequestTable, add_request
from snapshotd.catalog.tables.values import KeyValues
from snapshotd.catalog.tenancy import trajectories_of
from snapshotd.types import (
    BlobID,
    CallID,
    Ended,
    FileChanges,
    Image,
    JournalEntry,
    LayerID,
    Message,
    Network,
    RecordID,
    RequestKey,
    Snapshot,
    SnapshotID,
    SnapshotState,
    Trajectory,
    TrajectoryID,
    TrajectoryStatus,
    TreeID,
)


class SqlCatalog(Catalog):
    def __init__(self, database: CatalogDatabase) -> None:
        """`database` has the catalog's tables, and is closed with the catalog."""
        super().__init__()
        self._db = database
        self.images = ImageTable(self._db)
        self.requests = RequestTable(self._db)
        self.approvals = ApprovalTable(self._db)
        self.compensations = Compensations(self._db)
        self.values = KeyValues(self._db)
        self.experiments = ExperimentTable(self._db)
        self.figures = Figures(self._db)
        self.others = OtherRows(self._db, self.figures, lambda one: self._listener(one))

    def close(self) -> None:
        self._db.close()

    def flush(self) -> None:
        self._db.flush()

    def checkpoint(self) -> None:
        self._db.checkpoint()

    def problems(self) -> list[str]:
        return self._db.problems()

    # -- small facts ---------------------------------------------------------------------------------------------------

    def get_meta(self, key: str) -> str | None:
        row = self._db.read_one("SELECT value FROM meta WHERE key = ?", (key,))
        return None if row is None else str(row[0])

    def set_meta(self, key: str, value: str) -> None:
        with self._db.transaction():
            self._db.write(rows.META_INSERT, (key, value))

    # -- trajectories --------------------------------------------------------------------------------------------------

    def add_trajectories(
        self, items: Sequence[tuple[Trajectory, Snapshot | None]], *, request: RequestKey | None = None
    ) -> None:
        with self._db.transaction():
            for trajectory, snapshot in items:
                check_name(trajectory.name or "")
                begin_trajectory(self._db, trajectory, snapshot)
            add_request(self._db, request, [trajectory.id for trajectory, _ in items])
        for trajectory, _ in items:
            self._listener(trajectory.id)

    def restore_rows(
        self, images: Iterable[Image], trajectories: Sequence[Trajectory], snapshots: Iterable[SnapshotRow]
    ) -> None:
        with self._db.transaction():
            restore_rows(self._db, images, trajectories, snapshots)
        for trajectory in trajectories:
            self._listener(trajectory.id)

    def get_trajectory(self, trajectory_id: TrajectoryID) -> Trajectory:
        select = rows.TRAJECTORY_SELECT + "WHERE t.id = ?"
        return rows.decode_trajectory(read_row(self._db, "trajectory", trajectory_id, select))

    def trajectories(self, status: TrajectoryStatus | None = None) -> list[Trajectory]:
        if status is None:
            return self._trajectories("ORDER BY t.pk")
        return self._trajectories("WHERE t.status = ? ORDER BY t.pk", (status.value,))

    def _trajectories(self, where: str, values: Sequence[Value] = ()) -> list[Trajectory]:
        return [rows.decode_trajectory(row) for row in self._db.read(rows.TRAJECTORY_SELECT + where, values)]

    def trajectories_of(self, tenant: str, among: TrajectoryID | None = None) -> set[TrajectoryID]:
        return trajectories_of(self._db, tenant, among)

    def set_status(self, trajectory_id: TrajectoryID, status: TrajectoryStatus, exit_code: int | None = None) -> None:
        self._update("status = ?, exit_code = coalesce(?, exit_code)", status.value, exit_code, trajectory_id)
        self._listener(trajectory_id)

    def set_began(self, trajectory_id: TrajectoryID, snapshot_id: SnapshotID) -> None:
        with self._db.transaction():
            set_began(self._db, trajectory_number(self._db, trajectory_id), snapshot_id)

    def set_network(self, trajectory_id: TrajectoryID, network: Network) -> None:
        self._update("network = ?", str(network), trajectory_id)

    def set_env(self, trajectory_id: TrajectoryID, env: tuple[tuple[str, str], ...]) -> None:
        self._update("env = ?", rows.encode_pairs(env), trajectory_id)

    def draw_fence(self, trajectory_id: TrajectoryID) -> int:
        return int(self._update("fence = fence + 1", trajectory_id)[0])

    def _update(self, change: str, *values: Value) -> Row:
        """Change a trajectory, whose id is the last of the values. Returns its fence. NotFound."""
        with self._db.transaction():
            row = self._db.read_one(f"UPDATE trajectories SET {change} WHERE id = ? RETURNING fence", values)
        if row is None:
            raise no_such("trajectory", str(values[-1]))
        return row

    def check_removable(self, trajectory_id: TrajectoryID, gone: Collection[TrajectoryID] = ()) -> None:
        check_removable(self._db, trajectory_id, gone)

    def remove_trajectory(self, trajectory_id: TrajectoryID) -> None:
        with self._db.lock:
            with self._db.transaction():
                remove_trajectory(self._db, trajectory_id)
            self.figures.forget(trajectory_id)
        self._listener(trajectory_id)

    def removed_trajectories(self) -> set[TrajectoryID]:
        return removed_trajectories(self._db)

    def forget_removed(self, trajectories: Collection[TrajectoryID]) -> None:
        with self._db.transaction():
            forget_removed(self._db, trajectories)

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def commit_snapshot(
        self,
        snapshot: Snapshot,
        messages: Sequence[Message],
        *,
        expected_head: SnapshotID,
        entries: Sequence[JournalEntry] = (),
        ended: Ended | None = None,
        state: dict[str, Any] | None = None,
        fence: int | None = None,
        request: RequestKey | None = None,
    ) -> None:
        for name in snapshot.tags:
            check_name(name)
        with self._db.transaction():
            commit(
                self._db,
                snapshot,
                messages,
                expected_head=expected_head,
                entries=entries,
                ended=ended,
                state=state,
                fence=fence,
            )
            add_request(self._db, request, [snapshot.id])

    def get_snapshot(self, snapshot_id: SnapshotID) -> Snapshot:
        select = rows.SNAPSHOT_SELECT + "WHERE s.id = ?"
        return rows.SnapshotDecoder()(read_row(self._db, "snapshot", snapshot_id, select))

    def get_snapshots(self, snapshot_ids: Iterable[SnapshotID]) -> dict[SnapshotID, Snapshot]:
        return get_snapshots(self._db, snapshot_ids)

    def snapshots(
        self, trajectory_id: TrajectoryID, last: int | None = None, *, before: int | None = None
    ) -> list[Snapshot]:
        return newest_snapshots(self._db, trajectory_number(self._db, trajectory_id), last, before)

    def count_snapshots(self, trajectory_id: TrajectoryID) -> int:
        return count_snapshots(self._db, trajectory_id)

    def all_snapshots(self) -> Iterator[Snapshot]:
        return all_snapshots(self._db)

    def set_files(self, snapshot_id: SnapshotID, files: FileChanges) -> None:
        with self._db.transaction():
            self._db.write(
                "UPDATE snapshots SET files_added = ?, files_changed = ?, files_deleted = ?, files_bytes = ? WHERE id = ?",
                (files.added, files.changed, files.deleted, files.bytes, snapshot_id),
            )

    def set_state(self, snapshot_ids: Iterable[SnapshotID], state: SnapshotState) -> None:
        values = [(state.value, snapshot_id) for snapshot_id in snapshot_ids]
        with self._db.transaction():
            self._db.write_many(
                "UPDATE snapshots SET state = ?1, tree = CASE ?1 WHEN 'stored' THEN tree END WHERE id = ?2", values
            )

    def unstored(self) -> list[SnapshotID]:
        found = self._db.read("SELECT id FROM snapshots WHERE state = 'captured' ORDER BY pk")
        return [SnapshotID(row[0]) for row in found]

    def set_stored(self, snapshot_id: SnapshotID, tree: TreeID, record: RecordID, warnings: Sequence[str] = ()) -> None:
        with self._db.transaction():
            changed = self._db.write(
                "UPDATE snapshots SET state = 'stored', tree = ?, record = ? WHERE id = ? AND state IN ('captured', 'lost')",
                (tree, record, snapshot_id),
            )
            if changed:
                set_sentences(self._db, WARNINGS, snapshot_id, warnings)

    def set_pruned(self, snapshot_ids: Iterable[SnapshotID]) -> None:
        values = [(snapshot_id,) for snapshot_id in snapshot_ids]
        with self._db.transaction():
            self._db.write_many(
                "UPDATE snapshots SET state = 'pruned', tree = NULL WHERE id = ? AND state = 'stored'", values
            )

    def record(self, snapshot_id: SnapshotID) -> RecordID | None:
        found = read_row(self._db, "snapshot", snapshot_id, "SELECT record FROM snapshots WHERE id = ?")[0]
        return None if found is None else RecordID(found)

    def set_record(self, snapshot_id: SnapshotID, record: RecordID) -> None:
        with self._db.transaction():
            self._db.write("UPDATE snapshots SET record = ? WHERE id = ?", (record, snapshot_id))

    def forget_outputs(self, blobs: Mapping[BlobID, int | None], *, spooled: bool = False) -> None:
        with self._db.transaction():
            forget_outputs(self._db, blobs, spooled=spooled)

    # -- conversations -------------------------------------------------------------------------------------------------

    def own_messages(self, snapshot_id: SnapshotID) -> list[Message]:
        return lines.own_messages(self._db, snapshot_id)

    def conversation(self, snapshot_id: SnapshotID, start: int = 0) -> Iterator[Message]:
        return lines.conversation(self._db, snapshot_id, max(start, 0))  # no generator: NotFound comes at the call

    def state(self, snapshot_id: SnapshotID) -> dict[str, Any]:
        return lines.state_of(self._db, snapshot_id)

    def own_state(self, snapshot_id: SnapshotID) -> dict[str, Any] | None:
        with self._db.lock:
            return lines.own_state(self._db, snapshot_id)

    # -- journals ------------------------------------------------------------------------------------------------------

    def begin_entry(self, trajectory_id: TrajectoryID, entry: JournalEntry, *, fence: int | None = None) -> None:
        with self._db.transaction():
            entries.add_entry(self._db, writer(self._db, trajectory_id, fence).line, entry)

    def end_entry(self, trajectory_id: TrajectoryID, ended: Ended, *, fence: int | None = None) -> None:
        with self._db.transaction():
            entries.end_entry(self._db, writer(self._db, trajectory_id, fence).trajectory, ended)

    def entry(self, entry_id: CallID) -> JournalEntry:
        return entries.get_entry(self._db, entry_id)

    def find_entry(self, ref: str) -> tuple[TrajectoryID, JournalEntry]:
        return entries.find_entry(self._db, ref)

    def own_entries(self, snapshot_id: SnapshotID) -> list[JournalEntry]:
        return lines.own_entries(self._db, snapshot_id)

    def journal(self, snapshot_id: SnapshotID, since: SnapshotID | None = None) -> Iterator[JournalEntry]:
        return lines.journal(self._db, snapshot_id, since)

    def left_running(self, snapshot_id: SnapshotID, since: SnapshotID | None = None) -> list[JournalEntry]:
        return lines.left_running(self._db, snapshot_id, since)

    def unbound(self, trajectory_id: TrajectoryID) -> list[JournalEntry]:
        with self._db.lock:
            return entries.unbound(self._db, writer(self._db, trajectory_id, None).line)

    # -- references by people ------------------------------------------------------------------------------------------

    def resolve_snapshot(self, ref: str) -> Snapshot:
        return self.others.resolve("snapshot", ref, lambda found: self.get_snapshot(found[0]))

    def resolve_trajectory(self, ref: str) -> Trajectory:
        return self.others.resolve("trajectory", ref, lambda found: self.get_trajectory(found[1]))

    def tag(self, snapshot_id: SnapshotID, name: str, *, move: bool = False, request: RequestKey | None = None) -> None:
        check_name(name)
        with self._db.transaction():
            add_tag(self._db, snapshot_numbers(self._db, snapshot_id)[0], name, move=move)
            add_request(self._db, request, [snapshot_id])

    def untag(self, name: str) -> None:
        with self._db.transaction():
            if not searchable(name) or find_own_tag(self._db, name) is None:
                raise no_such("tag", name)
            self._db.write("DELETE FROM tags WHERE name = ?", (name,))

    def tags(self) -> dict[str, SnapshotID]:
        return dict(
            self._db.read(
                "SELECT name, snapshots.id FROM tags JOIN snapshots ON snapshots.pk = tags.snapshot ORDER BY name"
            )
        )

    # -- what is referenced --------------------------------------------------------------------------------------------

    def referenced_layers(self) -> set[LayerID]:
        return {LayerID(row[0]) for row in self._db.read("SELECT DISTINCT value FROM stacks, json_each(stacks.layers)")}

    def unstored_blobs(self) -> set[BlobID]:
        found = self._db.read("SELECT call_output, call_stdout, call_stderr FROM snapshots WHERE state = 'captured'")
        return {BlobID(blob) for row in found for blob in row if blob is not None}

    def referenced_records(self) -> set[RecordID]:
        return {RecordID(row[0]) for row in self._db.read("SELECT record FROM snapshots WHERE record IS NOT NULL")}
