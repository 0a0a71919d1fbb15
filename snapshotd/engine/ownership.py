"""The right of this daemon to act for a trajectory. A daemon that is alone has it always; a node of a fleet has it for what
it owns, as long as its lease holds (engine/node).

Every method of `Ownership` is cheap where nothing is refused: it asks the fleet's database at most for a trajectory that this
daemon did not know before, and for an irreversible call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from snapshotd.kernel.holding.members import Members
from snapshotd.types import CallID, JournalEntry, TrajectoryID


class Ownership:
    """The rights of a daemon that is alone: nothing is refused. Thread-safe, as all subclasses are."""

    def add_new(self, trajectories: Iterable[TrajectoryID]) -> None:
        """Take trajectories that were just made here for this daemon's."""

    def check_lease(self) -> None:
        """Check that the node's lease holds. Unavailable: it is over, so nothing may run until it is renewed."""

    def check_start(self) -> None:
        """Check that a sandbox may begin. Conflict: the node drains; else as `check_lease`."""

    def check(self, trajectory: TrajectoryID) -> None:
        """Check that something may run in a trajectory's sandbox. Conflict, with the name and address of the node that owns it;
        Unavailable: this node's lease is over, or the owner is not known."""

    def take_over(self, trajectory: TrajectoryID) -> None:
        """Own a trajectory that is to be resumed, if its owner has handed it over or has lost its lease. Else as `check`."""

    def record_intent(self, trajectory: TrajectoryID, entry: JournalEntry) -> None:
        """Tell the fleet of an irreversible call before it runs, and return when the fleet knows of it. Conflict, Undecided,
        Unavailable: it must not run."""

    def confirm_intent(self, call: CallID) -> None:
        """Check, as the last thing before an irreversible call runs, that the lease holds. Unavailable: it has run out."""

    def decide_intents(self, decided: Mapping[CallID, bool]) -> None:
        """Tell the fleet what a person has said of calls: whether they happened. Not an error for calls that it does not know."""

    def catch_up(self) -> bool:
        """Learn what other nodes have stored or moved, because something stored was not found. True: look again."""
        return False

    def hold(self, members: Members) -> Members:
        """The processes of a sandbox, as the engine is to freeze and thaw them from now on."""
        return members


ALONE = Ownership()
