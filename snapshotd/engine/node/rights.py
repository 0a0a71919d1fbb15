"""The trajectories that this daemon's node owns, and what follows for the engine. See `base.py`."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snapshotd.engine.node.lease import LeaseKeeper
from snapshotd.engine.ownership import Ownership
from snapshotd.errors import Conflict, NotFound
from snapshotd.fleet.base import SECOND_NS, Claim, OwnedTrajectory, Renewed, Taken
from snapshotd.fleet.places import NodeRoom
from snapshotd.fleet.protocol import claim_of
from snapshotd.kernel.holding.members import Members
from snapshotd.types import CallID, JournalEntry, TrajectoryID, short

_AT_ONCE = 1000
"""Trajectories that are owned in one transaction, which holds the node's row meanwhile."""
_ANEW_S = 1.0
"""Time in which many readers that miss something ask once."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeParts:
    """The daemon's other parts, as its rights need them."""

    room: Callable[[], NodeRoom]
    end_lost: Callable[[Sequence[TrajectoryID]], object]
    """End the sandboxes of trajectories that were taken over; they may be frozen."""
    renewed: Callable[[], object]
    """Told after every renewal; returns at once."""
    take_over: Callable[[OwnedTrajectory, Taken], object]
    """Bring the history of a trajectory that this node owns from now on."""
    catch_up: Callable[[], bool]
    """See `Ownership`."""


