"""A branch: a sandbox on one of a fleet's nodes."""

from __future__ import annotations

from typing import Any

from snapshotd.client.client import Snapshotd
from snapshotd.client.remote.logins import find_login
from snapshotd.client.results import TrajectoryInfo
from snapshotd.client.sandbox import Sandbox
from snapshotd.client.transport import Transport
from snapshotd.client.ways import SocketWay, way_to
from snapshotd.errors import NotPermitted
from snapshotd.fleet.base import NodeID


class Branch(Sandbox):
    """A `Sandbox` on the node `node`: `exec`, `files` and all else are those of a sandbox.

    It can be pickled: whoever unpickles it reaches the same sandbox, over the same address with the login of its own user.
    """

    def __init__(self, client: Snapshotd, info: TrajectoryInfo, node: NodeID) -> None:
        super().__init__(client, info)
        self.node, self.began_at = node, info.head
        self._used = False

    @property
    def _verbs(self) -> Any:
        """The client with coroutines. Its taker may change the sandbox."""
        self._used = True
        return self.__dict__["_verbs"]

    @_verbs.setter
    def _verbs(self, verbs: Any) -> None:
        self.__dict__["_verbs"] = verbs

    @property
    def files(self) -> Any:
        self._used = True
        return self.__dict__["files"]

    @files.setter
    def files(self, files: Any) -> None:
        self.__dict__["files"] = files

    @property
    def is_fresh(self) -> bool:
        """Nothing was asked of it yet by this object, so a fork of `began_at` is as good."""
        return not self._used

    def move_to(self, other: Branch) -> None:
        """Be another branch from now on."""
        self.__dict__.update(other.__dict__)

    def __reduce__(self) -> Any:
        return reopen, (place_of(self._client), self.id, self.node)

    def __repr__(self) -> str:
        return f"<Branch {self.id[:12]} on {self.node}>"


def place_of(client: Snapshotd) -> str:
    """The place of a client's daemon, for `client_of`."""
    way = client._transport.way
    return f"unix://{way.place}" if isinstance(way, SocketWay) else way.place


def client_of(place: str) -> Snapshotd:
    """A client of the daemon at a place that somebody else has named: a token of the environment is not for it. NotPermitted:
    this user has no login for an address."""
    if place.startswith("ray:"):
        from snapshotd.client.fleet.ray import client_through

        return client_through(place)
    way = way_to(place)
    if place.startswith(("https://", "http://")) and find_login(way.place).token is None:
        raise NotPermitted(
            f"there is no login for {way.place}, which a fleet has named: run `snapshotd login {way.place}` if that is a node of it; "
            "tokens that were given for other addresses are not sent there"
        )
    return Snapshotd._over(Transport(way))


def reopen(place: str, trajectory: str, node: NodeID) -> Branch:
    """A pickled branch. DaemonUnavailable, NotFound, NotPermitted."""
    client = client_of(place)
    return Branch(client, client.trajectory(trajectory), node)
