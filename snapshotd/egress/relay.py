"""Every connection of the sandbox: what it wants, whether it may, and the bytes of both sides."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from snapshotd.egress import hello
from snapshotd.egress.base import (
    ANSWER_DEADLINE_S,
    IDLE_DEADLINE_S,
    MOST_CONNECTIONS,
    OWN_ADDRESS,
    POOL,
    PROXY_PORT,
    HostTarget,
    NotAllowed,
    printable,
)
from snapshotd.egress.buffers import Buffers
from snapshotd.egress.lookup import Lookups, plain, reachable
from snapshotd.egress.names import Pool
from snapshotd.egress.stream import HeadReader, Stream, connect, copy_both, together
from snapshotd.egress.web import HttpRelay, may_be_http
from snapshotd.network import HostRules, clean_name

_HTTP_PORT, _TLS_PORT = 80, 443


class Relay:
    """The connections of one sandbox."""

    def __init__(
        self, rules: HostRules, pool: Pool, lookups: Lookups, report: Callable[[str], None], buffers: Buffers
    ) -> None:
        """`report`: hears of every refusal, in a sentence."""
        self._rules, self._pool, self._lookups, self._report = rules, pool, lookups, report
        self._buffers = buffers
        self._open: dict[asyncio.Task[None], set[HostTarget]] = {}

    def change(self, rules: HostRules) -> None:
        """Apply other rules from now on. Connections that they do not allow end."""
        self._rules = rules
        for task, targets in list(self._open.items()):
            if not all(self._is_allowed(target) for target in targets):
                task.cancel()

    def take(self, sock: socket.socket) -> None:
        """Serve a connection that a listening socket has taken."""
        stream = Stream(sock, self._buffers)
        if len(self._open) >= MOST_CONNECTIONS:
            stream.close(abruptly=True)
            self._report(f"it has {MOST_CONNECTIONS} connections at once, and gets no more")
            return
        task = asyncio.get_running_loop().create_task(self._serve(stream, *sock.getsockname()[:2]))
        self._open[task] = set()
        task.add_done_callback(self._open.pop)

    async def _serve(self, client: Stream, address: str, port: int) -> None:
        abruptly = True
        wanted = f"{address}:{port}"
        try:
            if (address, port) == (OWN_ADDRESS, PROXY_PORT):
                relay = HttpRelay(client, self._find, self._connect, self._report, given=None, tunnel=self._tunnel)
                await relay.run()
            else:
                name = self._pool.name_of(plain(address))
                wanted = f"{name or address}:{port}"
                await self._tunnel(self._find(name or address, port), client, b"")
            abruptly = False
        except NotAllowed as exc:
            self._report(exc.sentence(wanted))
        except OSError:
            pass  # a side has ended, or says nothing
        finally:
            client.close(abruptly=abruptly)

    # -- what may be reached -------------------------------------------------------------------------------------------

    def _find(self, host: str, port: int) -> HostTarget:
        """The target of a host that a client names. NotAllowed: no rule allows it."""
        name = clean_name(host)
        if name is None:
            try:
                address = plain(host)
            except ValueError:
                raise NotAllowed(f"{printable(host)} is no host") from None
            name = self._pool.name_of(address)
            if name is None:
                return self._check_allowed(HostTarget(None, address, port))
        return self._check_allowed(HostTarget(name, None, port))

    def _check_allowed(self, target: HostTarget) -> HostTarget:
        if self._is_allowed(target):
            return target
        if target.name is not None and self._rules.allows_name(target.name):
            raise NotAllowed("rules allow it on other ports only", target)
        if target.address is not None and target.address in POOL:
            raise NotAllowed("the name that had this address has another one now", target)
        raise NotAllowed("no rule allows it", target)

    def _is_allowed(self, target: HostTarget) -> bool:
        if target.name is not None:
            return self._rules.allows_name(target.name, target.port)
        assert target.address is not None
        return target.address not in POOL and self._rules.allows_address(target.address, target.port)

    async def _connect(self, target: HostTarget) -> Stream:
        """Connect to the first address of a target that takes a connection. NotAllowed, OSError."""
        current = asyncio.current_task()
        if current in self._open:
            self._open[current].add(target)
        self._check_allowed(target)  # the rules may have changed while the client said nothing
        if target.name is None:
            assert target.address is not None
            addresses = reachable((target.address,), self._rules, target.port)
        else:
            found = await self._lookups.find(target.name)
            addresses = reachable(found, self._rules, self._check_allowed(target).port)
        failure: OSError = ConnectionRefusedError()
        for address in addresses[:4]:
            try:
                return await connect(address, target.port, self._buffers)
            except OSError as exc:
                failure = exc
        raise failure

    # -- what a connection says ----------------------------------------------------------------------------------------

    async def _tunnel(self, target: HostTarget, client: Stream, first: bytes) -> None:
        """Carry the bytes of a client to a target, in whatever protocol. A server name in them has to be the target's.
        NotAllowed, OSError."""
        if target.port in (_HTTP_PORT, _TLS_PORT) and target.name is not None:
            await self._tunnel_said(target, client, first, None)
            return
        upstream = await self._connect(target)
        try:
            if not first and await _who_speaks(client, upstream) is upstream:
                await self._tunnel_greeted(target, client, upstream)
            else:
                await self._tunnel_said(target, client, first, upstream)
        finally:
            upstream.close()

    async def _tunnel_greeted(self, target: HostTarget, client: Stream, upstream: Stream) -> None:
        """Carry a protocol in which the server speaks first. The client's first words are still checked."""

        async def ask() -> None:
            first = await client.receive()
            if target.name is not None and (hello.may_be_tls(first) or may_be_http(first)):
                raise NotAllowed("what it says does not belong to what the server has said")
            await upstream.send(first)
            await client.copy_to(upstream)

        await together(upstream.copy_to(client), ask())

    async def _tunnel_said(self, target: HostTarget, client: Stream, first: bytes, upstream: Stream | None) -> None:
        """Carry a protocol in which the client speaks first. `upstream`: the server's end, if there is one already."""
        head, shaken = client.head(), 0
        first, kind = await _first_words(head, first)
        if target.name is not None:
            if kind == "tls":
                first, shaken = await _check_hello(target, head, first)
            elif kind == "http":
                if upstream is not None:
                    upstream.close()
                await HttpRelay(client, self._find, self._connect, self._report, given=target).run(first)
                return
            if {_HTTP_PORT: "http", _TLS_PORT: "tls"}.get(target.port, kind) != kind:
                raise NotAllowed("it does not speak the protocol of this port")
        opened = upstream or await self._connect(target)
        try:
            await opened.send(await _shake_hands(target, client, opened, first, shaken) if shaken else first)
            await copy_both(client, opened)
        finally:
            opened.close()


