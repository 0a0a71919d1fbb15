"""The namespace of the way out, its links, and the sockets in it: made by the daemon, which has the rights for it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterable
from typing import TypeVar

from snapshotd.egress import sightings
from snapshotd.egress.answering import IP_PKTINFO
from snapshotd.egress.base import LINK, NAMES_PORT, OWN_ADDRESS, PREFIX, PROXY_PORT, SANDBOX_ADDRESS, SANDBOX_LINK
from snapshotd.kernel.namespaces import in_open_network_namespace, new_network_namespace
from snapshotd.kernel.net import links

_BACKLOG = 1024
_NO_PING = "/proc/sys/net/ipv4/icmp_echo_ignore_all"

T = TypeVar("T")


class LinkedNamespace:
    """The namespace of one sandbox's way out. `close` lets go of it; it ends with the last socket in it."""

    def __init__(self, fd: int) -> None:
        """Takes over the descriptor."""
        self.fd = fd

    @classmethod
    def make(cls, sandbox: int) -> LinkedNamespace:
        """A new one, linked with the network namespace of a sandbox, in the place of any earlier one. OSError."""
        place = cls(new_network_namespace())
        try:
            in_open_network_namespace(sandbox, lambda: links.delete(SANDBOX_LINK))
            place.inside(lambda: _link(sandbox))
            in_open_network_namespace(sandbox, _set_up_sandbox)
        except BaseException:
            place.close()
            raise
        return place

    def inside(self, action: Callable[[], T]) -> T:
        """Do something in the namespace."""
        return in_open_network_namespace(self.fd, action)

    def name_sockets(self) -> list[socket.socket]:
        """The sockets for questions (datagrams, connections), and the one that watches, where the kernel has such."""
        return self.inside(_name_sockets)

    def listeners(self, ports: Iterable[int]) -> list[socket.socket]:
        """A listening socket for each port, on every address."""
        return self.inside(lambda: [_listener(port) for port in ports])

    def close(self) -> None:
        os.close(self.fd)


def _link(sandbox: int) -> None:
    links.bring_up("lo")
    links.add_pair(LINK, SANDBOX_LINK, sandbox)
    links.add_address(LINK, OWN_ADDRESS, PREFIX)
    links.bring_up(LINK)
    links.take_all_addresses()
    with contextlib.suppress(OSError), open(_NO_PING, "w") as setting:  # an answer would be a lie, and nothing else
        setting.write("1")


def _set_up_sandbox() -> None:
    links.bring_up("lo")
    links.add_address(SANDBOX_LINK, SANDBOX_ADDRESS, PREFIX)
    links.bring_up(SANDBOX_LINK)
    links.add_default_route(OWN_ADDRESS)


def _name_sockets() -> list[socket.socket]:
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    datagrams.setsockopt(socket.IPPROTO_IP, IP_PKTINFO, 1)
    datagrams.bind(("", NAMES_PORT))
    sockets = [datagrams, _listener(NAMES_PORT)]
    with contextlib.suppress(OSError):
        sockets.append(sightings.open_watch(LINK))
    return sockets


def _listener(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((OWN_ADDRESS if port == PROXY_PORT else "", port))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
