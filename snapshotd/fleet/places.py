"""The places of forks: which nodes get how many of them. Pure: rooms in, blocks out.

A node is fit if its lease holds, it does not drain, and it has the abilities, the architecture, the memory, and fewer sandboxes that
start than it may. The home node, which has the files, is filled first; the rest goes in blocks of at least `LEAST_BLOCK`, so
that few nodes have to fetch the files. Each block goes to the best of `SAMPLE` fit nodes that were drawn by chance: the
best one of all would be everybody's choice at once (Mitzenmacher, "The Power of Two Choices", 2001).

Rooms are as old as the last renewal, so every block is reserved by a guarded update, and placed again if that fails.
Cost: a few draws for each block as long as a fair part of the nodes is fit; one look at all of them where hardly any is.
"""

from __future__ import annotations

import heapq
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from snapshotd.errors import Conflict, LimitExceeded
from snapshotd.fleet.base import NodeID
from snapshotd.terms import number_of

LEAST_BLOCK = 8
SAMPLE = 3
_DRAWS = 24
"""Draws before all nodes are looked at."""
_COLD = 1.0
"""Cost of fetching a snapshot's base, in the unit of a node whose processors are all promised."""


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """A node as placement sees it."""

    node: NodeID
    architecture: str = ""
    abilities: frozenset[str] = frozenset()
    cpus: float = 1.0
    promised_cpus: float = 0.0
    """Processors that its sandboxes have been given."""
    free_bytes: int = 0
    starting: int = 0
    starting_most: int = 0
    warm: frozenset[str] = frozenset()
    """Digests of bases whose files it has."""
    unpublished: int = 0
    """Snapshots that it has captured and not published: its lag."""
    lease_ns: int = 0
    """Left of its lease."""
    draining: bool = False
    address: str = ""
    """Where clients and other nodes reach it."""


@dataclass(frozen=True, slots=True)
class ForkNeed:
    """The need of each of several equal forks."""

    memory_bytes: int
    cpus: float = 1.0
    architecture: str = ""
    abilities: frozenset[str] = frozenset()
    base: str = ""
    """Digest of the files that it begins from."""
    home: NodeID | None = None
    """The node that has the snapshot's layers."""
    published: bool = True
    """False: only the home node can read the snapshot."""


@dataclass(frozen=True, slots=True)
class ForkBlock:
    """Forks that one node gets."""

    node: NodeID
    count: int
    reservation: str = ""


