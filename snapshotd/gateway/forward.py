"""Requests to the real provider, with httpx2 (the maintained continuation of httpx; the providers' own clients use it).

One `Forwarder` per connection of an agent: it keeps its connection to the provider open, and `abort` cuts its present
wait from any thread. httpx2 is imported when the first gateway opens (`prepare`): it takes a tenth of a second, and a
daemon without gateways never needs it.
"""

from __future__ import annotations

import functools
import logging
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from snapshotd.gateway.base import ProviderKind, Timeouts, Upstream
from snapshotd.gateway.keys import Header, KeyMask, incoming, outgoing
from snapshotd.gateway.peer import HttpRequest

if TYPE_CHECKING:
    import httpx2


_LOG = logging.getLogger(__name__)
_GEMINI_QUERY = re.compile(r"alt=(sse|json)|page(Size|Token)=[A-Za-z0-9._~%=-]{1,400}")
"""Other parameters can hold the agent's key (`key`), choose whose account pays, or change the form of the reply."""


class UpstreamFailed(Exception):  # noqa: N818 - what happened, not a defect
    """The provider gave no answer. `status`: the agent's answer, 502 or 504."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Cut(Exception):  # noqa: N818 - what happened, not a defect
    """A reply ended before its end. The message says why."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A provider's answer whose body is on its way. `pieces` may raise Cut. `headers`: the agent's; keys are masked."""

    status: int
    headers: list[Header]
    content_type: str
    length: int | None
    pieces: Iterator[bytes]


def prepare() -> None:
    """Load what the first request needs, so that it need not wait for it. Cheap from the second time on. An error is
    left to that request."""
    try:
        _tls()
    except OSError:  # ssl.SSLError included
        _LOG.warning("the certificate authorities cannot be read", exc_info=True)


@functools.cache
def _tls() -> ssl.SSLContext:
    """One for all: making one reads every certificate authority."""
    import httpx2

    return httpx2.create_ssl_context()


def target(provider: ProviderKind, upstream: Upstream, path: str, query: str) -> str:
    """The provider's URL for a request for `path` (with `/v1` or another version)."""
    base = upstream.base_url.rstrip("/")
    has_path = urlsplit(base).path != ""
    if provider is ProviderKind.ANTHROPIC:
        base = base.removesuffix("/v1")
    elif provider is ProviderKind.GEMINI:
        base = base.removesuffix("/v1beta")
        query = "&".join(part for part in query.split("&") if _GEMINI_QUERY.fullmatch(part))
    elif has_path:
        path = path.removeprefix("/v1")  # an OpenAI base URL ends with its version, under any name
    return base + path + (f"?{query}" if query else "")


class Forwarder:
    """Sends one request at a time. `abort` and `close` may be called by any thread; the rest belongs to one."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._client: httpx2.Client | None = None
        self._lock = threading.Lock()
        self._aborted: str | None = None
        self._connection: socket.socket | None = None
        """A duplicate of the connection to the provider: shutting it down wakes its reader, and no other thread closes
        its number."""

    @contextmanager
    def send(
        self, provider: ProviderKind, upstream: Upstream, http: HttpRequest, sent: Callable[[], None]
    ) -> Iterator[Reply]:
        """Send a request; inside the block, its reply can be read. Raises UpstreamFailed if there is none, and any error
        of `sent`, which is called when the provider has the whole request (not if that fails)."""
        import httpx2

        mask = KeyMask(upstream)
        if self._aborted:
            raise self._failure(OSError(), mask)
        extensions = {**self._limits(), "trace": functools.partial(self._trace, sent)}
        try:
            client, url = self._open(), target(provider, upstream, http.path, http.query)
            own = outgoing(http.headers, provider, upstream)
            request = client.build_request(
                http.method, url, content=http.body or None, headers=own, extensions=extensions
            )
            response = client.send(request, stream=True)
        except (httpx2.TransportError, httpx2.InvalidURL, OSError) as exc:  # OSError: certificates that cannot be read
            raise self._failure(exc, mask) from None
        try:
            encoding = response.headers.get("content-encoding", "identity")
            if encoding not in ("identity", ""):
                raise UpstreamFailed(
                    502,
                    f"The model provider compressed its reply ({encoding[:20]!r}) though asked not to; use another.",
                )
            kind = response.headers.get("content-type", "application/octet-stream")
            passed = incoming(response.headers.raw)
            yield Reply(response.status_code, passed, kind, _length(response), self._pieces(response, mask))
        finally:
            response.close()

    @property
    def aborted(self) -> str | None:
        """The reason of the abort, if it was aborted."""
        return self._aborted

    def abort(self, reason: str) -> None:
        """Cut the present wait, and every later one. Errors give the first `reason`."""
        with self._lock:
            self._aborted = self._aborted or reason
            if self._connection is not None:
                _shut_down(self._connection)

    def close(self) -> None:
        """Close the connections. The thread that sends calls it last."""
        if self._client is not None:
            self._client.close()
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _open(self) -> httpx2.Client:
        import httpx2

        if self._client is None:
            for name in (
                "httpx2",
                "httpcore2",
            ):  # their debug output has the provider's headers, which are kept nowhere
                logging.getLogger(name).setLevel(logging.WARNING)
            limits = httpx2.Limits(max_connections=1, max_keepalive_connections=1)
            self._client = httpx2.Client(
                verify=_tls(), limits=limits, follow_redirects=False, headers={"user-agent": "snapshotd"}
            )
        return self._client

    def _limits(self) -> dict[str, Any]:
        limits = self._timeouts
        return {
            "timeout": {
                "connect": limits.connect_s,
                "read": limits.read_s,
                "write": limits.write_s,
                "pool": limits.connect_s,
            }
        }

    def _failure(self, exc: Exception, mask: KeyMask) -> UpstreamFailed:
        import httpx2

        if self._aborted:
            return UpstreamFailed(502, f"The request to the model provider was given up, because {self._aborted}.")
        if isinstance(exc, httpx2.TimeoutException):
            return UpstreamFailed(
                504, f"The model provider did not answer in time ({type(exc).__name__}); try again later."
            )
        reason = mask.text(str(exc) or type(exc).__name__)
        return UpstreamFailed(
            502, f"The model provider cannot be reached ({reason}); check its base URL and the network."
        )

    def _trace(self, sent: Callable[[], None], name: str, info: Mapping[str, Any]) -> None:
        """Called by the HTTP library at every stage of a request, the opening of a connection among them."""
        if name == "http11.send_request_body.complete":
            sent()
        if name != "connection.connect_tcp.complete":
            return
        opened = info["return_value"].get_extra_info("socket")
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = opened.dup()
            if self._aborted:
                _shut_down(self._connection)

    def _pieces(self, response: httpx2.Response, mask: KeyMask) -> Iterator[bytes]:
        import httpx2

        failure: str | None = None
        try:
            for piece in response.iter_raw():
                if shown := mask.feed(piece):
                    yield shown
        except httpx2.TimeoutException:
            failure = f"the provider sent nothing for {self._timeouts.read_s:g} s"
        except (httpx2.TransportError, OSError) as exc:
            failure = f"the provider cut the reply ({mask.text(str(exc) or type(exc).__name__)})"
        if rest := mask.flush():
            yield rest
        if failure:
            raise Cut(self._aborted or failure)


def _length(response: httpx2.Response) -> int | None:
    value = response.headers.get("content-length", "")
    return int(value) if value.isascii() and value.isdigit() and len(value) < 16 else None


def _shut_down(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it has ended by itself
