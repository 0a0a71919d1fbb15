"""The removal of what a fleet has published, by one collector at a time, and the pins of readers.

The collector holds a lease of its own under a fence, so one that stood still past its lease removes nothing when it
goes on. Rows go first: a snapshot that is removed here is known to nobody, and only then may its bytes go. A pin and a
removal exclude each other by the lock of the collector's row: a reader that has its pin has the snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence

from snapshotd.errors import Conflict, NotFound
from snapshotd.fleet.base import SECOND_NS, NodeID
from snapshotd.fleet.tables import FleetTables
from snapshotd.terms import number_of
from snapshotd.types import SnapshotID, TrajectoryID, short

COLLECTION_TTL_NS = 60 * SECOND_NS


class Collection:
    """Every method is one transaction. Errors: as `Coordination`."""

    def __init__(self, tables: FleetTables) -> None:
        self._tables = tables

    def begin_collecting(self, node: NodeID, epoch: int) -> int:
        """Become the collector, or prolong that: the fence. Conflict while another node is it. The next daemon of a node begins at
        once: that before it has ended."""
        tables = self._tables
        with tables.database.transaction(alone=False):
            ((holder, present, fence, until_ns),) = tables.read(
                "SELECT node, epoch, fence, until_ns FROM {}.collector FOR UPDATE"
            )
            now_ns, same = tables.now_ns(), (holder, present) == (node, epoch)
            if holder != node and now_ns < until_ns:
                raise Conflict(
                    f"node {holder} collects for {(until_ns - now_ns) // SECOND_NS + 1} s more: there is one collector at a time"
                )
            new = fence if same else fence + 1
            tables.write(
                "UPDATE {}.collector SET node = ?, epoch = ?, fence = ?, until_ns = ?",
                (node, epoch, new, now_ns + COLLECTION_TTL_NS),
            )
        return int(new)

    def prolong(self, fence: int) -> None:
        """Stay the collector. Conflict: another has become it."""
        tables = self._tables
        if not tables.write(
            f"UPDATE {{}}.collector SET until_ns = {tables.clock} + ? WHERE fence = ?", (COLLECTION_TTL_NS, fence)
        ):
            raise Conflict(f"another node collects since (fence {fence}): begin again")

    def end_collecting(self, fence: int) -> None:
        """Let another node begin at once. Not an error when one has begun."""
        self._tables.write("UPDATE {}.collector SET until_ns = 0 WHERE fence = ?", (fence,))

    def remove_published(self, fence: int, snapshots: Sequence[SnapshotID]) -> list[SnapshotID]:
        """Remove those of `snapshots` that are neither pinned nor the head of a trajectory, and return them. Conflict:
        another node has become the collector."""
        tables = self._tables
        with tables.database.transaction(alone=False):
            ((present,),) = tables.read("SELECT fence FROM {}.collector FOR UPDATE")
            if present != fence:
                raise Conflict(f"another node collects since (fence {fence}, now {present}): begin again")
            now_ns = tables.now_ns()
            tables.write("DELETE FROM {}.pins WHERE until_ns <= ?", (now_ns,))
            rows = tables.read(
                "DELETE FROM {}.published p WHERE snapshot = ANY(?)"
                " AND NOT EXISTS (SELECT 1 FROM {}.pins WHERE pins.snapshot = p.snapshot)"
                " AND NOT EXISTS (SELECT 1 FROM {}.owners WHERE head = p.snapshot) RETURNING snapshot",
                list(snapshots),
            )
        removed = {snapshot for (snapshot,) in rows}
        return [one for one in snapshots if one in removed]

    def remove_trajectory(self, trajectory: TrajectoryID) -> None:
        """Remove the rows of a trajectory here, whose owner has removed it and holds its row (`PostgresCoordination.holding`): it has
        no owner afterwards. A part of the caller's transaction. Conflict: a reader has pinned a snapshot of it."""
        tables = self._tables
        with tables.database.transaction(alone=False):
            tables.read("SELECT 1 FROM {}.collector FOR UPDATE")
            pins = tables.read(
                "SELECT pins.node FROM {}.pins JOIN {}.published p ON p.snapshot = pins.snapshot WHERE p.trajectory = ? AND until_ns > ?"
                " LIMIT 1",
                trajectory,
                tables.now_ns(),
            )
            if pins:
                raise Conflict(
                    f"node {pins[0][0]} reads a snapshot of trajectory {short(trajectory)}: it goes when that has ended"
                )
            for table in ("published", "intents", "owners"):
                tables.write(f"DELETE FROM {{}}.{table} WHERE trajectory = ?", (trajectory,))

    def pin(self, node: NodeID, snapshots: Sequence[SnapshotID], ns: int) -> None:
        """Keep published snapshots for the next `ns`, or longer if the node has pinned them for longer: all or none. NotFound:
        one was removed."""
        tables = self._tables
        with tables.database.transaction(alone=False):
            tables.read("SELECT 1 FROM {}.collector FOR SHARE")
            found = {
                one
                for (one,) in tables.read("SELECT snapshot FROM {}.published WHERE snapshot = ANY(?)", list(snapshots))
            }
            gone = [one for one in snapshots if one not in found]
            if gone:
                raise NotFound(
                    f"{number_of(len(gone), 'snapshot')} of {len(snapshots)} cannot be pinned because the fleet has removed them, "
                    f"among them {short(gone[0])}: choose others"
                )
            now_ns = tables.now_ns()
            for snapshot in sorted(snapshots):
                tables.write(
                    "INSERT INTO {}.pins (snapshot, node, since_ns, until_ns) VALUES (?1, ?2, ?3, ?4)"
                    " ON CONFLICT (snapshot, node) DO UPDATE SET until_ns = greatest(excluded.until_ns, pins.until_ns),"
                    " since_ns = CASE WHEN pins.until_ns > ?3 THEN pins.since_ns ELSE ?3 END",
                    (snapshot, node, now_ns, now_ns + ns),
                )

    def unpin(self, node: NodeID, snapshots: Sequence[SnapshotID]) -> None:
        """Give up pins. Not an error when there are none."""
        self._tables.write("DELETE FROM {}.pins WHERE node = ? AND snapshot = ANY(?)", (node, list(snapshots)))
