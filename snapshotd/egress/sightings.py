"""Packets that reach no socket of the proxy: they are refused by the kernel, and named here.

A packet socket sees the first packet of every TCP connection, and all of other protocols but questions for names. It
only watches: nothing that it sees is let through, and nothing is stopped by it.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Callable
from ipaddress import IPv4Address

from snapshotd.egress.base import NAMES_PORT, OWN_ADDRESS
from snapshotd.egress.refusals import RefusalLog

_SO_ATTACH_FILTER = 26
_PACKET_BYTES = 96
_AT_ONCE = 64
_TCP, _UDP, _ICMP = 6, 17, 1
_IPV4_FRAMES = 0x0800


class _Step(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("value", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("count", ctypes.c_uint16), ("steps", ctypes.POINTER(_Step)))


_LOAD_BYTE, _LOAD_HALF_AT, _LOAD_BYTE_AT, _LOAD_LENGTH = 0x30, 0x48, 0x50, 0xB1
_EQUAL, _AND, _RETURN = 0x15, 0x54, 0x06
_SYN, _ACK = 0x02, 0x10
_FILTER = (
    (_LOAD_BYTE, 0, 0, 9),  # protocol
    (_EQUAL, 0, 5, _TCP),
    (_LOAD_LENGTH, 0, 0, 0),
    (_LOAD_BYTE_AT, 0, 0, 13),  # flags of TCP
    (_AND, 0, 0, _SYN | _ACK),
    (_EQUAL, 5, 0, _SYN),
    (_RETURN, 0, 0, 0),
    (_EQUAL, 0, 3, _UDP),
    (_LOAD_LENGTH, 0, 0, 0),
    (_LOAD_HALF_AT, 0, 0, 2),  # target port of UDP
    (_EQUAL, 1, 0, NAMES_PORT),
    (_RETURN, 0, 0, _PACKET_BYTES),
    (_RETURN, 0, 0, 0),
)


def open_watch(link: str) -> socket.socket:
    """A socket that sees what comes over a link of the calling thread's network namespace. OSError: not here."""
    watch = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, 0)
    try:
        steps = (_Step * len(_FILTER))(*(_Step(*step) for step in _FILTER))
        program = _Program(len(_FILTER), steps)
        watch.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, bytes(program))
        watch.bind((link, _IPV4_FRAMES))
        watch.setblocking(False)
    except BaseException:
        watch.close()
        raise
    return watch


def take(
    watch: socket.socket,
    is_open: Callable[[int], bool],
    name_of: Callable[[IPv4Address], str | None],
    refusals: RefusalLog,
) -> None:
    """Name what was seen, but for connections to ports on which the proxy listens (`is_open`)."""
    for _ in range(_AT_ONCE):
        try:
            packet, (_, _, kind, *_) = watch.recvfrom(_PACKET_BYTES)
        except BlockingIOError:
            return
        if kind == socket.PACKET_OUTGOING or len(packet) < 20:
            continue
        protocol, target = packet[9], IPv4Address(packet[16:20])
        at = (packet[0] & 0xF) * 4
        port = struct.unpack_from("!H", packet, at + 2)[0] if len(packet) >= at + 4 else 0
        host = name_of(target) or str(target)
        if protocol == _TCP and not is_open(port):
            refusals.add(f"{host}:{port}: no rule allows this port")
        elif protocol == _UDP:
            refusals.add(f"{host}:{port}: only TCP goes out, and this is UDP")
        elif protocol not in (_TCP, _ICMP) or (protocol == _ICMP and host != OWN_ADDRESS):
            refusals.add(f"{host}: only TCP goes out, and this is IP protocol {protocol}")