def capacity(room: NodeRoom, need: ForkNeed) -> int:
    """The number of forks that a node may take now; 0 if it is not fit."""
    fits = room.lease_ns > 0 and not room.draining and room.abilities >= need.abilities
    if not fits or need.architecture not in ("", room.architecture):
        return 0
    return max(0, min(room.free_bytes // max(1, need.memory_bytes), room.starting_most - room.starting))


def score(room: NodeRoom, need: ForkNeed) -> float:
    """The cost of a block on a node; the least is best."""
    warm = room.node == need.home or need.base in room.warm
    return (room.promised_cpus + need.cpus) / room.cpus + (0.0 if warm else _COLD)


class Roster:
    """The nodes as a caller knows them, with what it has placed since. Not thread-safe."""

    def __init__(self, rooms: Sequence[NodeRoom]) -> None:
        self._rooms = list(rooms)
        self._places = {room.node: place for place, room in enumerate(rooms)}

    def choose(self, need: ForkNeed, count: int, chance: random.Random) -> ForkBlock | None:
        """The next block of `count` forks; None: no node is fit. Changes nothing."""
        home = None if need.home is None else self._places.get(need.home)
        if home is not None and (most := capacity(self._rooms[home], need)):
            return ForkBlock(self._rooms[home].node, min(most, count))
        found = self._draw(need, min(count, LEAST_BLOCK), chance) if need.published else []
        if not found:
            return None
        best = min(found, key=lambda room: score(room, need))
        most = min(capacity(best, need), count)
        rest = count - most
        if 0 < rest < LEAST_BLOCK <= most - (LEAST_BLOCK - rest):
            most -= LEAST_BLOCK - rest  # else the last block would be a small one
        return ForkBlock(best.node, most)

    def place(
        self, need: ForkNeed, count: int, reserve: Callable[[ForkBlock], str], chance: random.Random
    ) -> list[ForkBlock]:
        """Reserve `count` forks. `reserve` returns a reservation's id, and raises Conflict where a room is not there any
        more. LimitExceeded: the fleet has no room; what was reserved by then runs out unused."""
        made: list[ForkBlock] = []
        missing = count
        while missing:
            block = self.choose(need, missing, chance)
            if block is None:
                where = (
                    "in the fleet" if need.published else f"on node {need.home}, which alone can read the snapshot yet"
                )
                raise LimitExceeded(
                    f"there is no room {where} for {number_of(missing, 'more fork')}: wait until others end, or add nodes"
                )
            place = self._places[block.node]
            try:
                made.append(replace(block, reservation=reserve(block)))
            except Conflict:
                self._rooms[place] = replace(self._rooms[place], starting_most=0)  # until it is read again
            else:
                missing -= block.count
                self._rooms[place] = _less(self._rooms[place], need, block.count)
        return made

    def _draw(self, need: ForkNeed, wanted: int, chance: random.Random) -> list[NodeRoom]:
        """Draw some nodes that have room for `wanted` forks; where hardly any has, return the roomiest ones."""
        fit: dict[NodeID, NodeRoom] = {}
        for _ in range(_DRAWS if self._rooms else 0):
            room = self._rooms[chance.randrange(len(self._rooms))]
            if capacity(room, need) >= wanted:
                fit[room.node] = room
                if len(fit) == SAMPLE:
                    break
        if fit:
            return list(fit.values())
        most = heapq.nlargest(SAMPLE, self._rooms, key=lambda room: min(wanted, capacity(room, need)))
        return [room for room in most if capacity(room, need)]


def _less(room: NodeRoom, need: ForkNeed, count: int) -> NodeRoom:
    return replace(
        room,
        free_bytes=room.free_bytes - count * need.memory_bytes,
        promised_cpus=room.promised_cpus + count * need.cpus,
        starting=room.starting + count,
        warm=room.warm | {need.base},
    )


# -- what a node says of itself ----------------------------------------------------------------------------------------


def _is_number(value: object, least: float = 0.0) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value < _MOST


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


_MOST = 1 << 62
_ADDRESS = re.compile(r"https?://[!-.0-?A-~]+/?")
_SAID: dict[str, Callable[[Any], bool]] = {
    "address": lambda value: isinstance(value, str) and (not value or _ADDRESS.fullmatch(value) is not None),
    "architecture": lambda value: isinstance(value, str),
    "abilities": _are_texts,
    "cpus": lambda value: _is_number(value, 1 / 1024),
    "promised_cpus": _is_number,
    "warm": _are_texts,
    "unpublished": lambda value: isinstance(value, int) and _is_number(value),
}
"""A node says this of itself. Each check is what can be true: another machine wrote it."""


def encode_room(room: NodeRoom) -> str:
    """A node's words about itself, as JSON; the rest stands in columns."""
    said = asdict(room)
    return json.dumps({name: sorted(said[name]) if isinstance(said[name], frozenset) else said[name] for name in _SAID})


def decode_room(
    said: str, node: str, lease_ns: int, draining: bool, free_bytes: int, starting: int, starting_most: int
) -> NodeRoom:
    """A room from its row. Unknown names of a newer version, and what cannot be, are left out."""
    try:
        words = json.loads(said)
    except (ValueError, RecursionError):
        words = None
    items = words.items() if isinstance(words, dict) else ()
    known: dict[str, Any] = {name: value for name, value in items if name in _SAID and _SAID[name](value)}
    for name in ("abilities", "warm"):
        known[name] = frozenset(known.get(name, ()))
    return NodeRoom(
        NodeID(node),
        free_bytes=free_bytes,
        starting=starting,
        starting_most=starting_most,
        lease_ns=lease_ns,
        draining=draining,
        **known,
    )
