"""Descriptors that come over a socket, and requests that go as one. Standard library only: the keeper's and the starter's
processes import it."""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
from collections.abc import Iterator
from typing import Any


def receive(connection: socket.socket, max_bytes: int, max_fds: int) -> tuple[bytes, list[int]]:
    """One packet and the descriptors beside it, close-on-exec (socket.recv_fds of Python 3.11 takes flags and ignores
    them)."""
    fds = array.array("i")
    data, beside, _, _ = connection.recvmsg(max_bytes, socket.CMSG_LEN(max_fds * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, fds.tolist()


@contextlib.contextmanager
def in_memory(document: dict[str, Any]) -> Iterator[int]:
    """Yields a descriptor of a file in memory with the document as JSON, which may be longer than a packet."""
    with open(os.memfd_create("document", os.MFD_CLOEXEC), "w") as file:
        json.dump(document, file)
        file.flush()
        yield file.fileno()


def read_document(fd: int) -> dict[str, Any]:
    """The document of a descriptor from `in_memory`."""
    document: dict[str, Any] = json.loads(os.pread(fd, os.fstat(fd).st_size, 0))
    return document


def close_all_but(*kept: int) -> None:
    """Close all descriptors of this process but the standard ones and these."""
    for low, high in zip((2, *sorted(kept)), (*sorted(kept), 1 << 20), strict=True):
        os.closerange(low + 1, high)
