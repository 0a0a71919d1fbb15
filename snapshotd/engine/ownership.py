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
        """These trajectories were just made here: they are this daemon's."""

    def check_lease(self) -> None:
        """Unavailable: the node's lease is over, so nothing may run until it is renewed."""

    def check_start(self) -> None:
        """Before a sandbox begins. As `check_lease`; Conflict: the node drains."""

    def check(self, trajectory: TrajectoryID) -> None:
        """Before anything runs in a trajectory's sandbox. Conflict: another node owns it, whose name and address are told;
        Unavailable: the node's lease is over, or nobody can tell who owns it."""

    def take_over(self, trajectory: TrajectoryID) -> None:
        """Before a trajectory is resumed: own it, if its owner has handed it over, or has lost its lease. Else as `check`."""

    def record_intent(self, trajectory: TrajectoryID, entry: JournalEntry) -> None:
        """Before an irreversible call runs: returns when the fleet knows of it. Conflict, Undecided, Unavailable: it must not
        run."""

    def confirm_intent(self, call: CallID) -> None:
        """As the last thing before an irreversible call runs. Unavailable: the lease has run out meanwhile."""

    def decide_intents(self, decided: Mapping[CallID, bool]) -> None:
        """A person has said of calls whether they have happened. Not an error for those that the fleet does not know."""

    def catch_up(self) -> bool:
        """Something that is stored was not found: learn what other nodes have stored, or moved. True: look again."""
        return False

    def hold(self, members: Members) -> Members:
        """The processes of a sandbox, as the engine is to freeze and thaw them from now on."""
        return members


ALONE = Ownership()
