"""The state of a connection, as its client sees it."""

from __future__ import annotations

import socket


def is_open(connection: socket.socket) -> bool:
    """False: the other end has closed it. It waits for nothing, and takes a byte of what has come."""
    connection.settimeout(0)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
