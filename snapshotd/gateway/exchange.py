"""One request and its answer: refused, replayed, passed through, or a live turn."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from snapshotd.errors import LimitExceeded, SnapshotdError
from snapshotd.gateway import json_body, routes
from snapshotd.gateway.base import (
    NO_RETRY,
    ForwardedTurn,
    GatewayHandler,
    ProviderKind,
    RecordedReply,
    ReplyContent,
    TurnReply,
    TurnRequest,
    Upstream,
)
from snapshotd.gateway.dialect import Dialect, error_body
from snapshotd.gateway.digest import DigestMemo
from snapshotd.gateway.forward import Cut, Forwarder, Reply, UpstreamFailed
from snapshotd.gateway.peer import Gone, HttpRequest, Peer
from snapshotd.gateway.recording import Recording
from snapshotd.gateway.tokens import REFUSALS, Refusals, TokenCapture, TokenFilter, capture_of
from snapshotd.gateway.watch import HangUpWatch

HUNG_UP = "the agent hung up"
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that all exchanges of a gateway share."""

    handler: GatewayHandler
    upstreams: Mapping[str, Upstream]
    replay_limit_bytes: int
    memo: DigestMemo
    hang_ups: HangUpWatch
    refusals: Refusals | None = None
    """With it, tokens are captured."""


class Exchange:
    """Answers one request. `Gone` from any method: the connection is over (at times because the answer has to be
    cut)."""

    def __init__(self, peer: Peer, forwarder: Forwarder, settings: Settings, request: HttpRequest) -> None:
        self._peer = peer
        self._forwarder = forwarder
        self._settings = settings
        self._http = request
        self.provider = routes.family(request.path, request.headers)
        """The provider whose error format is used."""

    def run(self) -> None:
        """Answer. Raises SnapshotdError, Gone, or Refused (the memory is used up)."""
        route = routes.find(self._http)
        if (self._http.header(b"upgrade") or b"").lower() == b"websocket":
            self._refuse_upgrade()
        elif route is None:
            message = f"The gateway does not answer {self._http.method} {self._http.path[:200]}; docs/gateway.md lists what it does."
            self._peer.answer(404, error_body(self.provider, 404, message))
        elif route.dialect is None:
            self._pass_through(route.provider)
        else:
            self._turn(route.dialect, route.said)

    def _refuse_upgrade(self) -> None:
        """A client that prefers WebSockets goes on over HTTP at once; after another status it tries again for
        seconds."""
        message = "The gateway speaks HTTP/1.1 and no WebSockets; send the request with POST."
        headers = (NO_RETRY, ("upgrade", "HTTP/1.1"), ("connection", "upgrade"))
        self._peer.answer(426, error_body(self.provider, 426, message), headers)

    def fail(self, error: SnapshotdError) -> None:
        """Tell the agent about an error of ours; if it got half an answer already, cut that. May raise Gone."""
        if self._peer.answering:
            raise Gone
        self._peer.answer(error.http_status, error_body(self.provider, error.http_status, error.message))

    def _pass_through(self, provider: ProviderKind) -> None:
        try:
            with self._watch(), self._send(provider, self._http) as reply:
                self._peer.start(reply.status, reply.headers, reply.length)
                for piece in reply.pieces:
                    self._peer.send(piece)
                self._peer.end()
        except UpstreamFailed as failed:
            self._tell(failed)
        except Cut as cut:
            raise Gone from cut

    def _turn(self, dialect: Dialect, said: Mapping[str, Any]) -> None:
        request, http = self._read(dialect, said)
        turn = self._settings.handler.turn(request)
        if isinstance(turn, RecordedReply):
            self._replay(turn)
            return
        started_at_ns, started_ns = time.time_ns(), time.monotonic_ns()
        capture = self._capture(request, http.body)
        sent = _once(turn.sent)
        try:
            with self._watch(), self._ask(request, dialect.provider, capture, http, sent) as reply:
                sent()
                limit = self._settings.replay_limit_bytes
                recording = Recording(dialect, request, reply.status, reply.content_type, limit)
                started = started_at_ns, started_ns
                _LiveReply(self._peer, self._forwarder, turn, reply, recording, capture, started).pass_on()
        except UpstreamFailed as failed:
            sent()
            spent_ns = time.monotonic_ns() - started_ns
            lost = TurnReply(failed.status, ReplyContent(), False, failed.message, "", None, 0, started_at_ns, spent_ns)
            turn.replied(lost)
            self._tell(failed)

    def _read(self, dialect: Dialect, said: Mapping[str, Any]) -> tuple[TurnRequest, HttpRequest]:
        """The request, and the form in which the provider gets it. `said`: fields that its path says."""
        body = self._http.body
        values = json_body.count_values(body)
        if values > json_body.NODE_LIMIT:
            raise LimitExceeded(
                f"The request's body holds more than {json_body.NODE_LIMIT} JSON values; send fewer messages."
            )
        self._peer.reserve(values * json_body.NODE_BYTES)
        fields = json_body.parse_object(body)
        request = dialect.read_request({**fields, **said}, len(body), self._settings.memo)
        upstream = self._settings.upstreams.get(dialect.provider)
        if upstream is None or upstream.model in (None, request.model):
            return request, self._http
        self._peer.reserve(len(body))
        return replace(request, sent_as=upstream.model), dialect.for_model(self._http, fields, upstream.model)

    def _replay(self, recorded: RecordedReply) -> None:
        if recorded.error is not None:
            self._peer.answer(recorded.status, error_body(self.provider, recorded.status, recorded.error))
            return
        headers = [
            (name.encode(), value.encode())
            for name, value in (("content-type", recorded.content_type), *recorded.headers)
        ]
        streamed = recorded.content_type.startswith("text/event-stream")
        if recorded.complete and not streamed:
            self._peer.whole(recorded.status, headers, recorded.body)
            return
        self._peer.start(recorded.status, headers, None)
        self._peer.send(recorded.body)
        if not recorded.complete:
            raise Gone
        self._peer.end()

    def _capture(self, request: TurnRequest, body: bytes) -> TokenCapture | None:
        refusals = self._settings.refusals
        if refusals is None:
            return None
        return capture_of(request.api, body, refusals.level(request.api, request.model))

    @contextmanager
    def _ask(
        self,
        request: TurnRequest,
        provider: ProviderKind,
        capture: TokenCapture | None,
        http: HttpRequest,
        sent: Callable[[], None],
    ) -> Iterator[Reply]:
        """Ask the provider, and yield its reply. One that refuses the fields for the tokens is asked again with less."""
        if capture is None:
            with self._send(provider, http, sent) as reply:
                yield reply
            return
        refused = False
        while True:
            asking = replace(http, body=capture.body()) if capture.added else http
            with self._send(provider, asking, sent) as reply:
                if reply.status not in REFUSALS or not capture.give_up_fields():
                    if refused and reply.status not in REFUSALS:
                        self._remember(request, capture)
                    yield reply
                    return
                refused = True

    def _remember(self, request: TurnRequest, capture: TokenCapture) -> None:
        refusals = self._settings.refusals
        if refusals is not None and refusals.remember(request.api, request.model, capture.level):
            names = ", ".join(capture.record.get("refused", ()))
            _LOG.warning("the provider of %s refuses %s, so its replies are recorded without", request.model, names)

    def _send(
        self, provider: ProviderKind, http: HttpRequest, sent: Callable[[], None] = lambda: None
    ) -> AbstractContextManager[Reply]:
        upstream = self._settings.upstreams.get(provider)
        if upstream is None:
            raise UpstreamFailed(
                404, f"No provider is configured for requests in the manner of {provider}; configure one in the daemon."
            )
        return self._forwarder.send(provider, upstream, http, sent)

    def _watch(self) -> AbstractContextManager[None]:
        return self._settings.hang_ups.watch(self._peer.fd, lambda: self._forwarder.abort(HUNG_UP))

    def _tell(self, failed: UpstreamFailed) -> None:
        """Tell the agent that the provider gave no answer. Clients may try again, unless nothing is configured."""
        headers = (NO_RETRY,) if failed.status == 404 else ()
        self._peer.answer(failed.status, error_body(self.provider, failed.status, failed.message), headers)


