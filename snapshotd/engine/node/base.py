"""A daemon as a node of a fleet: what it adds to `fleet/base.py`, and the parts that it is made of.

    lease        the node's lease, renewed by a thread of its own; the trajectories that it owns (lease.py)
    freezer      stops every sandbox when the lease is over, and lets them go on when it is renewed (freezer.py)
    watchdog     a process that does the same when the daemon is dead or stopped (watchdog.py)
    publisher    makes stored snapshots known to the fleet
    takeover     brings another node's published history here, and moves unpublished snapshots to a side branch
    node         what follows from a renewal: sandboxes of lost trajectories end, a draining node hands over (node.py)

Order of events when a lease cannot be renewed: the freezer stops all sandboxes `margin_ns` before its end; nothing is
published and no irreversible call begins. After a renewal, sandboxes of trajectories that were taken over meanwhile end,
and only then do the others go on.
"""

from __future__ import annotations

from typing import Protocol

from snapshotd.types import Snapshot, TrajectoryID


class Publisher(Protocol):
    """Publishes this node's snapshots. Thread-safe. It publishes under the claims of `NodeRights.claim`, and asks
    `NodeRights.check_lease` before each attempt."""

    def start(self) -> None:
        """Begin to publish what is stored, in a thread of its own."""

    def hear_of_stored(self) -> None:
        """Snapshots were stored. Returns at once."""

    def lag(self) -> int:
        """The number of snapshots that are captured and not published."""

    def why_behind(self) -> str:
        """The reason why snapshots are not published; "" if there is none."""
        ...

    def is_published(self, snapshot: Snapshot) -> bool:
        """True if other nodes can read it, as far as this node has noted."""

    def catch_up(self) -> bool:
        """Have this node's index know what the others have published. True: something may be found now that was not."""
        ...

    def publish(self, trajectory: TrajectoryID, timeout_s: float) -> None:
        """Return when every snapshot so far of a trajectory is published. Unavailable: that takes longer; Conflict: the
        trajectory was taken over."""

    def close(self) -> None:
        """Idempotent."""
