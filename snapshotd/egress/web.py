"""Plain HTTP through the proxy: every request on a connection is parsed and checked, and what goes on is made anew of what
was parsed. So no two readers can see two requests in the same bytes (request smuggling).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import cast

import h11

from snapshotd.egress.base import HostTarget, NotAllowed, printable
from snapshotd.egress.stream import HeadReader, Stream, copy_both

_HEAD_MAX_BYTES = 32_768
_METHODS = (b"GET ", b"HEAD ", b"POST ", b"PUT ", b"DELETE ", b"OPTIONS ", b"PATCH ", b"TRACE ", b"CONNECT ", b"PRI ")
_METHOD_MAX_BYTES = 24

Open = Callable[[HostTarget], Awaitable[Stream]]
"""Connects to a target that is allowed. NotAllowed, OSError."""
Find = Callable[[str, int], HostTarget]
"""The target of a host and a port that a request names. NotAllowed."""
Tunnel = Callable[[HostTarget, Stream, bytes], Awaitable[None]]
"""Takes over a client that has asked for a tunnel, with the first bytes that it has sent there. NotAllowed."""
Report = Callable[[str], None]


def may_be_http(data: bytes) -> bool | None:
    """True if these first bytes begin an HTTP request; None: more of them would tell."""
    size, data = len(data), data.lstrip(b"\r\n")  # servers skip empty lines before a request
    if not data and size > _HEAD_MAX_BYTES:
        return True
    if any(data.startswith(method) for method in _METHODS):
        return True
    if any(method.startswith(data) for method in _METHODS):
        return None
    line, end, _ = data.partition(b"\n")
    if b" HTTP/" in line:  # a method that is not listed
        return True
    word = data.partition(b" ")[0]
    if end or len(data) > _HEAD_MAX_BYTES or len(word) > _METHOD_MAX_BYTES:
        return False
    return None if word.replace(b"-", b"").isalpha() and word.isupper() else False


def host_and_port(text: str, default: int) -> tuple[str, int]:
    """From `host`, `host:port` or `[address]:port`. NotAllowed."""
    host, separator, port = text.rpartition(":")
    if not separator or text.endswith("]"):
        host, port = text, str(default)
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536 or len(port) > 5:
        raise NotAllowed(f"the host {printable(text)} is malformed")
    return host.removeprefix("[").removesuffix("]"), int(port)


class HttpRelay:
    """The requests of one client's connection, one after the other."""

    def __init__(
        self,
        client: Stream,
        find: Find,
        connect: Open,
        report: Report,
        *,
        given: HostTarget | None,
        tunnel: Tunnel | None = None,
    ) -> None:
        """`given`: the target that the connection was made to; every request has to name it. None: the client knows that it
        speaks to a proxy, names a target in every request, and may ask for a `tunnel`. `report`: hears of every refusal."""
        self._client, self._find, self._connect, self._report = client, find, connect, report
        self._given, self._tunnel = given, tunnel
        self._server = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD_MAX_BYTES)
        self._upstream: tuple[HostTarget, Stream] | None = None
        self._asked: HostTarget | str = given or "the proxy"

    async def run(self, first: bytes = b"") -> None:
        """Serve the client, whose first bytes these are, until it ends. OSError: either side has ended before."""
        try:
            if first:
                self._server.receive_data(first)
            while await self._serve_one():
                self._server.start_next_cycle()
        except h11.RemoteProtocolError as exc:
            self._report(f"{self._asked}: its request is malformed, {printable(str(exc))}")
            await self._answer(400, "the request is malformed")
        except NotAllowed as exc:
            self._report(exc.sentence(self._asked))
            await self._answer(403, f"not for this sandbox: {exc.sentence(self._asked)}")
        finally:
            if self._upstream is not None:
                self._upstream[1].close()

    async def _serve_one(self) -> bool:
        """One request and its response; True if another may follow."""
        request = await _next(self._server, self._client.head())
        if not isinstance(request, h11.Request):
            return False
        if request.method == b"CONNECT":
            await self._open_tunnel(request)
            return False
        target, to_send = self._check_request(request)
        self._asked = target
        try:
            upstream = await self._reach(target)
        except OSError as exc:
            await self._answer(502, f"{target} cannot be reached: {exc.strerror or 'it does not answer'}")
            return False
        peer = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_MAX_BYTES)
        try:
            await upstream.send(_must(peer.send(to_send)))
            if not await self._exchange(peer, upstream):
                return False
        except h11.ProtocolError:
            await self._answer(502, f"{target} answers something that is no HTTP")
            return False
        if peer.our_state is not h11.DONE or peer.their_state is not h11.DONE:
            self._upstream = None
            upstream.close()
        return self._server.our_state is h11.DONE and self._server.their_state is h11.DONE

    def _check_request(self, request: h11.Request) -> tuple[HostTarget, h11.Request]:
        """The target of a request, and the request as it goes on. NotAllowed."""
        target, authority = request.target.decode("latin-1"), None
        if target.lower().startswith("http://"):
            authority, slash, path = target[len("http://") :].partition("/")
            target = slash + path or "/"
        elif target[:1] not in ("/", "*"):
            raise NotAllowed("the address in its request is none of plain HTTP")
        headers = _drop_ambiguous([(name, value) for name, value in request.headers if not name.startswith(b"proxy-")])
        named = self._find_target([value.decode("latin-1") for name, value in headers if name == b"host"], authority)
        return named, h11.Request(method=request.method, target=target, headers=headers)

    def _find_target(self, hosts: list[str], authority: str | None) -> HostTarget:
        """The target that a request's `Host` and the address in its first line agree on. NotAllowed."""
        given = self._given
        if given is None and authority is None:
            raise NotAllowed("it asks the proxy itself for something")
        if given is not None and given.name is None:
            return given  # an address: whatever answers there is allowed
        named = {self._find(*host_and_port(text, given.port if given else 80)) for text in (*hosts, authority) if text}
        if len(hosts) != 1 or not named:
            raise NotAllowed("its request names no host")
        target = named.pop()
        if named or given not in (None, target):
            raise NotAllowed(f"its request names another host: {target if not named else named.pop()}")
        return target

    async def _open_tunnel(self, request: h11.Request) -> None:
        if self._tunnel is None:
            raise NotAllowed("it asks a server for a tunnel")
        self._asked = target = self._find(*host_and_port(request.target.decode("latin-1"), 443))
        body = self._client.head()
        while not isinstance(await _next(self._server, body), h11.EndOfMessage):
            pass
        await self._client.send(_must(self._server.send(h11.Response(status_code=200, headers=[], reason=b"OK"))))
        await self._tunnel(target, self._client, self._server.trailing_data[0])

    async def _reach(self, target: HostTarget) -> Stream:
        if self._upstream is not None and self._upstream[0] == target:
            return self._upstream[1]
        if self._upstream is not None:
            self._upstream[1].close()
            self._upstream = None
        self._upstream = target, await self._connect(target)
        return self._upstream[1]

    async def _exchange(self, peer: h11.Connection, upstream: Stream) -> bool:
        """Send the request's body one way and the response the other. False: the connection has switched to another
        protocol, and has ended."""
        sending = asyncio.create_task(self._send_body(peer, upstream))
        responding = asyncio.create_task(self._send_response(peer, upstream))
        try:
            await asyncio.wait((sending, responding), return_when=asyncio.FIRST_COMPLETED)
            if not responding.done():
                await sending  # it may have failed
            switched = await responding
        finally:
            for task in (sending, responding):
                task.cancel()
            await asyncio.gather(sending, responding, return_exceptions=True)
        if switched:
            await self._client.send(peer.trailing_data[0])
            await upstream.send(self._server.trailing_data[0])
            await copy_both(self._client, upstream)
        return not switched

    async def _send_body(self, peer: h11.Connection, upstream: Stream) -> None:
        while True:
            event = await _next(self._server, self._client)
            if isinstance(event, h11.Data | h11.EndOfMessage):
                if data := peer.send(event):
                    await upstream.send(data)
                if isinstance(event, h11.EndOfMessage):
                    return
            else:
                return

    async def _send_response(self, peer: h11.Connection, upstream: Stream) -> bool:
        """True if the server has switched to another protocol, which the client had asked for."""
        while True:
            event = await _next(peer, upstream)
            if not isinstance(event, h11.Event) or isinstance(event, h11.ConnectionClosed):
                raise ConnectionResetError
            data = self._server.send(event)
            if data:
                await self._client.send(data)
            if isinstance(event, h11.InformationalResponse) and event.status_code == 101:
                return True
            if isinstance(event, h11.EndOfMessage):
                return False

    async def _answer(self, status: int, sentence: str) -> None:
        if self._server.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        body = f"{sentence}\n".encode()
        headers = [
            ("content-type", "text/plain; charset=utf-8"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        parts = (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage())
        with contextlib.suppress(OSError, h11.LocalProtocolError):  # it has ended, or wants no answer
            for part in parts:
                await self._client.send(_must(self._server.send(part)))


def _drop_ambiguous(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers without what another reader could take otherwise: a second length, and changes to a protocol whose
    requests nobody here would see."""
    names = {name for name, _ in headers}
    upgrades = [value.strip().lower() for name, value in headers if name == b"upgrade"]
    dropped = {b"content-length"} if b"transfer-encoding" in names else set()
    if upgrades not in ([], [b"websocket"]):
        dropped |= {b"upgrade", b"http2-settings"}
    kept = [(name, value) for name, value in headers if name not in dropped]
    if b"upgrade" not in dropped:
        return kept
    return [(name, value) for name, value in kept if name != b"connection" or b"upgrade" not in value.lower()]


async def _next(connection: h11.Connection, source: Stream | HeadReader) -> h11.Event | type[h11.PAUSED]:
    """The next event of one side, or `h11.PAUSED`."""
    while (event := connection.next_event()) is h11.NEED_DATA:
        connection.receive_data(await source.receive())
    return cast("h11.Event | type[h11.PAUSED]", event)


def _must(data: bytes | None) -> bytes:
    return data or b""
