"""The nodes of a fleet, as a driver (the program that uses them) knows them.

There are four ways to know nodes: this machine's daemon, a list of addresses, the fleet's database, and a Ray cluster. `Fleet`
is the same over each of them.

Concurrency: every method may be called from any thread.
Errors: DaemonUnavailable (the node does not answer), and those of its client.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from snapshotd.errors import UsageError
from snapshotd.fleet.base import NodeID
from snapshotd.fleet.places import ForkBlock, NodeRoom

if TYPE_CHECKING:
    from snapshotd.client.client import Snapshotd
    from snapshotd.client.fleet.branch import Branch
    from snapshotd.client.results import SnapshotInfo

R = TypeVar("R")


class KnownNodes(ABC):
    """The module's text holds for all methods."""

    @abstractmethod
    def names(self) -> list[NodeID]:
        """All nodes; those that do not answer, too."""

    @abstractmethod
    def client(self, node: NodeID) -> Snapshotd:
        """A client of a node's daemon. Asks nothing of it. NotFound: there is no such node. NotPermitted: this user has no login
        for the address that the fleet names."""

    @abstractmethod
    def rooms(self) -> list[NodeRoom]:
        """The nodes that answer, with their room now."""

    def reserve(self, block: ForkBlock, memory_bytes: int) -> str:
        """A reservation's id, or "" where room is not reserved. Conflict: the room is not there any more."""
        return ""

    def end_reservation(self, block: ForkBlock) -> None:
        """Give back what was reserved for a block, whose forks run. Not an error when it has run out."""
        return

    def home(self, snapshot: SnapshotInfo, answered: NodeID) -> NodeID:
        """The node that has the files of a snapshot; `answered` knows it, too."""
        return answered

    def is_published(self, snapshot: SnapshotInfo) -> bool:
        """True if other nodes than its home can get a snapshot."""
        return True

    def publish(self, snapshot: SnapshotInfo, home: NodeID) -> None:
        """Return when they can. Conflict, Unavailable."""
        self.client(home).flush(snapshot.trajectory, published=True)

    def within(self, group: Any) -> Collection[NodeID]:
        """The nodes of a placement group of Ray. UsageError: these are no nodes of Ray's; LimitExceeded: it is not placed yet."""
        raise UsageError('a placement group is one of Ray, and this fleet is not: open it with Fleet.open("ray")')

    def bind(self, branches: Iterable[Branch], group: Any) -> None:
        """Functions of these branches run within a placement group of Ray from now on. None: anywhere on their nodes."""
        return

    def run(self, function: Callable[[Branch], R], branch: Branch, token: str | None) -> R:
        """The result of a function of a branch. Its error is raised. `token`: what it asks for is made once under this
        name. DaemonUnavailable: the place where it ran went away."""
        return function(branch)

    def close(self) -> None:
        """Let go of what was opened."""
        return
