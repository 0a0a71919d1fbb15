"""The rules of leases and fences, as functions from rows to rows: no clock, no database, no thread.

A database reads the rows for update, applies the function, and writes what it returns, in one transaction
(`base.Coordination`). Times are nanoseconds: `now_ns` of a row's functions by the database's clock, those of `HeldLease`
and `Sighting` by the node's own, which goes on while the machine sleeps (CLOCK_BOOTTIME).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from snapshotd.errors import Conflict, Undecided
from snapshotd.fleet.base import (
    PUBLISH_WITHIN_NS,
    SECOND_NS,
    Claim,
    IntentState,
    LeaseTerms,
    NodeID,
    NodeLease,
    OwnedTrajectory,
    RecordedIntent,
    Sighting,
)
from snapshotd.types import CallID, SnapshotID, TrajectoryID, short

FORGOTTEN = ""
"""The host of a node that was forgotten. No machine is called so."""

# -- a node, by its own clock ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A node's lease as the node knows it."""

    epoch: int
    freeze_at_ns: int

    def may_act(self, now_ns: int) -> bool:
        """True while sandboxes may run and calls may begin. Ask after the database has answered, immediately before the
        act."""
        return now_ns < self.freeze_at_ns


def hold_lease(epoch: int, sent_ns: int, terms: LeaseTerms) -> HeldLease:
    """The lease after a renewal that was sent at `sent_ns`: the database counts from a later moment, so this one ends
    first, however long the answer took."""
    return HeldLease(epoch, sent_ns + terms.ttl_ns - terms.margin_ns)


def watch_node(row: NodeLease, seen: Sighting | None, now_ns: int) -> Sighting:
    """The sighting after a look at the row that was answered at `now_ns`: the old one if nothing has changed."""
    if seen is not None and (seen.node, seen.renewals) == (row.node, row.renewals):
        return seen
    return Sighting(row.node, row.renewals, now_ns)


def has_run_out(seen: Sighting, now_ns: int, terms: LeaseTerms) -> bool:
    """True if the node has not renewed for a whole lease, by the watcher's clock. So a jump of the database's clock
    ends no lease."""
    return now_ns - seen.since_ns >= terms.ttl_ns


# -- a node's row ------------------------------------------------------------------------------------------------------


def register_node(
    row: NodeLease | None,
    node: NodeID,
    host: str,
    after: int,
    now_ns: int,
    terms: LeaseTerms,
    seen: Sighting | None = None,
) -> NodeLease:
    """The row when a daemon begins. The same machine in the same boot takes it at once, since a state directory has one
    daemon; another machine waits until the lease has run out."""
    if row is None and after == 0:
        return NodeLease(node, host, 1, 1, now_ns + terms.ttl_ns)
    if row is not None and (row.epoch, row.host) == (after + 1, host):
        return row  # the answer was lost
    if row is None or row.epoch != after:
        raise Conflict(f"another daemon has registered as node {node}: stop one, or give it a node of its own")
    if row.host not in (host, FORGOTTEN):
        try:
            check_run_out(row, seen, now_ns)
        except Conflict as exc:
            raise Conflict(
                f"{exc.message}; if another machine is that node, give this one a name of its own (SNAPSHOTD_NODE)"
            ) from None
    return replace(row, host=host, epoch=row.epoch + 1, renewals=row.renewals + 1, until_ns=now_ns + terms.ttl_ns)


def renew_lease(row: NodeLease, epoch: int, now_ns: int, terms: LeaseTerms) -> NodeLease:
    """The row after a renewal."""
    check_epoch(row, epoch)
    return replace(row, renewals=row.renewals + 1, until_ns=now_ns + terms.ttl_ns)


def late_before(now_ns: int, terms: LeaseTerms) -> int:
    """A lease that ends before this moment has missed a renewal: others begin to watch its node."""
    return now_ns + terms.ttl_ns - 2 * terms.renew_ns


def check_epoch(row: NodeLease, epoch: int) -> None:
    """Conflict unless the daemon is the node's latest."""
    if row.host == FORGOTTEN:
        raise Conflict(
            f"node {row.node} was forgotten (`snapshotd fleet forget`): restart its daemon, which registers anew"
        )
    if row.epoch < epoch:
        raise Conflict(
            f"the database knows daemon {row.epoch} of node {row.node} and not daemon {epoch}: it has gone back to an earlier state, so "
            "restart this daemon"
        )
    if row.epoch != epoch:
        raise Conflict(
            f"daemon {epoch} of node {row.node} was replaced by daemon {row.epoch}: stop this one, or give it a node of its own"
        )


def check_run_out(row: NodeLease, seen: Sighting | None, now_ns: int) -> None:
    """Conflict unless a lease has run out by the database's clock, and nothing has changed since the caller began to
    watch it, which is a whole lease ago (`has_run_out`)."""
    if now_ns < row.until_ns:
        left = (row.until_ns - now_ns) // SECOND_NS + 1
        raise Conflict(f"node {row.node} holds its lease for {left} s more: wait for its end, or drain the node")
    if seen is None or (seen.node, seen.renewals) != (row.node, row.renewals):
        raise Conflict(f"node {row.node} has renewed its lease since it was watched: watch it for a whole lease first")


# -- a trajectory's row ------------------------------------------------------------------------------------------------


