"""The gateway's server: one thread accepts, one serves each connection, one watches for hang-ups."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Mapping

from snapshotd.errors import InternalError, SnapshotdError
from snapshotd.gateway.base import (
    BODY_LIMIT_BYTES,
    CONNECTION_LIMIT,
    NO_RETRY,
    REPLAY_LIMIT_BYTES,
    Budget,
    Gateway,
    GatewayHandler,
    ProviderKind,
    Timeouts,
    Upstream,
)
from snapshotd.gateway.dialect import error_body
from snapshotd.gateway.digest import DigestMemo
from snapshotd.gateway.exchange import Exchange, Settings
from snapshotd.gateway.forward import Forwarder, prepare
from snapshotd.gateway.peer import Gone, Peer, Refused
from snapshotd.gateway.routes import family
from snapshotd.gateway.tokens import Refusals
from snapshotd.gateway.watch import HangUpWatch
from snapshotd.kernel.listening import Listening

_LOG = logging.getLogger(__name__)
_BUSY = json.dumps(
    error_body(ProviderKind.OPENAI, 503, f"More than {CONNECTION_LIMIT} connections are open; close some.")
).encode()
_BUSY_ANSWER = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_BUSY), _BUSY)
)


class GatewayServer(Gateway):
    """Serves one sandbox from construction until `close`. See `base.py`.

    `listener` is a listening TCP socket; it belongs to the server from now on. `upstreams`: by `ProviderKind`; a missing
    one can be replayed only. `budget`: memory to share with other gateways. `capture_tokens`: ask for token ids
    and log probabilities. `digest_key`: secret that message digests
    depend on.
    """

    def __init__(
        self,
        listener: socket.socket,
        handler: GatewayHandler,
        upstreams: Mapping[str, Upstream],
        *,
        timeouts: Timeouts | None = None,
        body_limit_bytes: int = BODY_LIMIT_BYTES,
        replay_limit_bytes: int = REPLAY_LIMIT_BYTES,
        budget: Budget,
        digest_key: bytes = b"",
        capture_tokens: bool = False,
    ) -> None:
        self._port = int(listener.getsockname()[1])
        self._hang_ups = HangUpWatch()
        refusals = Refusals() if capture_tokens else None
        self._settings = Settings(
            handler, dict(upstreams), replay_limit_bytes, DigestMemo(digest_key), self._hang_ups, refusals
        )
        self._timeouts = timeouts or Timeouts()
        self._body_limit = body_limit_bytes
        self._budget = budget
        listener.settimeout(None)
        self._listening = Listening(
            listener,
            self._connect,
            threading.Event(),
            limit=CONNECTION_LIMIT,
            busy=_BUSY_ANSWER,
            name="gateway-accept",
            before=prepare,
        )

    @property
    def port(self) -> int:
        return self._port

    def close(self) -> None:
        if self._listening.close():
            self._hang_ups.close()

    def _connect(self, connected: socket.socket) -> _Connection:
        # Events of a stream must not wait for each other.
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return _Connection(self._settings, connected, self._budget, self._body_limit, self._timeouts)


class _Connection:
    """One connection."""

    name = "gateway"

    def __init__(
        self, settings: Settings, connected: socket.socket, budget: Budget, body_limit_bytes: int, timeouts: Timeouts
    ) -> None:
        self._settings = settings
        self._peer = Peer(connected, budget, body_limit_bytes)
        self._forwarder = Forwarder(timeouts)

    def run(self) -> None:
        """Answer requests until the peer closes, sends something malformed, or the server closes."""
        try:
            while self._answer_next():
                self._peer.release()
        except Refused as refused:
            self._refuse(refused)
        except Gone:
            pass  # the ordinary end

    def interrupt(self) -> None:
        """Cut it. Any thread; the connection must not be closed yet."""
        self._forwarder.abort("the gateway was closed")  # first: the peer's end of it looks as if the agent had hung up
        self._peer.interrupt()

    def close(self) -> None:
        self._forwarder.close()
        self._peer.close()

    def _answer_next(self) -> bool:
        request = self._peer.read_request()
        if request is None:
            return False
        exchange = Exchange(self._peer, self._forwarder, self._settings, request)
        try:
            exchange.run()
        except SnapshotdError as error:
            exchange.fail(error)
        except (Gone, Refused):
            raise
        except Exception:  # noqa: BLE001 - the top of a request: a defect in one must not end the others
            _LOG.exception("a request to the gateway for %s failed", request.path)
            exchange.fail(
                InternalError("The gateway failed in a request; the daemon's log has the details, please report them.")
            )
        return True

    def _refuse(self, refused: Refused) -> None:
        """Answer with the reason, and close: further data of the peer have no meaning."""
        provider = family("", self._peer.head)
        try:
            if not self._peer.answering:
                headers = () if refused.status == 503 else (NO_RETRY,)
                self._peer.answer(refused.status, error_body(provider, refused.status, refused.error.message), headers)
                self._peer.linger()
        except Gone:
            pass  # it does not want to know
