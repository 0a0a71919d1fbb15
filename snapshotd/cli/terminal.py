"""A person's terminal while a command in a sandbox has it: keys go to the command as they are pressed, and it learns of
every change of size."""

from __future__ import annotations

import os
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager

from snapshotd.client.feeding import Terminal


def size() -> tuple[int, int]:
    """Rows and columns; 24 and 80 where no stream is a terminal."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        try:
            found = os.get_terminal_size(stream.fileno())
        except (AttributeError, OSError, ValueError):
            continue
        if found.lines and found.columns:
            return found.lines, found.columns
    return 24, 80


@contextmanager
def lend_terminal() -> Iterator[Terminal]:
    """The terminal for a command. If standard input is one, it is raw inside: Ctrl-C reaches the command, not us."""
    terminal = Terminal(*size())
    fd = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    before = None if fd is None else termios.tcgetattr(fd)

    def pass_size(*_: object) -> None:
        # The handler interrupts the thread that may be sending just now.
        threading.Thread(target=lambda: terminal.resize(*size()), name="resize", daemon=True).start()

    handler = signal.signal(signal.SIGWINCH, pass_size)
    try:
        if fd is not None:
            tty.setraw(fd, termios.TCSADRAIN)  # keys that were pressed before count
        yield terminal
    finally:
        signal.signal(signal.SIGWINCH, handler)
        if fd is not None and before is not None:
            termios.tcsetattr(fd, termios.TCSADRAIN, before)
