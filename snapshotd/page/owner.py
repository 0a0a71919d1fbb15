"""The user who has the other end of a TCP connection on this machine, as the kernel tells it (sock_diag(7), inet_diag)."""

from __future__ import annotations

import socket
import struct

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST = 1
_HEADER = struct.Struct("=IHHII")
_ASKED = struct.Struct("=4BI")
"""Family, protocol, extensions, padding, states."""
_PLACE = struct.Struct("!HH16s16s")
"""Ports and addresses of the socket that is asked for, its own first."""
_ANY_INTERFACE_AND_COOKIE = struct.pack("=IQ", 0, (1 << 64) - 1)
_UID_AT = _HEADER.size + 64
"""Behind the family, the place and three counters."""
_ANSWER_BYTES = 4096
_ANSWER_S = 1.0


def find_owner(connection: socket.socket) -> int | None:
    """The uid of the process at the other end of an IPv4 connection; None: the kernel does not know, since the other end
    is gone, is on another machine, or this kernel tells of no sockets. Needs no privileges; some 30 µs."""
    try:
        (here, port), (there, their_port) = connection.getsockname(), connection.getpeername()
        place = _PLACE.pack(their_port, port, socket.inet_aton(there), socket.inet_aton(here))
        asked = _ASKED.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + place + _ANY_INTERFACE_AND_COOKIE
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(_ANSWER_S)
            kernel.sendto(_HEADER.pack(_HEADER.size + len(asked), _SOCK_DIAG_BY_FAMILY, _REQUEST, 0, 0) + asked, (0, 0))
            answer = kernel.recv(_ANSWER_BYTES)
    except OSError:
        return None
    if _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        return None
    return int(struct.unpack_from("=I", answer, _UID_AT)[0])
