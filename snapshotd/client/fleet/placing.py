"""The places of a driver's forks: reserved by the fleet's roster, or found again by a token."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from snapshotd.client.client import Snapshotd
from snapshotd.client.fleet.base import KnownNodes
from snapshotd.client.results import SnapshotInfo
from snapshotd.errors import Conflict, LimitExceeded, NotFound
from snapshotd.fleet.base import NodeID
from snapshotd.fleet.places import ForkBlock, ForkNeed, Roster, capacity

_PLANS = "snapshotd/fleet"
"""Namespace of the plans, in the store of values of a snapshot's home node."""
_PLAN_KEPT_S = 24 * 3600.0
"""As long as a daemon keeps the keys of requests."""


class ForkPlaces:
    """Where the forks of one snapshot go."""

    def __init__(
        self,
        nodes: KnownNodes,
        snapshot: SnapshotInfo,
        home: NodeID,
        need: ForkNeed,
        per_node: int | None,
        group: Any = None,
    ) -> None:
        """`group`: a placement group of Ray, whose nodes alone get any; None: all may."""
        self._nodes, self.snapshot, self.home, self.group = nodes, snapshot, home, group
        self._need, self._per_node = need, per_node
        self._only = None if group is None else nodes.within(group)

    def place(self, count: int, without: Collection[NodeID] = ()) -> list[ForkBlock]:
        """Blocks for so many forks, home first. `without`: nodes that have failed. LimitExceeded: there is no room."""
        if len(self._nodes.names()) == 1 and not without and self._only is None:
            return [ForkBlock(self.home, count)]  # its daemon alone knows what it can take
        rooms = [
            room
            for room in self._nodes.rooms()
            if room.node not in without and (self._only is None or room.node in self._only)
        ]
        if self._per_node is not None:
            rooms = [replace(room, starting=0, starting_most=self._per_node) for room in rooms]
        if not rooms:
            raise LimitExceeded("no node of the fleet answers, so nothing can be forked: start their daemons")
        need = replace(self._need, home=self.home, published=self._nodes.is_published(self.snapshot))
        at_home = sum(capacity(room, need) for room in rooms if room.node == self.home)
        if not need.published and at_home < count:
            self._nodes.publish(self.snapshot, self.home)
            need = replace(need, published=True)
        return Roster(rooms).place(
            need, count, lambda block: self._nodes.reserve(block, need.memory_bytes), random.Random()
        )

    def place_once(self, count: int, token: str) -> list[ForkBlock]:
        """As `place`, and the same blocks for whoever comes with the same token within a day. Conflict: it was for another
        number of forks, or for another snapshot."""
        client = self._nodes.client(self.home)
        found = _find_plan(client, token)
        if found is None:
            blocks = self.place(count)
            plan = {"snapshot": self.snapshot.id, "blocks": [[block.node, block.count] for block in blocks]}
            try:
                client.put_value(_PLANS, token, plan, ttl_s=_PLAN_KEPT_S, expected_version=0)
                return blocks
            except Conflict:
                found = _find_plan(client, token)
        snapshot, planned = found or ("", ())
        if snapshot != self.snapshot.id or sum(block.count for block in planned) != count:
            raise Conflict(f"the token {token!r} was used for other forks; give each request a token of its own")
        return list(planned)


def _find_plan(client: Snapshotd, token: str) -> tuple[str, Sequence[ForkBlock]] | None:
    try:
        plan = client.get_value(_PLANS, token).value
    except NotFound:
        return None
    return plan["snapshot"], [ForkBlock(NodeID(node), count) for node, count in plan["blocks"]]
