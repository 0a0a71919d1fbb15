"""Somebody at a terminal, in front of the command line."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time

from tests.e2e.support import Snap

DEADLINE_S = 60.0


class Person:
    """Somebody who types at a terminal and reads what appears."""

    def __init__(self, snap: Snap, *args: str, rows: int = 33, columns: int = 101) -> None:
        self._master, slave = pty.openpty()
        self.resize(rows, columns)
        command = [sys.executable, "-m", "snapshotd", *args]
        env = {**snap.env, "TERM": "xterm"}
        self.process = subprocess.Popen(
            command, env=env, stdin=slave, stdout=slave, stderr=slave, preexec_fn=os.setsid, close_fds=True
        )
        os.close(slave)
        self.seen = b""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        with contextlib.suppress(AttributeError):  # not started yet
            self.process.send_signal(signal.SIGWINCH)

    def types(self, text: str) -> None:
        os.write(self._master, text.encode())

    def reads(self, wanted: str) -> str:
        """What appears up to and with `wanted`; it is not seen again."""
        deadline = time.monotonic() + DEADLINE_S
        while wanted.encode() not in self.seen:
            ready = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))[0]
            assert ready, f"{wanted!r} did not appear, but {self.seen!r}"
            try:
                self.seen += os.read(self._master, 65536)
            except OSError:
                raise AssertionError(f"the terminal ended before {wanted!r}: {self.seen!r}") from None
        found, _, self.seen = self.seen.partition(wanted.encode())
        return found.decode() + wanted

    def ends(self) -> int:
        """The client's exit code; reads all that it prints until then."""
        with contextlib.suppress(OSError):
            while data := os.read(self._master, 65536):
                self.seen += data
        os.close(self._master)
        return self.process.wait(DEADLINE_S)
