"""The coordination of a fleet in memory: the rules of `fleet.protocol` over dictionaries, by a clock that a test sets."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from snapshotd.errors import Conflict, NotFound
from snapshotd.fleet import protocol
from snapshotd.fleet.base import (
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
from snapshotd.types import CallID, SnapshotID, TrajectoryID


class MemoryCoordination(Coordination):
    def __init__(self, terms: LeaseTerms) -> None:
        self.terms = terms
        self.now_ns = 1_000_000_000_000
        self.nodes: dict[NodeID, NodeLease] = {}
        self.owners: dict[TrajectoryID, OwnedTrajectory] = {}
        self.calls: dict[CallID, RecordedIntent] = {}
        self.heads: set[SnapshotID] = set()

    def register(self, node: NodeID, host: str, after: int, *, seen: Sighting | None = None) -> Renewed:
        before = self.nodes.get(node)
        self.nodes[node] = now = protocol.register_node(before, node, host, after, self.now_ns, self.terms, seen)
        for row in list(self.owners.values()):
            if before is not None and row.node == node:
                self.owners[row.trajectory] = adopted = protocol.adopt_trajectory(row, before, now)
                if adopted.fence != row.fence:
                    self._doubt(row.trajectory)
        return self._renewed(now)

    def renew(self, node: NodeID, epoch: int) -> Renewed:
        self.nodes[node] = row = protocol.renew_lease(self.watch(node), epoch, self.now_ns, self.terms)
        return self._renewed(row)

    def watch(self, node: NodeID) -> NodeLease:
        if node not in self.nodes:
            raise NotFound(f"there is no node {node}")
        return self.nodes[node]

    def own(self, trajectory: TrajectoryID, node: NodeID, epoch: int) -> Claim:
        lease = self._daemon(node, epoch)
        row = self.owners.setdefault(trajectory, OwnedTrajectory(trajectory, lease.node, lease.epoch, 1, None))
        if (row.node, row.epoch, row.fence, row.head) != (node, epoch, 1, None):
            raise Conflict(f"trajectory {trajectory} has an owner")
        return Claim(trajectory, node, epoch, 1)

    def draw_fence(self, claim: Claim) -> Claim:
        self.owners[claim.trajectory] = row = protocol.raise_fence(self.owner(claim.trajectory), claim)
        return replace(claim, fence=row.fence)

    def owner(self, trajectory: TrajectoryID) -> OwnedTrajectory:
        if trajectory not in self.owners:
            raise NotFound(f"there is no trajectory {trajectory}")
        return self.owners[trajectory]

    def hand_over(self, claim: Claim) -> None:
        self.owners[claim.trajectory] = protocol.release_trajectory(self.owners[claim.trajectory], claim)

    def take_over(self, row: OwnedTrajectory, node: NodeID, epoch: int, seen: Sighting | None = None) -> Taken:
        before, taker = self.owner(row.trajectory), self._daemon(node, epoch)
        holder = None if before.node is None else self.nodes[before.node]
        taken = protocol.take_trajectory(before, row.fence, holder, taker, seen, self.now_ns)
        self.owners[row.trajectory] = taken
        if taken != before:
            self._doubt(row.trajectory)
        undecided = [one.call for one in self.intents(row.trajectory) if one.state is IntentState.UNDECIDED]
        return Taken(Claim(row.trajectory, node, epoch, taken.fence), taken.head, tuple(undecided))

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
        if snapshot in self.heads:
            yield False
            return
        row = protocol.move_head(self.owners[claim.trajectory], claim, parent, snapshot)
        yield True
        protocol.check_in_time(snapshot, stored_ns, self.now_ns)
        self.owners[claim.trajectory] = row
        self.heads.add(snapshot)
        for call in calls:
            self.calls[call] = protocol.bind_intent(self.calls[call], claim.trajectory)

    def branch_off(self, lost: Claim, side: TrajectoryID, base: SnapshotID | None, node: NodeID, epoch: int) -> Claim:
        lease = self._daemon(node, epoch)
        if side not in self.owners:
            self.owners[side] = protocol.branch_trajectory(self.owners[lost.trajectory], lost, lease, side, base)
        return Claim(side, node, epoch, self.owners[side].fence)

    def find_published(self, snapshots: Sequence[SnapshotID]) -> list[SnapshotID]:
        return [one for one in snapshots if one in self.heads]

    def clock_ns(self) -> int:
        return self.now_ns

    def record_intent(self, claim: Claim, call: CallID, said: str = "") -> None:
        others = [one for one in self.intents(claim.trajectory) if one.call != call]
        made = protocol.open_intent(self.owners[claim.trajectory], claim, call, others)
        if self.calls.setdefault(call, made) != made:
            raise Conflict(f"irreversible call {call} has begun before")

    def intents(self, trajectory: TrajectoryID) -> list[RecordedIntent]:
        unbound = [one for one in self.calls.values() if one.state is not IntentState.BOUND]
        return [one for one in unbound if one.trajectory == trajectory]

    def decide_intent(self, call: CallID, *, happened: bool) -> None:
        self.calls[call] = protocol.decide(self.calls[call], happened=happened)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _daemon(self, node: NodeID, epoch: int) -> NodeLease:
        row = self.watch(node)
        protocol.check_epoch(row, epoch)
        return row

    def _doubt(self, trajectory: TrajectoryID) -> None:
        self.calls |= {one.call: protocol.doubt_intent(one) for one in self.intents(trajectory)}

    def _renewed(self, row: NodeLease) -> Renewed:
        claims = (protocol.claim_of(one) for one in self.owners.values())
        owned = frozenset(one for one in claims if one is not None and one.node == row.node)
        late = [one for one in self.nodes.values() if one.until_ns < protocol.late_before(self.now_ns, self.terms)]
        return Renewed(row, owned, tuple(late))
