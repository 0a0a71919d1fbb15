"""The peer check: root and the daemon's own user may talk to the daemon, and no process inside a sandbox may.

The socket's mode (0600) already keeps other users out; this check also holds when a user widens the mode, or hands the
socket into a container.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from snapshotd.engine.engine import Engine
from snapshotd.errors import NotPermitted
from snapshotd.kernel import rootless
from snapshotd.kernel.holding import cgroup
from snapshotd.kernel.processes import SANDBOX, variable_of

log = logging.getLogger("snapshotd.daemon")
_LINGER_S = 1.0
"""Time that a refused peer has to read the reason."""
_UCRED = struct.Struct("3i")  # struct ucred: pid, uid, gid (unix(7))

PEER_PID = "peer_pid"
"""Field of a request's state (`request.state`) with the id of the process that made its connection, in the daemon's pid
namespace; 0 if it lives outside of that. It is alive as long as it waits for the answer."""
PEER_UID = "peer_uid"
"""Field of a request's state with that process's user id."""
PEER_TRANSPORT = "peer_transport"
"""Field of a request's state with the connection itself."""

SandboxPredicate = Callable[[int], bool]
"""True if the process with this id (in the daemon's pid namespace) lives in one of our sandboxes."""


def in_sandbox(pid: int) -> bool:
    """True if the process's cgroup is one of the runc driver's ("/snapshotd-..."). A process that is gone counts as
    inside, because nothing can be known of it any more."""
    text = cgroup.path_of(pid)
    return text is None or "/snapshotd-" in text


def in_sandbox_of(engine: Engine) -> SandboxPredicate:
    """`in_sandbox`, extended to every driver: true if the process shares the cgroup or the pid namespace of a live
    sandbox's init.

    A process of the daemon's own pid namespace is in no sandbox with isolation, so usual clients need no search. One of a
    sandbox without is known by its environment, which keeps accidents out and no attacker.
    """
    own_namespace, own_cgroup = os.readlink("/proc/self/ns/pid"), cgroup.path_of(os.getpid())

    def predicate(pid: int) -> bool:
        if in_sandbox(pid):
            return True
        namespace, text = _pid_namespace(pid), cgroup.path_of(pid)
        if namespace is None or text is None:
            return True  # gone
        if namespace == own_namespace:
            inside = variable_of(pid, SANDBOX)
            return bool(inside) and any(info.container == inside for info in engine.runs.sandboxes())
        return any(
            _pid_namespace(info.pid) == namespace or (text != own_cgroup and cgroup.path_of(info.pid) == text)
            for info in engine.runs.sandboxes()
        )

    return predicate


def _pid_namespace(pid: int) -> str | None:
    """The name of a process's pid namespace; None: it is gone. A process that this one may not look into lies outside of
    its user namespace, and so in no sandbox."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except PermissionError:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def refusal(pid: int, uid: int, is_sandboxed: SandboxPredicate, own_uid: int) -> str | None:
    """Reason why a peer with these credentials may not connect, as a sentence; None if it may.

    `pid` 0 is a process of an outer pid namespace (the host of a daemon that runs in a container); a sandbox never
    looks like that, since its pid namespace is always inside the daemon's.
    """
    if uid not in (0, own_uid) or (uid != own_uid and rootless.in_own_namespace()):
        if rootless.in_own_namespace():  # ids of users outside are not known in it
            return "another user may not use this daemon, which serves the user who started it; run the command as that user"
        return (
            f"user {uid} may not use this daemon, which serves {'root' if own_uid == 0 else f'root and user {own_uid}'} only; "
            f"run the command {'with sudo' if own_uid == 0 else 'as one of them'}"
        )
    if pid != 0 and is_sandboxed(pid):
        return (
            f"process {pid} runs inside a sandbox, from which the daemon cannot be driven; run the command on the host"
        )
    return None


def credentials(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process that opened the connection (SO_PEERCRED)."""
    pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


def protocol_class(is_sandboxed: SandboxPredicate = in_sandbox) -> type[HttpToolsProtocol]:
    """uvicorn's HTTP protocol with the peer check in front: a refused peer gets one 403, and none of its requests is
    read."""
    own_uid = os.geteuid()

    class PeerChecked(HttpToolsProtocol):
        _refused = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            pid, uid = credentials(transport.get_extra_info("socket"))
            reason = refusal(pid, uid, is_sandboxed, own_uid)
            if reason is None:
                self.app_state = {
                    **self.app_state,
                    PEER_PID: pid,
                    PEER_UID: uid,
                    PEER_TRANSPORT: transport,
                }  # into the state of each of the connection's requests
                super().connection_made(transport)
                return
            self._refused = True
            log.warning("connection refused", extra={"fields": {"peer_pid": pid, "peer_uid": uid, "reason": reason}})
            transport.write(_answer(NotPermitted(reason)))
            # Closed at once, with its request unread, the peer would see a reset instead of the sentence.
            transport.write_eof()
            asyncio.get_running_loop().call_later(_LINGER_S, transport.close)

        def data_received(self, data: bytes) -> None:
            if not self._refused:
                super().data_received(data)

        def eof_received(self) -> None:
            if not self._refused:
                super().eof_received()

        def connection_lost(self, exc: Exception | None) -> None:
            if not self._refused:
                super().connection_lost(exc)

    return PeerChecked


def _answer(failure: NotPermitted) -> bytes:
    body = json.dumps(failure.as_json()).encode()
    head: dict[str, Any] = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close"}
    lines = "".join(f"{key}: {value}\r\n" for key, value in head.items())
    return f"HTTP/1.1 {failure.http_status} Forbidden\r\n{lines}\r\n".encode() + body


def client_pid(request: Request) -> int:
    """The process that made a request's connection; 0 if it lives outside of the daemon's pid namespace."""
    pid: int = getattr(request.state, PEER_PID)
    return pid
