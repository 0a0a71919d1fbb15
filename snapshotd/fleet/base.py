"""The fleet: many nodes (machines with one daemon each) that share one history in one database.

    node        holds a *lease* by the database's clock and renews it; by its own clock it knows when the lease is over
    owner       the one node that may move a trajectory's head, under a *fence* that each change of owner raises
    intent      an irreversible call, in the database before it runs
    collector   the one node that removes bytes, by a lease of its own

Promises, whatever node, message, disk or clock fails:

1. A trajectory has one head: published snapshots follow each other in one line.
2. An irreversible call runs at most once, unless a person says that it has not happened.
3. A published snapshot is readable: its bytes are durable before its row, and nothing that is pinned is removed.
4. A node has frozen its sandboxes before another one may take over a trajectory.
5. A snapshot that a node could not publish is not lost: it becomes a side branch when the node returns.

Promise 4 needs a clock that goes on while a machine is stopped. A virtual machine that is paused with its clock has a
sandbox that runs on afterwards until its daemon asks the database; promises 1, 3 and 5 hold there as well, since they
come from the fence alone.

Concurrency: every method of `Coordination` is one transaction, and may be called from any thread. Every change names
the epoch or fence that it goes on from. So a method whose answer is lost may be called again, and answers as if it had
been called once; a request that arrives late changes nothing. An answer of `renew` says nothing of a claim that was got
after the request was sent.
Errors: Conflict (the caller is no longer who it says: another incarnation, owner or fence), Undecided, NotFound,
Unavailable (the database does not answer; the last change may be made or not).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from snapshotd.types import CallID, SnapshotID, TrajectoryID

NodeID = NewType("NodeID", str)
SECOND_NS = 1_000_000_000
PUBLISH_WITHIN_NS = 6 * 3600 * SECOND_NS
"""Longest time from the look at what the repository still has of a snapshot's bytes to the commit of its row: a quarter of the
grace after which the repository deletes (`repo/fleet/base.py`)."""


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """How long a lease lasts, by the clock of whoever measures it."""

    ttl_ns: int = 20 * SECOND_NS
    renew_ns: int = 5 * SECOND_NS
    """A node renews so often: three renewals may fail."""
    margin_ns: int = 3 * SECOND_NS
    """A node freezes so long before its lease ends: for the freezing itself, and for two clocks that do not go equally
    fast."""


@dataclass(frozen=True, slots=True)
class NodeLease:
    """A node's row, as far as its lease goes."""

    node: NodeID
    host: str
    """The machine and its present boot. Two machines with one state directory (a copied disk) differ here."""
    epoch: int
    """The number of the node's daemon: each start draws a new one."""
    renewals: int
    """Grows with every registration and renewal, and never shrinks: a watcher sees whether the node lives."""
    until_ns: int
    """By the database's clock."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A writer's right to move one trajectory's head."""

    trajectory: TrajectoryID
    node: NodeID
    epoch: int
    fence: int


@dataclass(frozen=True, slots=True)
class OwnedTrajectory:
    """A trajectory's row."""

    trajectory: TrajectoryID
    node: NodeID | None
    """None: its owner has handed it over, and any node may take it."""
    epoch: int
    fence: int
    head: SnapshotID | None
    """The last published snapshot; None: none is."""
    side_of: TrajectoryID | None = None
    """The trajectory whose unpublished snapshots this side branch has."""


