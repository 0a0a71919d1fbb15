"""The address that the server listens on: the loopback, or any with TLS, since keys and tokens go over it."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from starlette.types import ASGIApp

from snapshotd.errors import NotPermitted, UsageError
from snapshotd.serving import HttpServer, listen_on

CONNECTIONS_MAX = 4096


@dataclass(frozen=True, slots=True)
class WireAddress:
    """`certificate` and `private_key`: files of TLS, both or none."""

    host: str = "127.0.0.1"
    port: int = 0
    certificate: Path | None = None
    private_key: Path | None = None

    def check(self) -> None:
        """NotPermitted: another address than the loopback without TLS. UsageError: half a pair of files, or ones that TLS
        cannot use."""
        if (self.certificate is None) != (self.private_key is None):
            raise UsageError("TLS needs a certificate and its private key; give both, or neither")
        if self.certificate is not None and self.private_key is not None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.private_key)
            except (OSError, ssl.SSLError) as exc:
                raise UsageError(f"{self.certificate} and {self.private_key} cannot be used for TLS: {exc}") from exc
        elif not _is_loopback(self.host):
            raise NotPermitted(
                f"{self.host} is no loopback address, and keys would go over it in plain; give a certificate for TLS"
            )

    def listen(self) -> socket.socket:
        """A socket that listens there. Conflict: the address is taken; and the errors of `check`."""
        self.check()
        return listen_on(self.port, self.host)

    def url(self, listener: socket.socket) -> str:
        """The address of the server behind a socket that listens."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.certificate is None else 'https'}://{host}:{listener.getsockname()[1]}"

    def serve(self, listener: socket.socket, app: ASGIApp, on_stop: Callable[[], object]) -> None:
        """Serve until a signal. `on_stop` is called before connections end."""
        server = HttpServer(
            app,
            on_stop=on_stop,
            ws="websockets-sansio",
            ws_per_message_deflate=False,
            limit_concurrency=CONNECTIONS_MAX,
            ssl_certfile=self.certificate,
            ssl_keyfile=self.private_key,
        )
        server.run(sockets=[listener])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
