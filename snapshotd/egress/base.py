"""The way out of one sandbox: the specification.

    sandbox's network namespace          namespace of the way out           host's network
    eth0 198.18.0.2, default route ────► egress 198.18.0.1                  the proxy's own connections ──► Internet
                                         every address is local: sockets
                                         of the proxy, and nothing else

The namespace in the middle has two links: one to the sandbox, and its loopback. It takes every IPv4 address for its own,
so a packet of the sandbox ends there, wherever it was sent: at a socket of the proxy, or, where none listens, with the
kernel's refusal. There is nothing to go around: no route, no IPv6 address, no forwarding. The sandbox has no right over
its own link (no CAP_NET_ADMIN, no CAP_NET_RAW), and none over the namespace in the middle.

**Names.** Whatever server the sandbox asks, the proxy answers. It looks up an allowed name with the host's resolver, and
gives the sandbox an address of `POOL` that stands for the name. A name that is not allowed does not exist, and no server
is asked for it. So the address of a connection says which name is meant, for any protocol.

**Connections.** The proxy knows the name, looks it up itself, and connects to what it has found and checked (`lookup.py`).
The client's first words must agree: the server name of TLS (`hello.py`), the host of every HTTP request (`web.py`).
`PROXY_PORT` is an HTTP proxy for programs that want one; what goes through a tunnel of it is checked alike.

**Rights.** The daemon makes namespace, links and listening sockets (`places.py`) and hands them to the proxy
(`main.py`, started by `proxy.py`), a process without any rights: a user of its own, no capability, no writing. It reads the bytes of both
sides, so everything in it has a bound.

**Life.** The proxy ends when the sandbox's init ends, or when nobody holds the other end of its control socket any more:
the daemon, and the keeper, so a sandbox that outlives the daemon keeps its way out. The namespace ends with the last
socket in it. Without a proxy nothing is reached.

**Control**, a socket of packets, JSON in each:
    daemon to proxy     {"rules": [...], "ports": [...]} and a listening socket for each port, the sockets for names with
                        the first one: {"names": true, "watch": true or false}
                        {"report": true}
    proxy to daemon     {"applied": number of rules}; {"refused": sentence}; {"version": VERSION, "ports": [...]}, as a report
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from snapshotd.network import Address

VERSION = 1
"""Version of the control socket's messages: a later daemon starts the proxies of an earlier one anew."""
SANDBOX_LINK, LINK = "eth0", "egress"
SANDBOX_ADDRESS, OWN_ADDRESS, PREFIX = "198.18.0.2", "198.18.0.1", 30
"""Addresses of the network for tests of devices (RFC 2544), which belongs neither to the Internet nor to anybody."""
POOL = ipaddress.IPv4Network("198.18.0.0/15")
POOL_FIRST = 256
"""Addresses of the pool before this one are the links'."""
NAMES_PORT, PROXY_PORT = 53, 3128
MESSAGE_MAX_BYTES = 131_072
DESCRIPTORS_MAX = 80
MOST_CONNECTIONS = 1000
"""At once, of one sandbox."""
HEAD_DEADLINE_S = 15.0
"""For what a client has to say before it is known what it wants: a request's head, a TLS hello."""
MOST_PIECES = 256
"""In which that may come: a client that sends it byte by byte would have all of it looked at for each."""
ANSWER_DEADLINE_S = 60.0
"""For a server's answer to a TLS hello."""
CONNECT_DEADLINE_S = 10.0
IDLE_DEADLINE_S = 3600.0
"""A connection in which nothing was said for so long ends."""
CHUNK_BYTES = 262_144
REFUSAL_MAX = 300
"""Characters of a sentence about what was refused."""


class NotAllowed(Exception):  # noqa: N818 - it is the answer to a sandbox, no error of ours
    """A connection or a name is not allowed: why, in printable ASCII; and what, if that is not what was asked for."""

    def __init__(self, reason: str, what: object = "") -> None:
        super().__init__(reason)
        self.reason, self._what = reason, what

    def sentence(self, asked: object) -> str:
        """For a person. `asked`: what was asked for."""
        return f"{self._what or asked}: {self.reason}"


@dataclass(frozen=True, slots=True)
class HostTarget:
    """The place that a client wants: a name (`clean_name`), or an address that no name stands for; and a port."""

    name: str | None
    address: Address | None
    port: int

    def __str__(self) -> str:
        return f"{self.name or self.address}:{self.port}"


def printable(text: str, most: int = 120) -> str:
    """A hostile text as a person may read it: printable ASCII, and not long."""
    clean = text if text.isascii() and text.isprintable() else ascii(text)[1:-1]
    return clean if len(clean) <= most else f"{clean[:most]}..."
