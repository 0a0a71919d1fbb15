"""`snapshotd dial`."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import click

from snapshotd.cli.command import connect, declare
from snapshotd.client.client import Snapshotd
from snapshotd.client.exchange import READ_BYTES, unreachable
from snapshotd.client.links import check_listener


@declare("dial", examples=["ssh build.example.org snapshotd dial"])
def command(ctx: click.Context) -> None:
    """Carry a connection to the daemon over standard input and output.

    For clients that reach this machine through ssh (SNAPSHOTD_HOST=ssh://USER@HOST), which run it here.
    """
    with _dial(connect(ctx)) as daemon:
        threading.Thread(target=_send, args=(daemon,), daemon=True).start()
        with contextlib.suppress(OSError):
            while data := daemon.recv(READ_BYTES):
                _write(data)


def _dial(client: Snapshotd) -> socket.socket:
    """Connect to the daemon, and start it if it does not run."""
    with contextlib.suppress(OSError):
        return _connect_once(client)
    client.version()
    try:
        return _connect_once(client)
    except OSError as exc:
        raise unreachable(exc, client.socket_path) from exc


def _connect_once(client: Snapshotd) -> socket.socket:
    daemon = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        daemon.connect(str(client.socket_path))
        check_listener(daemon, str(client.socket_path))
    except BaseException:
        daemon.close()
        raise
    return daemon


def _send(daemon: socket.socket) -> None:
    """Send the client's bytes to the daemon. When the client is gone, both directions end: it never ends one alone."""
    with contextlib.suppress(OSError):
        while data := os.read(0, READ_BYTES):
            daemon.sendall(data)
    with contextlib.suppress(OSError):
        daemon.shutdown(socket.SHUT_RDWR)


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]
