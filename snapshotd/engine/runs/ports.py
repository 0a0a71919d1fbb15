"""Connections to servers inside a sandbox, from outside: sockets made in its network namespace."""

from __future__ import annotations

import socket
from collections.abc import Callable

from snapshotd.engine.base import Connection
from snapshotd.engine.runs import folder_mode
from snapshotd.engine.runs.launch import is_alive
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.errors import Conflict, SandboxFailed
from snapshotd.kernel.namespaces import in_network_namespace
from snapshotd.types import Trajectory

_CONNECT_S = 10.0
"""A server whose queue is full does not answer at all."""


def connect(sandbox: Sandbox | None, trajectory: Trajectory, port: int, ended: Callable[[], object]) -> Connection:
    """See `RunService.connect`. `sandbox`: the trajectory's, None if it has none."""
    name = trajectory.shown_name
    if sandbox is None or not is_alive(sandbox):
        raise _not_running(name)
    if not sandbox.isolated:
        raise folder_mode.refusal("a port", f"a server of {name} listens on this machine; connect to 127.0.0.1:{port}")

    def inside() -> socket.socket:
        # The process id may have become another process's before its namespace was opened. It is the sandbox's own as
        # long as that process is in the sandbox's cgroup, so the look comes after the opening.
        if not is_alive(sandbox):
            raise _not_running(name)
        return _connect_loopback(port)

    try:
        connected = in_network_namespace(sandbox.container.pid, inside)
    except ConnectionRefusedError as exc:
        raise Conflict(
            f"nothing listens on port {port} in {name}: start a server there, on 127.0.0.1 or on all addresses, and connect again"
        ) from exc
    except TimeoutError as exc:
        raise SandboxFailed(
            f"the server on port {port} in {name} takes no connection ({_CONNECT_S:.0f} s): it has too many or stands still; try again"
        ) from exc
    except FileNotFoundError as exc:
        raise _not_running(name) from exc
    except OSError as exc:
        raise SandboxFailed(f"port {port} in {name} cannot be reached: {exc.strerror}; try again") from exc
    sandbox.connections[connected] = ended

    def close() -> None:
        sandbox.connections.pop(connected, None)
        connected.close()

    if sandbox.closed:  # since the look, and it may not have seen this one
        close()
        raise _not_running(name)
    return Connection(connected, close)


def _connect_loopback(port: int) -> socket.socket:
    """Many servers that are told `localhost` listen on ::1 alone."""
    try:
        return _to(socket.AF_INET, "127.0.0.1", port)
    except ConnectionRefusedError as refused:
        try:
            return _to(socket.AF_INET6, "::1", port)
        except OSError:
            raise refused from None


def _to(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    connected = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connected.settimeout(_CONNECT_S)
        connected.connect((address, port))
        if connected.getsockname() == connected.getpeername():
            # Nothing listens, and the kernel chose this very port for our end: TCP connects it with itself.
            raise ConnectionRefusedError
    except BaseException:
        connected.close()
        raise
    return connected


def _not_running(name: str) -> Conflict:
    return Conflict(
        f"{name} is not running, so no server in it can be reached; `snapshotd exec {name} -- CMD` starts its sandbox again"
    )
