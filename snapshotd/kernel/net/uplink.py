"""The uplink of a network namespace: taken down and brought up again, with its routes.

An interface that is down passes nothing and keeps its IPv4 addresses. The kernel drops the routes through it; the
connected ones come back with it, the ones with a gateway do not, so they are remembered. IPv6 addresses and routes are
lost with the interface (unless `net.ipv6.conf.*.keep_addr_on_down` is set): neither driver gives a sandbox any.
Interfaces and routes by ioctl (netdevice(7), `struct rtentry` of linux/route.h): one call each, no program needed.
"""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from snapshotd.kernel.namespaces import in_network_namespace

_GET_FLAGS, _SET_FLAGS, _ADD_ROUTE = 0x8913, 0x8914, 0x890B
_UP, _LOOPBACK = 0x1, 0x8
_ROUTE_GATEWAY = 0x2
_IFREQ = "16sh22x"
_TABLE = "/proc/thread-self/net/route"

T = TypeVar("T")


class _Address(ctypes.Structure):
    """`struct sockaddr_in`, without a port."""

    _fields_ = (
        ("family", ctypes.c_uint16),
        ("port", ctypes.c_uint16),
        ("address", ctypes.c_uint8 * 4),
        ("unused", ctypes.c_uint8 * 8),
    )

    @classmethod
    def of(cls, address: bytes) -> _Address:
        return cls(family=socket.AF_INET, address=(ctypes.c_uint8 * 4)(*address))


class _RouteEntry(ctypes.Structure):
    """`struct rtentry`. The metric is one more than the route's ("for binary compatibility")."""

    _fields_ = (
        ("pad1", ctypes.c_ulong),
        ("target", _Address),
        ("gateway", _Address),
        ("mask", _Address),
        ("flags", ctypes.c_ushort),
        ("pad2", ctypes.c_short),
        ("pad3", ctypes.c_ulong),
        ("pad4", ctypes.c_void_p),
        ("metric", ctypes.c_short),
        ("device", ctypes.c_void_p),
        ("mtu", ctypes.c_ulong),
        ("window", ctypes.c_ulong),
        ("irtt", ctypes.c_ushort),
    )


@dataclass(frozen=True, slots=True)
class Route:
    """An IPv4 route through a gateway. Addresses in network byte order."""

    interface: str
    target: bytes
    gateway: bytes
    mask: bytes
    metric: int
    flags: int


@dataclass(frozen=True, slots=True)
class Uplink:
    """The parts that `take_down` took: the interfaces that were up, and the routes that do not come back with them."""

    interfaces: tuple[str, ...]
    routes: tuple[Route, ...]


def take_down(pid: int) -> Uplink:
    """Take every interface but loopback down in the network namespace of a process. OSError; the interfaces before the
    failed one stay down."""

    def down(control: socket.socket) -> Uplink:
        found = [name for _, name in socket.if_nameindex() if _flags(control, name) & (_UP | _LOOPBACK) == _UP]
        uplink = Uplink(tuple(found), tuple(route for route in _routes() if route.interface in found))
        for name in found:
            _set_flags(control, name, _flags(control, name) & ~_UP)
        return uplink

    return _run_with_control(pid, down)


def bring_up(pid: int, uplink: Uplink) -> None:
    """Undo `take_down`. OSError."""

    def up(control: socket.socket) -> None:
        for name in uplink.interfaces:
            _set_flags(control, name, _flags(control, name) | _UP)
        for route in uplink.routes:
            _add(control, route)

    _run_with_control(pid, up)


def _run_with_control(pid: int, action: Callable[[socket.socket], T]) -> T:
    """Run `action` in the network namespace of a process, with a socket for ioctl(2)."""

    def inside() -> T:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as control:
            return action(control)

    return in_network_namespace(pid, inside)


def _flags(control: socket.socket, name: str) -> int:
    answer = fcntl.ioctl(control, _GET_FLAGS, struct.pack(_IFREQ, name.encode(), 0))
    flags: int = struct.unpack(_IFREQ, answer)[1]
    return flags & 0xFFFF


def _set_flags(control: socket.socket, name: str, flags: int) -> None:
    signed = flags - 0x10000 if flags > 0x7FFF else flags
    fcntl.ioctl(control, _SET_FLAGS, struct.pack(_IFREQ, name.encode(), signed))


def _routes() -> list[Route]:
    """The routes through a gateway. The columns are hexadecimal numbers in the machine's byte order (fib_route_seq_show
    in the kernel)."""
    found = []
    with open(_TABLE) as table:
        next(table, None)
        for line in table:
            interface, target, gateway, flags, _, _, metric, mask = line.split()[:8]
            if int(flags, 16) & _ROUTE_GATEWAY:
                found.append(
                    Route(
                        interface,
                        _pack_address(target),
                        _pack_address(gateway),
                        _pack_address(mask),
                        int(metric),
                        int(flags, 16),
                    )
                )
    return found


def _pack_address(text: str) -> bytes:
    return struct.pack("=I", int(text, 16))


def _add(control: socket.socket, route: Route) -> None:
    name = ctypes.create_string_buffer(route.interface.encode())
    entry = _RouteEntry(
        target=_Address.of(route.target),
        gateway=_Address.of(route.gateway),
        mask=_Address.of(route.mask),
        flags=route.flags,
        metric=route.metric + 1,
        device=ctypes.addressof(name),
    )
    try:
        fcntl.ioctl(control, _ADD_ROUTE, bytes(entry))
    except FileExistsError:
        pass  # it came back with the interface