async def _check_hello(target: HostTarget, head: HeadReader, data: bytes) -> tuple[bytes, int]:
    """The client's first bytes, and how many of them are a hello that tells the target's name as the server's. NotAllowed."""
    try:
        while (found := hello.client_hello(data)) is None:
            data += await _more(head)
    except hello.BadHello as exc:
        raise NotAllowed(f"TLS cannot be checked, {exc}") from None
    if clean_name(found.name) != target.name:
        raise NotAllowed(f"TLS names another server: {printable(found.name)}")
    return data, found.end


async def _shake_hands(target: HostTarget, client: Stream, upstream: Stream, data: bytes, end: int) -> bytes:
    """Pass a checked hello on, of the client's bytes so far those up to `end`, and the server's answer back. A server may
    ask for another hello, which has to tell the same name (RFC 8446 4.1.2). The client's bytes that are left. NotAllowed."""
    await upstream.send(data[:end])
    data, said = data[end:], b""
    while (again := hello.asks_again(said)) is None:
        more = await upstream.receive(deadline_s=ANSWER_DEADLINE_S)
        if not more:
            return data
        said += more
        await client.send(more)
    if not again:
        return data
    head = client.head()
    while not hello.begins_handshake(data):
        other = hello.other_record(data)
        await upstream.send(data[:other])
        data = data[other:] + (b"" if other else await _more(head))
    return (await _check_hello(target, head, data))[0]


async def _more(head: HeadReader) -> bytes:
    more = await head.receive()
    if not more:
        raise NotAllowed("its TLS hello is cut off")
    return more


async def _who_speaks(client: Stream, upstream: Stream) -> Stream:
    """The side that says something first."""
    tasks = {asyncio.create_task(side.spoke()): side for side in (client, upstream)}
    try:
        done, _ = await asyncio.wait(tasks, timeout=IDLE_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        return tasks[done.pop()] if done else client
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _first_words(head: HeadReader, data: bytes) -> tuple[bytes, str]:
    """The first bytes of a client, and what they begin: `tls`, `http`, or `other`."""
    while True:
        if data and hello.may_be_tls(data):
            return data, "tls"
        if data and (http := may_be_http(data)) is not None:
            return data, "http" if http else "other"
        more = await head.receive()
        if not more:
            return data, "other"
        data += more
