"""The coordination of a fleet in PostgreSQL. The rules are `protocol`'s: this reads the rows for update, applies the
rule, and writes what it returns.

Rows are locked in one order: nodes (by name), owner, intents. No transaction but a publication takes the lock of the
catalog's one writer, so a renewal never waits for a publication.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from snapshotd.api.service import NodeStats
from snapshotd.errors import Conflict, NotFound
from snapshotd.fleet import protocol
from snapshotd.fleet.base import (
    SECOND_NS,
    Claim,
    Coordination,
    IntentState,
    LeaseTerms,
    NodeID,
    NodeLease,
    OwnedTrajectory,
    RecordedIntent,
    Renewed,
    Sighting,
    Taken,
)
from snapshotd.fleet.forgetting import LISTED, WATCHED, no_node
from snapshotd.fleet.places import NodeRoom, decode_room, encode_room
from snapshotd.fleet.tables import FleetTables
from snapshotd.types import CallID, SnapshotID, TrajectoryID, new_id, short

if TYPE_CHECKING:
    from snapshotd.catalog.database import Row

_T = TypeVar("_T")
_LEASE = "node, host, epoch, renewals, until_ns"
_OWNER = "trajectory, node, epoch, fence, head, side_of"
_INTENT = "call, trajectory, fence, state, said"


def _stats_of(room: NodeRoom, owned: int) -> NodeStats:
    return NodeStats(
        node=room.node,
        state="lost" if room.lease_ns <= 0 else "draining" if room.draining else "leased",
        lease_s=max(0.0, round(room.lease_ns / SECOND_NS, 1)),
        trajectory_count=owned,
        free_memory_bytes=max(0, room.free_bytes),
        starting_count=room.starting,
        starting_max=room.starting_most,
        unpublished_count=room.unpublished,
        architecture=room.architecture,
    )


class PostgresCoordination(Coordination):
    """See `Coordination`."""

    def __init__(self, tables: FleetTables, terms: LeaseTerms | None = None) -> None:
        self.terms, self.tables = terms or LeaseTerms(), tables
        self._db, self._clock = tables.database, tables.clock
        self._read, self._write, self._now = tables.read, tables.write, tables.now_ns

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def register(self, node: NodeID, host: str, after: int, *, seen: Sighting | None = None) -> Renewed:
        with self._db.transaction(alone=False):
            before, now_ns = self._lock_nodes(node).get(node), self._now()
            now = protocol.register_node(before, node, host, after, now_ns, self.terms, seen)
            if before is None:
                made = self._write(
                    f"INSERT INTO {{}}.nodes ({_LEASE}, room, free_bytes, starting, starting_most)"
                    " VALUES (?,?,?,?,?,?,0,0,0) ON CONFLICT DO NOTHING",
                    (*_values(now), "{}"),
                )
                if not made:
                    raise Conflict(
                        f"another daemon has registered as node {node}: stop one, or give it a node of its own"
                    )
            elif before != now:
                self._write_lease(now)
                for row in self._read_owners("WHERE node = ? ORDER BY trajectory FOR UPDATE", node):
                    adopted = protocol.adopt_trajectory(row, before, now)
                    self._write_owner(adopted)
                    if adopted.fence != row.fence:
                        self._doubt_intents(row.trajectory)
            return self._read_renewal(now, now_ns)

    def renew(self, node: NodeID, epoch: int, room: NodeRoom | None = None) -> Renewed:
        with self._db.transaction(alone=False):
            before, now_ns = self._lock_node(node), self._now()
            row = protocol.renew_lease(before, epoch, now_ns, self.terms)
            self._write_lease(row)
            if room is not None:
                self._write_room(node, room, now_ns)
            return self._read_renewal(row, now_ns)

    def watch(self, node: NodeID) -> NodeLease:
        return _one(
            f"node {node}", [_lease(row) for row in self._read(f"SELECT {_LEASE} FROM {{}}.nodes WHERE node = ?", node)]
        )

    def drain_node(self, node: NodeID, *, draining: bool = True) -> None:
        """Let no new sandboxes begin on a node, and have it hand over its trajectories; or end that. NotFound."""
        if not self._write(f"UPDATE {{}}.nodes SET draining = ? WHERE node = ? AND {LISTED}", (draining, node)):
            raise no_node(node)

    # -- owners --------------------------------------------------------------------------------------------------------

    def own(self, trajectory: TrajectoryID, node: NodeID, epoch: int) -> Claim:
        with self._db.transaction(alone=False):
            self._lock_daemon(node, epoch)
            made = OwnedTrajectory(trajectory, node, epoch, 1, None)
            self._write(
                f"INSERT INTO {{}}.owners ({_OWNER}) VALUES (?,?,?,?,?,?) ON CONFLICT DO NOTHING", _values(made)
            )
            if self.owner(trajectory) != made:
                raise Conflict(f"trajectory {short(trajectory)} has an owner: take it over")
            return Claim(trajectory, node, epoch, 1)

    def own_new(self, trajectories: Sequence[TrajectoryID], node: NodeID, epoch: int) -> list[OwnedTrajectory]:
        """Own those that have no row yet, as `own` does; the rows of all, in no order. One transaction."""
        with self._db.transaction(alone=False):
            self._lock_daemon(node, epoch)
            self._write(
                f"INSERT INTO {{}}.owners ({_OWNER}) SELECT one, ?, ?, 1, NULL, NULL FROM unnest(?::text[]) AS one ORDER BY one"
                " ON CONFLICT DO NOTHING",
                (node, epoch, list(trajectories)),
            )
            return self._read_owners("WHERE trajectory = ANY(?)", list(trajectories))

    def draw_fence(self, claim: Claim) -> Claim:
        with self._db.transaction(alone=False):
            row = protocol.raise_fence(self._lock_owner(claim.trajectory), claim)
            self._write_owner(row)
            return replace(claim, fence=row.fence)

    def hand_over(self, claim: Claim) -> None:
        with self._db.transaction(alone=False):
            self._write_owner(protocol.release_trajectory(self._lock_owner(claim.trajectory), claim))

    def owner(self, trajectory: TrajectoryID) -> OwnedTrajectory:
        return _one(f"trajectory {trajectory}", self._read_owners("WHERE trajectory = ?", trajectory))

    def heads_of(self, node: NodeID) -> dict[TrajectoryID, SnapshotID | None]:
        """A node's trajectories, with their last published snapshots."""
        return {row.trajectory: row.head for row in self._read_owners("WHERE node = ?", node)}

    def take_over(self, row: OwnedTrajectory, node: NodeID, epoch: int, seen: Sighting | None = None) -> Taken:
        with self._db.transaction(alone=False):
            leases = self._lock_nodes(node, *(() if row.node is None else (row.node,)))
            taker = _one(f"node {node}", [leases[node]] if node in leases else [])
            protocol.check_epoch(taker, epoch)
            before = self._lock_owner(row.trajectory)
            if before.node not in (None, row.node, node):
                raise Conflict(
                    f"trajectory {short(row.trajectory)} was taken over by node {before.node} meanwhile: ask that one"
                )
            holder = None if before.node is None else leases[before.node]
            taken = protocol.take_trajectory(before, row.fence, holder, taker, seen, self._now())
            if taken != before:
                self._write_owner(taken)
                self._doubt_intents(row.trajectory)
            undecided = [one.call for one in self.intents(row.trajectory) if one.state is IntentState.UNDECIDED]
            return Taken(Claim(row.trajectory, node, epoch, taken.fence), taken.head, tuple(undecided))

    @contextmanager
    def holding(self, claim: Claim) -> Iterator[None]:
        """A transaction of the catalog's one writer, at whose end the claim is the owner's still. Conflict: it is not."""
        with self._db.transaction():
            protocol.check_claim(self._lock_owner(claim.trajectory), claim)
            yield

    @contextmanager
    def publishing(
        self,
        claim: Claim,
        parent: SnapshotID | None,
        snapshot: SnapshotID,
        calls: Collection[CallID] = (),
        *,
        stored_ns: int | None = None,
    ) -> Iterator[bool]:
        with self._db.transaction():
            row = self._lock_owner(claim.trajectory)
            if self.find_published([snapshot]):
                yield False
                return
            moved = protocol.move_head(row, claim, parent, snapshot)
            yield True
            protocol.check_in_time(snapshot, stored_ns, self._now())
            self._write_owner(moved)
            self._write("INSERT INTO {}.published (snapshot, trajectory) VALUES (?,?)", (snapshot, claim.trajectory))
            for call in calls:
                self._write_intent(protocol.bind_intent(self._lock_intent(call), claim.trajectory))

    def branch_off(self, lost: Claim, side: TrajectoryID, base: SnapshotID | None, node: NodeID, epoch: int) -> Claim:
        with self._db.transaction(alone=False):
            lease = self._lock_daemon(node, epoch)
            made = protocol.branch_trajectory(self._lock_owner(lost.trajectory), lost, lease, side, base)
            self._write(
                f"INSERT INTO {{}}.owners ({_OWNER}) VALUES (?,?,?,?,?,?) ON CONFLICT DO NOTHING", _values(made)
            )
            return Claim(side, node, epoch, self.owner(side).fence)

    def find_published(self, snapshots: Sequence[SnapshotID]) -> list[SnapshotID]:
        found = self._read("SELECT snapshot FROM {}.published WHERE snapshot = ANY(?)", list(snapshots))
        there = {snapshot for (snapshot,) in found}
        return [one for one in snapshots if one in there]

    def clock_ns(self) -> int:
        return self._now()

    # -- irreversible calls --------------------------------------------------------------------------------------------

    def record_intent(self, claim: Claim, call: CallID, said: str = "") -> None:
        with self._db.transaction(alone=False):
            row = self._lock_owner(claim.trajectory)
            others = [one for one in self.intents(claim.trajectory) if one.call != call]
            made = replace(protocol.open_intent(row, claim, call, others), said=said)
            self._write(
                f"INSERT INTO {{}}.intents ({_INTENT}) VALUES (?,?,?,?,?) ON CONFLICT DO NOTHING", _values(made)
            )
            if self._lock_intent(call) != made:
                raise Conflict(f"irreversible call {short(call)} has begun before: its outcome is to be looked up")

    def intents(self, trajectory: TrajectoryID) -> list[RecordedIntent]:
        rows = self._read(
            f"SELECT {_INTENT} FROM {{}}.intents WHERE trajectory = ? AND state <> 'bound' ORDER BY call", trajectory
        )
        return [_intent(row) for row in rows]

    def find_recorded(self, calls: Sequence[CallID]) -> list[CallID]:
        """Choose the ones of `calls` that were recorded."""
        found = {call for (call,) in self._read("SELECT call FROM {}.intents WHERE call = ANY(?)", list(calls))}
        return [call for call in calls if call in found]

    def decide_intent(self, call: CallID, *, happened: bool) -> None:
        with self._db.transaction(alone=False):
            self._write_intent(protocol.decide(self._lock_intent(call), happened=happened))

    # -- placement -----------------------------------------------------------------------------------------------------

    def rooms(self) -> list[NodeRoom]:
        """The nodes and their room, as of each one's last renewal, less what is reserved. By name."""
        rows = self._read(
            f"SELECT room, node, until_ns - {self._clock}, draining, free_bytes - reserved_bytes, starting + reserved, starting_most"
            f" FROM {{}}.nodes WHERE {LISTED} ORDER BY node"
        )
        return [decode_room(*row) for row in rows]

    def describe_nodes(self) -> tuple[NodeStats, ...]:
        """The nodes by name, with their leases, trajectories, room and lag. Cost: all trajectories."""
        rows = self._read("SELECT node, count(*) FROM {}.owners WHERE node IS NOT NULL GROUP BY node")
        counts = {NodeID(node): count for node, count in rows}
        return tuple(_stats_of(room, counts.get(room.node, 0)) for room in self.rooms())

    def reserve(self, node: NodeID, count: int, memory_bytes: int) -> str:
        """Reserve room for `count` sandboxes on a node, until its next renewals have had time to count them. Returns the
        reservation's id, which the node takes back with `begin_reserved`. Conflict: there is no such room (any more), or
        the node drains, or its lease has run out. One guarded update."""
        made = new_id()
        with self._db.transaction(alone=False):
            changed = self._write(
                "UPDATE {}.nodes SET reserved_bytes = reserved_bytes + ?2, reserved = reserved + ?3 WHERE node = ?1"
                f" AND NOT draining AND until_ns > {self._clock} AND free_bytes - reserved_bytes >= ?2"
                " AND starting + reserved + ?3 <= starting_most",
                (node, count * memory_bytes, count),
            )
            if not changed:
                raise Conflict(f"node {node} has no room for so many sandboxes any more: choose another node")
            self._write(
                f"INSERT INTO {{}}.reservations VALUES (?,?,?,?,{self._clock} + ?)",
                (made, node, count * memory_bytes, count, self.terms.ttl_ns),
            )
        return made

    def begin_reserved(self, node: NodeID, reservation: str) -> None:
        """Begin what was reserved, which the node counts itself from now on. Not an error when the reservation has run
        out."""
        with self._db.transaction(alone=False):
            self._lock_node(node)
            self._write("DELETE FROM {}.reservations WHERE id = ? AND node = ?", (reservation, node))
            self._count_reserved(node)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _write_room(self, node: NodeID, room: NodeRoom, now_ns: int) -> None:
        self._write(
            "UPDATE {}.nodes SET room = ?, free_bytes = ?, starting = ?, starting_most = ? WHERE node = ?",
            (encode_room(room), room.free_bytes, room.starting, room.starting_most, node),
        )
        if self._write("DELETE FROM {}.reservations WHERE node = ? AND until_ns <= ?", (node, now_ns)):
            self._count_reserved(node)

    def _count_reserved(self, node: NodeID) -> None:
        self._write(
            "UPDATE {}.nodes SET (reserved_bytes, reserved) = (SELECT coalesce(sum(bytes), 0), coalesce(sum(count), 0)"
            " FROM {}.reservations WHERE node = ?1) WHERE node = ?1",
            (node,),
        )

    def _read_renewal(self, row: NodeLease, now_ns: int) -> Renewed:
        claims = (protocol.claim_of(one) for one in self._read_owners("WHERE node = ?", row.node))
        least_ns = protocol.late_before(now_ns, self.terms)  # a value, for the index
        late = self._read(f"SELECT {_LEASE} FROM {{}}.nodes WHERE until_ns < ? AND {WATCHED}", least_ns)
        ((draining,),) = self._read("SELECT draining FROM {}.nodes WHERE node = ?", row.node)
        owned = frozenset(claim for claim in claims if claim is not None)
        return Renewed(row, owned, tuple(_lease(one) for one in late), draining)

    def _lock_nodes(self, *nodes: NodeID) -> dict[NodeID, NodeLease]:
        rows = self._read(f"SELECT {_LEASE} FROM {{}}.nodes WHERE node = ANY(?) ORDER BY node FOR UPDATE", list(nodes))
        return {row.node: row for row in map(_lease, rows)}

    def _lock_node(self, node: NodeID) -> NodeLease:
        return _one(f"node {node}", list(self._lock_nodes(node).values()))

    def _lock_daemon(self, node: NodeID, epoch: int) -> NodeLease:
        row = self._lock_node(node)
        protocol.check_epoch(row, epoch)
        return row

    def _lock_owner(self, trajectory: TrajectoryID) -> OwnedTrajectory:
        return _one(f"trajectory {trajectory}", self._read_owners("WHERE trajectory = ? FOR UPDATE", trajectory))

    def _lock_intent(self, call: CallID) -> RecordedIntent:
        rows = self._read(f"SELECT {_INTENT} FROM {{}}.intents WHERE call = ? FOR UPDATE", call)
        return _one(f"irreversible call {call}", [_intent(row) for row in rows])

    def _read_owners(self, where: str, *values: str | list[TrajectoryID]) -> list[OwnedTrajectory]:
        return [_owner(row) for row in self._read(f"SELECT {_OWNER} FROM {{}}.owners {where}", *values)]

    def _write_lease(self, row: NodeLease) -> None:
        self._write(
            "UPDATE {}.nodes SET host = ?2, epoch = ?3, renewals = ?4, until_ns = ?5 WHERE node = ?1", _values(row)
        )

    def _write_owner(self, row: OwnedTrajectory) -> None:
        """The guard of the fence is the row's lock: no other transaction has changed it since it was read."""
        self._write(
            "UPDATE {}.owners SET node = ?2, epoch = ?3, fence = ?4, head = ?5, side_of = ?6 WHERE trajectory = ?1",
            _values(row),
        )

    def _write_intent(self, row: RecordedIntent) -> None:
        self._write("UPDATE {}.intents SET state = ?2 WHERE call = ?1", (row.call, str(row.state)))

    def _doubt_intents(self, trajectory: TrajectoryID) -> None:
        for row in self.intents(trajectory):
            doubted = protocol.doubt_intent(row)
            if doubted != row:
                self._write_intent(doubted)


def _values(row: NodeLease | OwnedTrajectory | RecordedIntent) -> tuple[object, ...]:
    """A record's fields, in their order, which is that of its table's columns."""
    match row:
        case NodeLease():
            return (row.node, row.host, row.epoch, row.renewals, row.until_ns)
        case OwnedTrajectory():
            return (row.trajectory, row.node, row.epoch, row.fence, row.head, row.side_of)
        case RecordedIntent():
            return (row.call, row.trajectory, row.fence, str(row.state), row.said)


def _lease(row: Row) -> NodeLease:
    return NodeLease(*row)


def _owner(row: Row) -> OwnedTrajectory:
    return OwnedTrajectory(*row)


def _intent(row: Row) -> RecordedIntent:
    call, trajectory, fence, state, said = row
    return RecordedIntent(call, trajectory, fence, IntentState(state), said)


def _one(what: str, found: list[_T]) -> _T:
    if not found:
        raise NotFound(f"the fleet has no {what}: look at `snapshotd fleet status`")
    return found[0]
