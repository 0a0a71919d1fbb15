"""Links, addresses and routes of the network namespace that the calling thread is in, by rtnetlink(7): a message for
each change, and the kernel's answer. No program is needed.

Every function raises OSError with the kernel's reason.
"""

from __future__ import annotations

import errno
import os
import socket
import struct

_NEW_LINK, _DELETE_LINK, _NEW_ADDRESS, _NEW_ROUTE = 16, 17, 20, 24
_REQUEST, _ACK, _EXCLUSIVE, _CREATE = 0x1, 0x4, 0x200, 0x400
_ERROR = 2
_HEADER = struct.Struct("=IHHII")
_LINK = struct.Struct("=BxHiII")
_ADDRESS = struct.Struct("=BBBBI")
_ROUTE = struct.Struct("=BBBBBBBBI")
_NAME, _LINKINFO, _NS_FD, _AF_SPEC = 3, 18, 28, 26
_INFO_KIND, _INFO_DATA, _VETH_PEER = 1, 2, 1
_INET6_ADDR_GEN_MODE, _GENERATE_NONE = 8, 1
_ROUTE_OUT, _ROUTE_GATEWAY = 4, 5
_ADDRESS_LOCAL, _ADDRESS_OWN = 2, 1
_MAIN_TABLE, _PROTOCOL_BOOT, _UNICAST, _LOCAL = 254, 3, 1, 2
_SCOPE_ALL, _SCOPE_HOST = 0, 254
_UP = 0x1
_ANSWER_BYTES = 16_384


def add_pair(name: str, peer: str, peer_namespace: int) -> None:
    """A pair of virtual Ethernet links: `name` here, and `peer` in the namespace of this descriptor."""
    other = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + _text(_NAME, peer) + _number(_NS_FD, peer_namespace)
    pair = _text(_INFO_KIND, "veth") + _attribute(_INFO_DATA, _attribute(_VETH_PEER, other))
    message = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + _text(_NAME, name) + _attribute(_LINKINFO, pair)
    _ask(_NEW_LINK, _CREATE | _EXCLUSIVE, message)


def delete(name: str) -> None:
    """Delete a link, and the other end of its pair. Not an error when there is none."""
    try:
        _ask(_DELETE_LINK, 0, _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + _text(_NAME, name))
    except OSError as exc:
        if exc.errno != errno.ENODEV:
            raise


def bring_up(name: str) -> None:
    """Set a link up. It gets no IPv6 address by itself."""
    number = socket.if_nametoindex(name)
    mode = _attribute(socket.AF_INET6, _attribute(_INET6_ADDR_GEN_MODE, bytes((_GENERATE_NONE,))))
    try:
        _ask(_NEW_LINK, 0, _LINK.pack(socket.AF_UNSPEC, 0, number, 0, 0) + _attribute(_AF_SPEC, mode))
    except OSError as exc:
        if exc.errno != errno.EAFNOSUPPORT:  # the kernel has no IPv6
            raise
    _ask(_NEW_LINK, 0, _LINK.pack(socket.AF_UNSPEC, 0, number, _UP, _UP))


def add_address(name: str, address: str, prefix: int) -> None:
    """Give a link an IPv4 address."""
    packed = socket.inet_aton(address)
    message = _ADDRESS.pack(socket.AF_INET, prefix, 0, _SCOPE_ALL, socket.if_nametoindex(name))
    message += _attribute(_ADDRESS_LOCAL, packed) + _attribute(_ADDRESS_OWN, packed)
    _ask(_NEW_ADDRESS, _CREATE | _EXCLUSIVE, message)


def add_default_route(gateway: str) -> None:
    """Everything that is not near goes through this address."""
    _add_route(_UNICAST, _SCOPE_ALL, _attribute(_ROUTE_GATEWAY, socket.inet_aton(gateway)))


def take_all_addresses() -> None:
    """Every IPv4 address that no other route leads to is this namespace's own: its sockets receive what is sent there."""
    _add_route(_LOCAL, _SCOPE_HOST, _number(_ROUTE_OUT, socket.if_nametoindex("lo")))


def _add_route(kind: int, scope: int, attributes: bytes) -> None:
    message = _ROUTE.pack(socket.AF_INET, 0, 0, 0, _MAIN_TABLE, _PROTOCOL_BOOT, scope, kind, 0)
    _ask(_NEW_ROUTE, _CREATE | _EXCLUSIVE, message + attributes)


def _attribute(kind: int, payload: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(payload), kind) + payload + bytes(-len(payload) % 4)


def _text(kind: int, text: str) -> bytes:
    return _attribute(kind, text.encode() + b"\0")


def _number(kind: int, number: int) -> bytes:
    return _attribute(kind, struct.pack("=I", number))


def _ask(kind: int, flags: int, message: bytes) -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as kernel:
        kernel.bind((0, 0))
        kernel.send(_HEADER.pack(_HEADER.size + len(message), kind, _REQUEST | _ACK | flags, 1, 0) + message)
        answer = kernel.recv(_ANSWER_BYTES)
    _, answered, *_ = _HEADER.unpack_from(answer)
    number = -struct.unpack_from("=i", answer, _HEADER.size)[0] if answered == _ERROR else errno.EPROTO
    if number:
        raise OSError(number, os.strerror(number))
