"""Bounds on what callers from other machines may take of the daemon. The users of its socket never wait for them.

The numbers: a handshake takes 1 ms of a processor, a connection that is refused before it 30 µs. So `ACCEPTS_PER_S` and
`ADDRESS_PER_S` hold a flood from one address to a twentieth of the event loop, and one from many to a third.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from ipaddress import IPv6Address, ip_address

CONNECTIONS_MAX = 512
"""Connections from all addresses together, handshakes included."""
ADDRESS_MAX = 256
"""Connections from one address, and connections with one token."""
ACCEPTS_PER_S = 1000.0
"""Connections that are looked at at all. More wait in the kernel."""
ADDRESS_PER_S, ADDRESS_BURST = 100.0, 600.0
"""New connections from one address. More are closed."""
TOKEN_PER_S, TOKEN_BURST = 200.0, 600.0
"""Requests with one token. More are answered with 429."""
HANDSHAKE_S = 10.0
HEAD_S = 10.0
"""Time for the head of a request ..."""
HEAD_MAX_BYTES = 32 << 10
"""... and its size."""
BODY_S = 60.0
"""Time for a body that is read whole. The bodies of uploads and conversations take as long as they take."""
SILENCE_S = 600.0
"""A connection whose other end takes nothing that was sent for so long is cut."""
_REMEMBERED = 4096
"""Addresses and tokens. One that is forgotten has its burst again."""


class Pace:
    """Events per second, with a burst. Not thread-safe."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._left, self._at = burst, time.monotonic()

    def take(self) -> float:
        """Count one more event, and return 0. Where it may not happen yet: count nothing, and return the seconds until it may."""
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1:
            return (1 - self._left) / self._per_s
        self._left -= 1
        return 0.0


class Shares:
    """For each of many keys: how much of it is open, and how fast more comes. Not thread-safe."""

    def __init__(self, most: int, per_s: float, burst: float) -> None:
        self._most, self._per_s, self._burst = most, per_s, burst
        self._open: dict[str, int] = {}
        self._paces: OrderedDict[str, Pace] = OrderedDict()

    def enter(self, key: str) -> bool:
        """Open one more under this key, until `leave`. False: the key has its share already."""
        pace = self._paces.get(key)
        if pace is None:
            pace = self._paces[key] = Pace(self._per_s, self._burst)
            if len(self._paces) > _REMEMBERED:
                self._paces.popitem(last=False)
        self._paces.move_to_end(key)
        if self._open.get(key, 0) >= self._most or pace.take():
            return False
        self._open[key] = self._open.get(key, 0) + 1
        return True

    def leave(self, key: str) -> None:
        self._open[key] -= 1
        if not self._open[key]:
            del self._open[key]


def share_of(address: str) -> str:
    """The key of an address: the network that one host has, as a whole."""
    found = ip_address(address.partition("%")[0])
    if isinstance(found, IPv6Address):
        return str(found.ipv4_mapped or IPv6Address(int(found) >> 64 << 64))
    return str(found)
