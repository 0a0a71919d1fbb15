"""The command `snapshotd` for a shell, forked like those that tests run (`tests/forked.py`): 20 ms of CPU instead of 250.

The file that `install` puts on a PATH runs this file as a program, which imports a little of the standard library
alone. It has the command forked with its own arguments, streams, environment and working directory, passes signals on,
and ends as that does. A kill that nobody can catch reaches only this program: tests of that start an interpreter.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
from pathlib import Path

_LENGTH = struct.Struct("=I")
"""As in `tests/forked.py`, whose requests these are."""
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def install(folder: Path) -> None:
    """Make the file `snapshotd` in this folder. It works for as long as this process lives."""
    from tests import forked

    address = forked.commands_address().removeprefix("\0")
    program = folder / "snapshotd"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {__file__} {address} "$@"\n')
    program.chmod(0o755)


def _main() -> None:
    address, *args = sys.argv[1:]
    streams = (0, 1, 2)
    mounts = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    request = json.dumps([args, streams, dict(os.environ), os.getcwd(), "snapshotd", False])
    data = request.encode("utf-8", "surrogateescape")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(f"\0{address}")
    socket.send_fds(connection, [_LENGTH.pack(len(data))], [mounts, *streams])
    connection.sendall(data)
    _, (process,), _, _ = socket.recv_fds(connection, _LENGTH.size, 1)
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _: signal.pidfd_send_signal(process, number))
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in streams:  # who reads or writes at their other ends sees when the command ends, or closes one
        os.dup2(nothing, fd)
    (status,) = _LENGTH.unpack(connection.recv(_LENGTH.size))
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    _main()
