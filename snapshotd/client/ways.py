"""The ways to a daemon: its socket on this machine, TLS with a token, or the user's ssh. Modules for another machine are
imported when one is named."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from snapshotd.api.wire import check_socket_path
from snapshotd.client.exchange import unreachable
from snapshotd.client.links import ByteLink, Links
from snapshotd.errors import SnapshotdError, UsageError


class Way(Protocol):
    """How one daemon is reached."""

    place: str
    """Where it is, for people."""
    is_here: bool
    """It is on this machine, so paths mean the same to it."""

    async def connect(self, links: Links) -> ByteLink:
        """A connection that nothing was sent over. OSError; SnapshotdError: this is not the daemon that was meant."""

    def sign(self, head: bytes) -> bytes:
        """A request's first bytes, with what the daemon knows the caller by."""

    def connect_error(self, exc: OSError) -> SnapshotdError:
        """The error that a failure to connect is."""


class SocketWay:
    """A daemon of this machine."""

    is_here = True

    def __init__(self, socket_path: Path) -> None:
        """UsageError: the path is too long for a socket."""
        check_socket_path(socket_path)
        self.socket_path, self.place = socket_path, str(socket_path)

    async def connect(self, links: Links) -> ByteLink:
        return await links.connect(self.place)

    def sign(self, head: bytes) -> bytes:
        return head

    def connect_error(self, exc: OSError) -> SnapshotdError:
        return unreachable(exc, self.socket_path)


def way_to(host: str, token: str | None = None, pin: str | None = None, ca: str | None = None) -> Way:
    """The way to `https://HOST[:PORT]`, `http://` on the loopback, `ssh://[USER@]HOST[:PORT][/SOCKET]` or `unix://SOCKET`.
    `token`, `pin` (a certificate's fingerprint), `ca` (a file): where they are not given, what `snapshotd login` has kept.
    UsageError."""
    if host.startswith("unix://"):
        return SocketWay(Path(host.removeprefix("unix://")))
    if host.startswith("ssh://"):
        from snapshotd.client.remote.ssh import SshWay

        return SshWay(host)
    if host.startswith(("https://", "http://")):
        from snapshotd.client.remote.tls import TlsWay

        return TlsWay(host, token, pin, ca)
    raise UsageError(
        f"{host[:80]!r} is no place of a daemon; write https://HOST:PORT, ssh://USER@HOST, or unix:// and the path of a socket"
    )