def _once(act: Callable[[], None]) -> Callable[[], None]:
    """Calls `act` at the first call."""
    left = [act]

    def call() -> None:
        if left:
            left.pop()()

    return call


class _LiveReply:
    """A provider's reply on its way to the agent and, before its end, to its turn."""

    def __init__(
        self,
        peer: Peer,
        forwarder: Forwarder,
        turn: ForwardedTurn,
        reply: Reply,
        recording: Recording,
        capture: TokenCapture | None,
        started: tuple[int, int],
    ) -> None:
        self._peer, self._forwarder, self._turn = peer, forwarder, turn
        self._reply, self._recording, self._capture = reply, recording, capture
        wanted = capture is not None and capture.added and 200 <= reply.status < 300
        self._filter = TokenFilter(capture, self._recording.streamed) if capture is not None and wanted else None
        self._started_at_ns, self._started_ns = started
        self._held = bytearray()
        self._head_sent = False
        self._reported = False

    def pass_on(self) -> None:
        """Pass the whole reply on. Gone if it was cut, by either side; SnapshotdError if it cannot be recorded."""
        failure: str | None = None
        try:
            if self._recording.streamed:
                self._release()  # the head at once: the agent sees that there will be an answer
            for piece in self._reply.pieces:
                self._take(piece if self._filter is None else self._filter.feed(piece))
            self._take_rest()
        except Cut as cut:
            failure = str(cut)
            self._take_rest()
        except Gone:
            self._report(self._forwarder.aborted or HUNG_UP)
            raise
        except Exception:
            self._report("the gateway failed")
            raise
        self._report(failure)
        self._release()
        if failure is not None:
            raise Gone
        self._peer.end()

    def _take_rest(self) -> None:
        if self._filter is not None:
            self._take(self._filter.end())

    def _take(self, piece: bytes) -> None:
        self._recording.take(piece)
        self._held += piece
        if self._recording.finished:
            self._report(None)
        if self._reported or not self._recording.hold:
            self._release()

    def _release(self) -> None:
        if not self._head_sent:
            self._head_sent = True
            length = self._reply.length if self._filter is None else None
            self._peer.start(self._reply.status, self._reply.headers, length)
        self._peer.send(bytes(self._held))
        self._held.clear()

    def _report(self, failure: str | None) -> None:
        """Tell the turn, once."""
        if self._reported:
            return
        self._reported = True
        spent_ns = time.monotonic_ns() - self._started_ns
        reply = self._recording.reply(failure, self._started_at_ns, spent_ns)
        if self._capture is not None:
            reply = replace(reply, capture=self._capture.record, tokens=self._capture.tokens)
        self._turn.replied(reply)
