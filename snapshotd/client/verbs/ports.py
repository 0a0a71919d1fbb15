"""Local addresses that reach servers inside sandboxes: each connection to one is carried by a request of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Self, TypeVar

from snapshotd.api import operations
from snapshotd.api.wire import PORT_CONNECTIONS_MAX, check_socket_path
from snapshotd.client.local.arguments import check_count, local_path
from snapshotd.client.transport import Conversation, Transport
from snapshotd.client.twofold import BlockingContext, Twofold, closing, verb
from snapshotd.client.verbs.base import VerbPart
from snapshotd.errors import Conflict, DaemonUnavailable, LimitExceeded, SnapshotdError, Unsupported, UsageError
from snapshotd.terms import NO_ISOLATION, short

LOOPBACK = "127.0.0.1"
_BACKLOG, _LAST_PORT = 128, 65535
_AGAIN_S = 0.1
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER for 0 s: close is a reset (socket(7))."""

OnFailure = Callable[[SnapshotdError], object]


class AsyncPort(Twofold):
    """An open local address. Used as a context manager, or `close`; connections to it are cut then.

    `address` is 127.0.0.1:NUMBER or the path of a unix socket; `number` is None with that.
    """

    def __init__(self, transport: Transport, path: str, listener: socket.socket, on_failure: OnFailure) -> None:
        self._transport, self._path, self._listener, self._on_failure = transport, path, listener, on_failure
        self._open = set[_Carrier]()
        self._lock = threading.Lock()
        self._closed = False
        name = listener.getsockname()
        self.number: int | None = None if isinstance(name, str) else name[1]
        self.address: str = name if isinstance(name, str) else f"{name[0]}:{name[1]}"
        self._accepting = transport.links.begin(self._accept, "port-accept", lambda: None)

    @verb
    async def close(self) -> None:
        """Cut every connection and take the address away. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            carriers = list(self._open)
        if self.number is None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes a thread in `accept`
        await self._accepting.end(None)
        self._listener.close()
        for carrier in carriers:
            carrier.cut()
        for carrier in carriers:
            await carrier.task.end(None)

    async def _accept(self) -> None:
        while True:
            try:
                local = await self._transport.links.accept(self._listener)
            except OSError:
                # The peer has gone before it was accepted, or this process has no descriptor left: others wait.
                if self._closed:
                    return
                await self._transport.links.pause(_AGAIN_S)
                continue
            refusal = self._carry(local)
            if refusal is not None:
                local.close()
                self._fail(refusal)

    def _carry(self, local: socket.socket) -> SnapshotdError | None:
        """Carry a connection at the side; the reason if that cannot be."""
        with self._lock:
            if self._closed or len(self._open) >= PORT_CONNECTIONS_MAX:
                return LimitExceeded(
                    f"{PORT_CONNECTIONS_MAX} connections to {self.address} are open already; close some"
                )
            try:
                self._open.add(_Carrier(self, self._transport, self._path, local))
            except RuntimeError as exc:
                return LimitExceeded(f"no more threads can be started for connections to {self.address} ({exc})")
            return None

    def _fail(self, failure: SnapshotdError) -> None:
        if not self._closed:
            self._on_failure(failure)

    def _forget(self, carrier: _Carrier, failure: SnapshotdError | None) -> None:
        """One connection is over; `failure`: the reason why it was never made."""
        with self._lock:
            self._open.discard(carrier)
        if failure is not None:
            self._fail(failure)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Port(BlockingContext, AsyncPort):
    """An open local address. Used as a context manager, or `close`; connections to it are cut then.

    `address` is 127.0.0.1:NUMBER or the path of a unix socket; `number` is None with that.
    """


class _Carrier:
    """One connection: its task takes what the server sends, another one sends."""

    def __init__(self, port: AsyncPort, transport: Transport, path: str, local: socket.socket) -> None:
        self._port, self._transport, self._path, self._socket = port, transport, path, local
        self._local = transport.links.adopt(local)
        self._talk: Conversation | None = None
        self._cut = False
        self.task = transport.links.begin(self._run, "port", lambda: None)

    def cut(self) -> None:
        """Make it end; from any thread."""
        self._cut = True
        if self._talk is not None:
            self._talk.break_off()
        self._local.break_off()

    async def _run(self) -> None:
        failure: SnapshotdError | None = None
        try:
            async with await self._transport.carry(self._path) as talk:
                self._talk = talk
                if not self._cut:
                    await self._exchange(talk)
        except SnapshotdError as exc:
            failure = exc
        finally:
            self._local.close()
            self._port._forget(self, failure)

    async def _exchange(self, talk: Conversation) -> None:
        frames = await talk.frames()
        sender = self._transport.links.begin(lambda: self._send(talk), "port-send", talk.break_off)
        try:
            async with closing(frames) as answered:
                async for frame in answered:
                    if isinstance(frame, bytes):
                        await self._local.send(frame)
                    elif frame["event"] == "end":
                        self._socket.shutdown(socket.SHUT_WR)
        except BaseException as exc:
            # Cut in the sandbox or here: not an end that could be taken for that of the data.
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            if not isinstance(exc, OSError | DaemonUnavailable):
                raise
        finally:
            talk.break_off()
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RD)  # wakes the sender, and the peer does not see it
            await sender.end(None)

    async def _send(self, talk: Conversation) -> None:
        try:
            while data := await self._local.receive():
                await talk.send(data)
            await talk.send(b"")
        except OSError:
            talk.break_off()  # the peer reset its connection: so does the daemon


PortT = TypeVar("PortT", bound=AsyncPort)


class PortVerbs(VerbPart, Generic[PortT]):
    """The part of `Snapshotd` that opens ports."""

    _port: Callable[[Transport, str, socket.socket, OnFailure], PortT]

    @verb
    async def port(
        self,
        ref: str,
        number: int | str,
        local: int | None = None,
        *,
        unix: str | Path | None = None,
        on_failure: OnFailure = lambda _: None,
    ) -> PortT:
        """Listen on 127.0.0.1:`local` (None or 0: any free port), or on a new unix socket at the path `unix` that only
        this user may use. Every connection goes to the TCP server on port `number` of the trajectory's sandbox, on its
        loopback or all its addresses, whatever its network; a text is the name of a service that declares a port. It need
        not run yet: each connection looks for it anew. Use the result in a `with` block, or close it.

        A connection that cannot be made is closed, and `on_failure` is called with the reason, from another thread (with
        asyncio: in a task). It is cut when the sandbox ends. UsageError: the numbers,
        the path; Conflict: the local address is taken; Unsupported: the sandbox is a plain folder.
        """
        if isinstance(number, str):
            number = await self._port_of(ref, number)
        check_count("port", number, 1, _LAST_PORT)
        check_count("local", 0 if local is None else local, 0, _LAST_PORT)
        if unix is not None and local is not None:
            raise UsageError("a local port and a unix socket were named; leave one of them out")
        found = await self._transport.call(operations.TRAJECTORY, ref)
        if found.runtime == NO_ISOLATION:
            name = found.name or short(found.id)
            raise Unsupported(
                f"a port needs a sandbox with isolation, and {name} is a plain folder: a server of it listens on this machine; "
                f"connect to {LOOPBACK}:{number}"
            )
        listener = _listen_on_path(local_path(unix)) if unix is not None else _listen(local or 0)
        return self._port(self._transport, operations.CONNECT.to(found.id, str(number)), listener, on_failure)

    async def _port_of(self, ref: str, service: str) -> int:
        found = await self._transport.call(operations.COMMAND, ref, service)
        if found.port is None:
            raise UsageError(f"{service!r} is no service of {ref} that declares a port; name the number of the port")
        return found.port


def _listen(number: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit it
        listener.bind((LOOPBACK, number))
        listener.listen(_BACKLOG)
    except OSError as exc:
        listener.close()
        raise Conflict(
            f"cannot listen on {LOOPBACK}:{number}: {exc.strerror}; name another local port, or none for any that is free"
        ) from exc
    return listener


def _listen_on_path(path: Path) -> socket.socket:
    check_socket_path(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listener.fileno(), 0o600)  # the file gets this mode from the socket (unix_bind in the kernel)
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError as exc:
        listener.close()
        raise Conflict(f"the socket {path} cannot be made: {exc.strerror}; remove it, or choose another path") from exc
    return listener
