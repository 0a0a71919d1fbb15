"""The process that outlives a daemon which is killed, and finds out what became of the layers it left (witness.py).

A program of the standard library alone, started without snapshotd's modules: it costs 20 ms and a few MiB.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

WHOLE, OPEN = b"whole\n", b"open \n"
"""The two contents of the file that says whether the layers are what was acknowledged."""


def sync(layers_fd: int, image_fd: int) -> None:
    """Return when all that was written to the file system of `layers_fd`, and to the file that it lies in (-1: none), is
    durable. OSError: a write has failed since these were opened."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syncfs(layers_fd) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if image_fd >= 0:
        os.fsync(image_fd)


def main(layers_fd: int, image_fd: int, verdict_fd: int) -> None:
    """Wait for the end of standard input, which is the daemon's. A byte before it: the daemon needs no witness."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    if os.read(0, 1):
        return
    try:
        sync(layers_fd, image_fd)
    except OSError:
        return  # the file goes on saying that they are not whole
    os.pwrite(verdict_fd, WHOLE, 0)
    os.fsync(verdict_fd)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