def claim_of(row: OwnedTrajectory) -> Claim | None:
    """The right of the present owner; None: it was handed over."""
    return None if row.node is None else Claim(row.trajectory, row.node, row.epoch, row.fence)


def check_claim(row: OwnedTrajectory, claim: Claim) -> None:
    """Conflict unless the claim is the owner's latest."""
    if claim_of(row) != claim:
        raise Conflict(
            f"trajectory {short(row.trajectory)} was taken over from node {claim.node} (fence {claim.fence}, now {row.fence}): its "
            "unpublished snapshots become a side branch"
        )


def adopt_trajectory(row: OwnedTrajectory, before: NodeLease, now: NodeLease) -> OwnedTrajectory:
    """The row of a trajectory of the node whose daemon has just registered. On another machine its sandboxes are not
    there, so that is another owner: its fence is a new one, and open intents are to be doubted."""
    fence = row.fence if before.host == now.host else row.fence + 1
    return replace(row, epoch=now.epoch, fence=fence)


def raise_fence(row: OwnedTrajectory, claim: Claim) -> OwnedTrajectory:
    """The row after a new writer of the same owner."""
    raised = replace(claim, fence=claim.fence + 1)
    if claim_of(row) == raised:
        return row  # the answer was lost
    check_claim(row, claim)
    return replace(row, fence=raised.fence)


def release_trajectory(row: OwnedTrajectory, claim: Claim) -> OwnedTrajectory:
    """The row after its owner has handed it over."""
    check_claim(row, claim)
    return replace(row, node=None)


def take_trajectory(
    row: OwnedTrajectory, after: int, holder: NodeLease | None, taker: NodeLease, seen: Sighting | None, now_ns: int
) -> OwnedTrajectory:
    """The row under its new owner, who has read it with fence `after`. `holder`: the row of the node that owns it; None:
    it was handed over. A node that takes its own is a new writer."""
    taken = replace(row, node=taker.node, epoch=taker.epoch, fence=after + 1)
    if row == taken:
        return row  # the answer was lost
    if row.fence != after:
        raise Conflict(f"trajectory {short(row.trajectory)} was taken over by node {row.node} meanwhile: ask that one")
    if holder is not None and holder != taker:
        check_run_out(holder, seen, now_ns)
    return taken


def move_head(row: OwnedTrajectory, claim: Claim, parent: SnapshotID | None, snapshot: SnapshotID) -> OwnedTrajectory:
    """The row after a publication."""
    check_claim(row, claim)
    if row.head != parent:
        raise Conflict(
            f"the published head of trajectory {short(row.trajectory)} is {_show(row.head)} and not {_show(parent)}: publish what is "
            "between them first"
        )
    return replace(row, head=snapshot)


def check_in_time(snapshot: SnapshotID, stored_ns: int | None, now_ns: int) -> None:
    """Conflict when a snapshot's bytes were published so long ago that the repository may have begun to delete them."""
    if stored_ns is not None and now_ns - stored_ns > PUBLISH_WITHIN_NS:
        raise Conflict(
            f"the bytes of snapshot {short(snapshot)} were published {(now_ns - stored_ns) // SECOND_NS} s ago and its row was not, so "
            "they may be deleted: publish them again first"
        )


def branch_trajectory(
    row: OwnedTrajectory, lost: Claim, lease: NodeLease, side: TrajectoryID, base: SnapshotID | None
) -> OwnedTrajectory:
    """The row of a new side branch, which the node of `lease` owns."""
    if claim_of(row) == lost:
        raise Conflict(f"node {lost.node} owns trajectory {short(row.trajectory)} still: publish its snapshots there")
    return OwnedTrajectory(side, lease.node, lease.epoch, 1, base, side_of=row.trajectory)


def _show(snapshot: SnapshotID | None) -> str:
    return "none" if snapshot is None else short(snapshot)


# -- the rows of irreversible calls ------------------------------------------------------------------------------------


def open_intent(row: OwnedTrajectory, claim: Claim, call: CallID, others: Iterable[RecordedIntent]) -> RecordedIntent:
    """The row of a call that is about to run. `others`: the trajectory's other intents."""
    check_claim(row, claim)
    waiting = [one.call for one in others if one.state is IntentState.UNDECIDED]
    if waiting:
        raise Undecided(
            f"irreversible call {short(waiting[0])} of trajectory {short(row.trajectory)} began on a node that was replaced and may have "
            "happened: say whether it has before another one runs"
        )
    return RecordedIntent(call, claim.trajectory, claim.fence)


def doubt_intent(row: RecordedIntent) -> RecordedIntent:
    """The row after its owner was replaced."""
    return replace(row, state=IntentState.UNDECIDED) if row.state is IntentState.OPEN else row


def bind_intent(row: RecordedIntent, trajectory: TrajectoryID) -> RecordedIntent:
    """The row after a snapshot with the call's outcome was published. In a side branch it proves that the call has
    happened."""
    if trajectory == row.trajectory:
        return replace(row, state=IntentState.BOUND)
    return replace(row, state=IntentState.HAPPENED)


def decide(row: RecordedIntent, *, happened: bool) -> RecordedIntent:
    """The row after a person's word."""
    wanted = IntentState.HAPPENED if happened else IntentState.NEVER
    if row.state is wanted:
        return row
    if row.state is not IntentState.UNDECIDED:
        raise Conflict(f"irreversible call {short(row.call)} is {row.state} and not undecided: there is nothing to say")
    return replace(row, state=wanted)