class IntentState(StrEnum):
    """The fate of an irreversible call, as the database knows it."""

    OPEN = "open"
    """Its owner runs it, or has run it and not published that."""
    BOUND = "bound"
    """A published snapshot has its outcome."""
    UNDECIDED = "undecided"
    """Its owner was replaced: a person has to say whether it has happened."""
    HAPPENED = "happened"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class RecordedIntent:
    call: CallID
    trajectory: TrajectoryID
    fence: int
    state: IntentState = IntentState.OPEN
    said: str = ""
    """The call's name, arguments and key, as JSON, for the node that takes the trajectory over."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """A node's row as another node has watched it: unchanged since `since_ns` by the watcher's own clock."""

    node: NodeID
    renewals: int
    since_ns: int


@dataclass(frozen=True, slots=True)
class Renewed:
    """The answer to a renewal."""

    lease: NodeLease
    owned: frozenset[Claim]
    """The trajectories that the node owns still: no other sandbox may go on."""
    late: tuple[NodeLease, ...]
    """Nodes that have missed a renewal, to be watched."""
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Taken:
    """A trajectory under its new owner: `interrupted` at its last published snapshot."""

    claim: Claim
    head: SnapshotID | None
    undecided: tuple[CallID, ...]
    """Irreversible calls that a person has to decide before the trajectory makes another."""


class Coordination(ABC):
    """The module's text holds for all methods."""

    # -- nodes ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def register(self, node: NodeID, host: str, after: int, *, seen: Sighting | None = None) -> Renewed:
        """Register a daemon that begins behind epoch `after` (`watch`; 0: the node is new). It gets a new epoch, under
        which the node owns what it owned. Conflict while another machine holds the node's lease; once that has run out
        (`seen`: as for `take_over`), this machine takes all of it over."""

    @abstractmethod
    def renew(self, node: NodeID, epoch: int) -> Renewed:
        """Prolong the lease, also one that has run out. Conflict when another daemon has registered as this node."""

    @abstractmethod
    def watch(self, node: NodeID) -> NodeLease:
        """A node's row now. NotFound."""

    # -- owners --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def own(self, trajectory: TrajectoryID, node: NodeID, epoch: int) -> Claim:
        """Become the first owner of a new trajectory. Conflict when it has one."""

    @abstractmethod
    def draw_fence(self, claim: Claim) -> Claim:
        """Get a new fence as the same owner: the earlier writer is refused from now on."""

    @abstractmethod
    def hand_over(self, claim: Claim) -> None:
        """Let any node take a trajectory whose sandbox has ended and whose snapshots are published."""

    @abstractmethod
    def owner(self, trajectory: TrajectoryID) -> OwnedTrajectory:
        """A trajectory's row now. NotFound."""

    @abstractmethod
    def take_over(self, row: OwnedTrajectory, node: NodeID, epoch: int, seen: Sighting | None = None) -> Taken:
        """Become the owner of a trajectory that was handed over, or whose owner's lease has run out: by the database's
        clock, and by the caller's own, which is what `seen` says. Its open intents become undecided. Conflict: the lease
        holds, or another has taken it since `row` was read."""

    @abstractmethod
    def publishing(
        self,
        claim: Claim,
        parent: SnapshotID | None,
        snapshot: SnapshotID,
        calls: Collection[CallID] = (),
        *,
        stored_ns: int | None = None,
    ) -> AbstractContextManager[bool]:
        """A transaction in which the caller writes the rows of a snapshot whose bytes are durable; at its end the head
        moves from `parent` to `snapshot`, and `calls` are bound. True: write them. False: they are there, from an earlier
        attempt. `stored_ns`: the database's time (`clock_ns`) before the repository published the bytes. Conflict: the head is
        another one, the claim is not the owner's, or the bytes were published more than `PUBLISH_WITHIN_NS` ago."""

    @abstractmethod
    def branch_off(self, lost: Claim, side: TrajectoryID, base: SnapshotID | None, node: NodeID, epoch: int) -> Claim:
        """Get a side branch for this node's unpublished snapshots, which follow `base`, when the node is no longer the
        owner by `lost`. Conflict: it is still the owner."""

    @abstractmethod
    def find_published(self, snapshots: Sequence[SnapshotID]) -> list[SnapshotID]:
        """The published ones of `snapshots`, in the same order."""

    @abstractmethod
    def clock_ns(self) -> int:
        """The database's time now."""

    # -- irreversible calls --------------------------------------------------------------------------------------------

    @abstractmethod
    def record_intent(self, claim: Claim, call: CallID, said: str = "") -> None:
        """Return when the intent is durable: the call may run if the lease still holds *then* (`HeldLease.may_act`).
        Undecided: the trajectory has undecided calls of an earlier owner."""

    @abstractmethod
    def intents(self, trajectory: TrajectoryID) -> list[RecordedIntent]:
        """The irreversible calls of a trajectory that no published snapshot of it has."""

    @abstractmethod
    def decide_intent(self, call: CallID, *, happened: bool) -> None:
        """Note a person's word on an undecided call. Conflict: it is not undecided. NotFound."""
