"""The programs by which cgroups of version 2 allow devices: bpf(2), include/uapi/linux/bpf.h."""

from __future__ import annotations

import ctypes
import os
import struct
import weakref

from snapshotd.kernel import syscalls as sc

_PROG_ATTACH, _PROG_GET_FD_BY_ID, _PROG_QUERY = 8, 13, 16
_CGROUP_DEVICE = 6
_F_ALLOW_MULTI = 1 << 1
_PROGRAMS_MAX = 64
"""BPF_CGROUP_MAX_PROGS."""
_ATTRIBUTES_BYTES = 64


class DeviceProgram:
    """A program that the kernel has, for as long as this object lives."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        weakref.finalize(self, os.close, fd)


def device_programs(group: int) -> list[DeviceProgram]:
    """The programs attached to the cgroup with this descriptor, in their order. OSError."""
    ids = (ctypes.c_uint32 * _PROGRAMS_MAX)()
    query = struct.Struct("IIIIQI")
    _, answer = _bpf(_PROG_QUERY, query.pack(group, _CGROUP_DEVICE, 0, 0, ctypes.addressof(ids), _PROGRAMS_MAX))
    count = query.unpack_from(answer)[5]
    return [DeviceProgram(_bpf(_PROG_GET_FD_BY_ID, struct.pack("I", ids[number]))[0]) for number in range(count)]


def attach(program: DeviceProgram, group: int) -> None:
    """Have a program decide, with those that are attached already, which devices the cgroup may use. OSError."""
    _bpf(_PROG_ATTACH, struct.pack("IIII", group, program.fd, _CGROUP_DEVICE, _F_ALLOW_MULTI))


def _bpf(command: int, attributes: bytes) -> tuple[int, bytes]:
    """The call's result, and its attributes as the kernel leaves them."""
    buffer = ctypes.create_string_buffer(attributes, _ATTRIBUTES_BYTES)
    result = sc.call("bpf", command, ctypes.byref(buffer), _ATTRIBUTES_BYTES)
    return result, buffer.raw
