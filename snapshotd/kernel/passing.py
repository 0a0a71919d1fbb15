"""Descriptors that come over a socket. Standard library only: the keeper's and the starter's processes import it."""

from __future__ import annotations

import array
import socket


def receive(connection: socket.socket, max_bytes: int, max_fds: int) -> tuple[bytes, list[int]]:
    """One packet and the descriptors beside it, close-on-exec (socket.recv_fds of Python 3.11 takes flags and ignores
    them)."""
    fds = array.array("i")
    data, beside, _, _ = connection.recvmsg(max_bytes, socket.CMSG_LEN(max_fds * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, fds.tolist()