class NodeRights(Ownership):
    """See the module's text."""

    def __init__(self, lease: LeaseKeeper, local: Callable[[], Iterable[TrajectoryID]]) -> None:
        """`local`: all trajectories in this node's catalog."""
        self.lease, self._local = lease, local
        self._lock = threading.Lock()
        self._taking = threading.Lock()
        """One trajectory is taken over at a time; the lease is renewed meanwhile."""
        self._claims: dict[TrajectoryID, Claim] = {}
        self._new: set[TrajectoryID] = set()
        self._elsewhere: dict[TrajectoryID, OwnedTrajectory] = {}
        self._lost: list[TrajectoryID] = []
        self._given_up: set[TrajectoryID] = set()
        """Trajectories that are being removed from the fleet."""
        self._incomplete: set[TrajectoryID] = set()
        """Trajectories that were taken over, and whose histories are not here yet."""
        self._catching_up, self._caught_up_at = threading.Lock(), 0.0
        self._parts: NodeParts | None = None

    def attend(self, parts: NodeParts) -> None:
        """Take the daemon's other parts, which exist now, and tell the fleet the node's room."""
        self._parts = parts
        self.lease.hurry(renew=True)

    # -- the engine's questions ----------------------------------------------------------------------------------------

    def hold(self, members: Members) -> Members:
        return self.lease.hold(members)

    def add_new(self, trajectories: Iterable[TrajectoryID]) -> None:
        """See `Ownership`. The database knows of them a moment later."""
        with self._lock:
            self._new.update(trajectories)
        self.lease.hurry()

    def check_lease(self) -> None:
        self.lease.check()

    def check_start(self) -> None:
        self.lease.check()
        if self.lease.draining:
            raise self._drains()

    def check(self, trajectory: TrajectoryID) -> None:
        """See `Ownership`. A trajectory that was handed over, so that nobody owns it, is taken."""
        self.lease.check()
        if self._knows(trajectory):
            return
        if trajectory not in self._incomplete:
            try:
                self.claim(trajectory)
            except Conflict:
                if self._elsewhere[trajectory].node is not None:
                    raise
            else:
                return
        self.take_over(trajectory)

    def take_over(self, trajectory: TrajectoryID) -> None:
        """See `Ownership`. If the history cannot be brought, this node owns the trajectory, and the next call goes on."""
        self.lease.check()
        with self._taking:
            if self._knows(trajectory):
                return
            with self.lease.turn():
                row = self._own([trajectory])[trajectory]
                if self._own_claim(row) is not None and trajectory not in self._incomplete:
                    return
                taken = self._take(row)
            assert self._parts is not None
            self._parts.take_over(row, taken)
            with self._lock:
                self._incomplete.discard(trajectory)

    def note_incomplete(self, trajectories: Iterable[TrajectoryID]) -> None:
        """Note trajectories whose histories are not here: an earlier daemon took them over and was killed, or the state
        directory is new."""
        with self._lock:
            self._incomplete.update(trajectories)

    def record_intent(self, trajectory: TrajectoryID, entry: JournalEntry) -> None:
        self.lease.check()
        said = {"name": entry.name, "arguments": entry.arguments, "key": entry.key}
        self.lease.fleet.record_intent(self.claim(trajectory), entry.id, json.dumps(said))

    def confirm_intent(self, call: CallID) -> None:
        self.lease.check()

    def decide_intents(self, decided: Mapping[CallID, bool]) -> None:
        for call, happened in decided.items():
            try:
                self.lease.fleet.decide_intent(call, happened=happened)
            except (NotFound, Conflict) as exc:  # it ran before the daemon was a node, or was decided before
                _log.info("the fleet has nothing to decide: %s", exc.message)

    def catch_up(self) -> bool:
        if self._parts is None:
            return False
        with self._catching_up:
            if time.monotonic() - self._caught_up_at > _ANEW_S:
                if not self._parts.catch_up():
                    return False
                self._caught_up_at = time.monotonic()
        return True

    # -- what the node owns --------------------------------------------------------------------------------------------

    def claim(self, trajectory: TrajectoryID) -> Claim:
        """The node's right to move a trajectory's head. Conflict: another node has it; Unavailable."""
        with self.lease.turn():
            with self._lock:
                known = self._claims.get(trajectory)
            if known is not None:
                return known
            row = self._own([trajectory])[trajectory]
            claim = self._own_claim(row)
            if claim is None:
                raise self._refusal(row)
            return claim

    def claims(self) -> dict[TrajectoryID, Claim]:
        """All that the node owns, as of its last renewal and what it has claimed since."""
        with self._lock:
            return dict(self._claims)

    def elsewhere(self) -> list[OwnedTrajectory]:
        """The trajectories in this node's catalog that other nodes own, as far as this one knows."""
        with self._lock:
            return list(self._elsewhere.values())

    def hand_over(self, trajectory: TrajectoryID) -> None:
        """Let any node take a trajectory, whose sandbox has ended and whose snapshots are published. Conflict,
        Unavailable."""
        with self.lease.turn():
            self.lease.fleet.hand_over(self.claim(trajectory))
            row = self.lease.fleet.owner(trajectory)
            with self._lock:
                self._claims.pop(trajectory, None)
                self._elsewhere[trajectory] = row

    def give_up(self, trajectories: Sequence[TrajectoryID]) -> None:
        """See `shared.Claims`."""
        with self._lock:
            self._given_up.update(trajectories)
            for one in trajectories:
                self._claims.pop(one, None)
                self._new.discard(one)

    def keep(self, trajectories: Sequence[TrajectoryID]) -> None:
        """See `shared.Claims`. The next renewal says of each whether it is this node's still."""
        with self._lock:
            self._given_up.difference_update(trajectories)

    def branch_off(self, row: OwnedTrajectory, lost: Claim, side: TrajectoryID) -> Claim:
        """Own the side branch `side` of a trajectory that was taken over, which begins at its published head as of `row`.
        Conflict, Unavailable."""
        with self.lease.turn():
            claim = self.lease.fleet.branch_off(lost, side, row.head, self.lease.facts.node, self.lease.epoch())
            with self._lock:
                self._claims[side] = claim
                self._new.discard(side)
            return claim

    def status(self) -> dict[str, Any]:
        """Facts for `daemon --status`."""
        return {**self.lease.status(), "owned_count": len(self._claims)}

    # -- what the lease asks and tells ---------------------------------------------------------------------------------

    def room(self) -> NodeRoom | None:
        """See `LeaseListener`."""
        return None if self._parts is None else self._parts.room()

    def take_answer(self, renewed: Renewed, *, first: bool) -> None:
        """See `LeaseListener`."""
        owned = {claim.trajectory: claim for claim in renewed.owned}
        with self._lock:
            self._given_up &= owned.keys()
            owned = {one: claim for one, claim in owned.items() if one not in self._given_up}
            self._lost += [one for one, claim in self._claims.items() if owned.get(one) != claim]
            self._claims = owned
            lost = list(self._lost)
        if not first:
            self._own(lost)
            return
        local = set(self._local())
        self.note_incomplete(owned.keys() - local)  # this state directory is an empty one: the node's disk was lost
        self._own([one for one in local if one not in owned])

    def tell_new(self) -> None:
        """See `LeaseListener`."""
        with self._lock:
            new = sorted(self._new)
        self._own(new)
        if self._parts is not None:
            self._parts.renewed()

    def end_lost(self) -> None:
        """See `LeaseListener`."""
        with self._lock:
            lost, self._lost = self._lost, []
        if lost and self._parts is not None:
            self._parts.end_lost(lost)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _knows(self, trajectory: TrajectoryID) -> bool:
        with self._lock:
            known = trajectory in self._claims or trajectory in self._new
            return known and trajectory not in self._incomplete

    def _own(self, trajectories: Sequence[TrajectoryID]) -> dict[TrajectoryID, OwnedTrajectory]:
        """Own those that nobody owns; the rows of all."""
        found: dict[TrajectoryID, OwnedTrajectory] = {}
        with self.lease.turn():
            for start in range(0, len(trajectories), _AT_ONCE):
                some = trajectories[start : start + _AT_ONCE]
                rows = self.lease.fleet.own_new(some, self.lease.facts.node, self.lease.epoch())
                found |= {row.trajectory: row for row in rows}
            with self._lock:
                for one, row in found.items():
                    claim = self._own_claim(row)
                    self._new.discard(one)
                    if claim is None:
                        self._elsewhere[one] = row
                    else:
                        self._claims[one] = claim
                        self._elsewhere.pop(one, None)
        return found

    def _own_claim(self, row: OwnedTrajectory) -> Claim | None:
        """This daemon's claim; None: the row is another's."""
        claim = claim_of(row)
        mine = (self.lease.facts.node, self.lease.epoch())
        return claim if claim is not None and (claim.node, claim.epoch) == mine else None

    def _take(self, row: OwnedTrajectory) -> Taken:
        """Become the owner. Conflict: the present one has not lost its lease, as far as this node has watched."""
        if self.lease.draining:
            raise self._drains()
        own = row.node in (None, self.lease.facts.node)
        seen = None if row.node is None else self.lease.find_expired(row.node)
        if not own and seen is None:
            raise self._refusal(row)
        with self._lock:
            self._incomplete.add(row.trajectory)
        taken = self.lease.fleet.take_over(row, self.lease.facts.node, self.lease.epoch(), seen)
        with self._lock:
            self._claims[row.trajectory] = taken.claim
            self._elsewhere.pop(row.trajectory, None)
        _log.info("trajectory %s was taken over from node %s", row.trajectory, row.node or "none")
        return taken

    def _drains(self) -> Conflict:
        node = self.lease.facts.node
        return Conflict(
            f"node {node} drains, so no sandbox begins there: use another node, or end that (`snapshotd fleet drain --end {node}`)"
        )

    def _refusal(self, row: OwnedTrajectory) -> Conflict:
        name, fleet = short(row.trajectory), self.lease.fleet
        if row.node is None:
            return Conflict(
                f"trajectory {name} was handed over and has no owner: take it here with `snapshotd resume {name}`"
            )
        room = next((one for one in fleet.rooms() if one.node == row.node), None)
        address = "" if room is None else room.address
        at = f" ({address})" if address else ""
        if room is not None and room.lease_ns <= 0:
            return Conflict(
                f"trajectory {name} is owned by node {row.node}{at}, whose lease has run out: `snapshotd resume {name}` takes it over once "
                f"this node has watched that for {fleet.terms.ttl_ns // SECOND_NS} s; try again then, or fork a snapshot of it"
            )
        there = f"run the command there (SNAPSHOTD_HOST={address})" if address else "run the command on that node"
        return Conflict(
            f"trajectory {name} is owned by node {row.node}{at}: {there}, or fork a snapshot of it here, or drain that node"
        )
