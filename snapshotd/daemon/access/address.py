"""The address at which the daemon listens for other machines."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from snapshotd.api.wire import LISTEN_PORT
from snapshotd.errors import UsageError


@dataclass(frozen=True, slots=True)
class ListenAddress:
    host: str
    """An IP address."""
    port: int
    has_tls: bool

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.has_tls else 'http'}://{host}:{self.port}"


def parse_listen(text: str) -> ListenAddress:
    """`HOST`, `HOST:PORT`, `[V6]:PORT`, or the same after `https://` or, on the loopback alone, `http://`. The host is an
    address of this machine: 0.0.0.0 and [::] are all. UsageError."""
    scheme, _, rest = text.rpartition("://")
    host, port = rest, str(LISTEN_PORT)
    if rest.startswith("["):
        host, _, after = rest[1:].partition("]")
        port = after.removeprefix(":") or port
    elif rest.count(":") == 1:
        host, port = rest.split(":")
    try:
        found = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
        number = int(port) if port.isascii() and port.isdigit() else -1
    except ValueError:
        found, number = None, -1
    if found is None or scheme not in ("", "http", "https") or not 0 <= number <= 65535:
        raise UsageError(
            f"{text[:80]!r} is no address to listen on; write an address of this machine and a port, such as 0.0.0.0:{LISTEN_PORT}"
        )
    if scheme == "http" and not found.is_loopback:
        raise UsageError(
            f"{text} would send tokens in plain through the network; without TLS the daemon listens on the loopback alone"
        )
    return ListenAddress(str(found), number, scheme != "http")


def open_listener(address: ListenAddress) -> socket.socket:
    """A listening socket. UsageError: it cannot be had."""
    from snapshotd.serving import bind  # commands that read an address serve nothing

    try:
        listener = bind(address.host, address.port)
    except OSError as exc:
        raise UsageError(f"{address} cannot be listened on: {exc.strerror or exc}; choose another address") from exc
    listener.setblocking(False)
    return listener
