"""The address that the server listens on: the loopback, or any with TLS, since keys and tokens go over it."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from snapshotd.errors import Conflict, NotPermitted, UsageError

CONNECTIONS_MAX = 4096
_BACKLOG = 512
HEAD_S = 10.0
"""Time for the head of a request, and for the handshake of TLS before it."""


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
        return _listen(self.host, self.port)

    def url(self, listener: socket.socket) -> str:
        """The address of the server behind a socket that listens."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.certificate is None else 'https'}://{host}:{listener.getsockname()[1]}"

    def serve(self, listener: socket.socket, app: ASGIApp, on_stop: Callable[[], object]) -> None:
        """Serve until a signal. `on_stop` is called before connections end."""
        config = uvicorn.Config(
            app,
            lifespan="on",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            http=_BoundedProtocol,
            ws="websockets-sansio",
            ws_per_message_deflate=False,
            limit_concurrency=CONNECTIONS_MAX,
            timeout_graceful_shutdown=1,
            ssl_certfile=self.certificate,
            ssl_keyfile=self.private_key,
        )
        _Server(config, on_stop).run(sockets=[listener])


class _BoundedProtocol(H11Protocol):
    """uvicorn's HTTP protocol that bounds the head of a request, which anybody may send: h11 its size, this its time."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._end_head()
        elif self._deadline is None:
            self._begin_head()

    def _begin_head(self) -> None:
        self._deadline = self.loop.call_later(HEAD_S, self.transport.abort)

    def _end_head(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_stop: Callable[[], object]) -> None:
        super().__init__(config)
        self._on_stop = on_stop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stop()
        await super().shutdown(sockets)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as exc:
        listener.close()
        raise Conflict(f"{host}:{port} cannot be listened on ({exc.strerror}); choose another address or port") from exc
    return listener
