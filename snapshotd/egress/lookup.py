"""Addresses of names: looked up with the host's own resolver, and checked before anything connects to them.

The name that is checked is the one that is looked up, and the address that is checked the one that is connected to:
between the two nobody is asked again (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from snapshotd.egress.base import NotAllowed
from snapshotd.network import Address, HostRules, is_public

_KEPT_S, _FAILURE_KEPT_S = 60.0, 5.0
"""The resolver of the C library does not say for how long an answer is good."""
_MOST_KEPT = 4096
_THREADS = 8
MOST_WAITING = 64
"""Lookups under way. More fail at once: a name server that does not answer must not hold everything up."""
_DEADLINE_S = 15.0

Found = tuple[Address, ...]


def plain(text: str) -> Address:
    """An address; one that stands for an IPv4 address in IPv6 (`::ffff:127.0.0.1`) is that. ValueError."""
    if "%" in text:
        raise ValueError("a zone is part of no address here")
    address = ipaddress.ip_address(text)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def is_own(address: Address) -> bool:
    """True if it is an address of this machine: the kernel would send from where it sends to."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
            probe.connect((str(address), 9))
            return plain(probe.getsockname()[0].partition("%")[0]) == address
    except OSError:
        return False  # it cannot be reached at all


def reachable(found: Iterable[Address], rules: HostRules, port: int) -> Found:
    """The addresses of a name that may be connected to. NotAllowed: there are some, and none may."""
    found = tuple(found)
    allowed = tuple(address for address in found if _may_reach(address, rules, port))
    if found and not allowed:
        raise NotAllowed(
            f"its address {found[0]} is private, or this machine's own, or denied: a rule would have to name the address itself"
        )
    return allowed


def _may_reach(address: Address, rules: HostRules, port: int) -> bool:
    if rules.denies_address(address, port):
        return False
    own = is_own(address)
    return (is_public(address) and not own) or rules.names_range(address, port, own=own)


def ask_host(name: str) -> Found:
    """The addresses of a name, of the host's resolver; none if there is no such name. OSError: it does not answer."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except socket.gaierror as exc:
        if exc.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
            return ()
        raise
    return tuple(dict.fromkeys(plain(str(place[4][0]).partition("%")[0]) for place in found))


class Lookups:
    """Looks names up, and remembers what it has found for a minute."""

    def __init__(self, ask: Callable[[str], Found] = ask_host) -> None:
        self._ask = ask
        self._threads = ThreadPoolExecutor(_THREADS, "lookup")
        self._kept: OrderedDict[str, tuple[float, Found]] = OrderedDict()
        self._running: dict[str, asyncio.Future[Found]] = {}

    async def find(self, name: str) -> Found:
        """The addresses of a name; none: there is no such name. OSError: that cannot be found out now."""
        until, found = self._kept.get(name, (0.0, ()))
        if time.monotonic() < until:
            return found
        running = self._running.get(name)
        if running is None:
            if len(self._running) >= MOST_WAITING:
                raise OSError("too many names are looked up at once")
            running = self._running[name] = asyncio.get_running_loop().run_in_executor(self._threads, self._ask, name)
            running.add_done_callback(lambda done: self._keep(name, done))
        async with asyncio.timeout(_DEADLINE_S):
            return await asyncio.shield(running)

    def _keep(self, name: str, done: asyncio.Future[Found]) -> None:
        del self._running[name]
        if done.cancelled() or done.exception() is not None:
            return
        found = done.result()
        self._kept[name] = time.monotonic() + (_KEPT_S if found else _FAILURE_KEPT_S), found
        self._kept.move_to_end(name)
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
