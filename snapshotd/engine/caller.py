"""The caller of a running command, seen from the daemon: the input that it sends, the output streams that it has
stopped reading, and its presence.

One thread tells (`send`, `end_input`, `close_output`, `leave`), another one (the pump) listens: `fd` is readable when
there is something new.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Callable
from typing import Literal

Stream = Literal["stdout", "stderr"]
STREAMS: tuple[Stream, ...] = ("stdout", "stderr")


class Caller:
    """See the module's text. Memory: the input that was sent and not taken yet; the sender keeps that small."""

    def __init__(self, *, gives_input: bool = False, terminal: tuple[int, int] | None = None) -> None:
        """`gives_input`: the command reads the sent input, else its standard input is empty. `terminal`: rows and
        columns of the terminal that the command gets in place of pipes."""
        self.gives_input, self.terminal = gives_input, terminal
        self._taken: Callable[[int], object] = lambda _: None
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self.fd)
        self._lock = threading.Lock()
        self._waiting = bytearray()
        self._ended = False
        self._unread: set[Stream] = set()
        self.gone = False

    # -- telling -------------------------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        with self._lock:
            self._waiting += data
        self._tell()

    def end_input(self) -> None:
        """Nothing more will be sent."""
        self._ended = True
        self._tell()

    def close_output(self, stream: Stream) -> None:
        """The caller stops reading this stream. The command learns it as with any pipe: its next write raises SIGPIPE
        or fails with EPIPE."""
        with self._lock:
            self._unread.add(stream)
        self._tell()

    def resize(self, rows: int, columns: int) -> None:
        """The caller's terminal has another size. Nothing happens without one."""
        if self.terminal is not None:
            self.terminal = rows, columns
            self._tell()

    def leave(self) -> None:
        """Note that the caller is gone: a command that needs its caller ends."""
        self.gone = True
        self._tell()

    def _tell(self) -> None:
        os.eventfd_write(self.fd, 1)

    def on_taken(self, told: Callable[[int], object]) -> None:
        """Have `told` called with the number of further bytes that the command's pipe has taken."""
        self._taken = told

    # -- listening -----------------------------------------------------------------------------------------------------

    def hear(self) -> set[Stream]:
        """Take the news, so that `fd` is readable again only with the next. Returns the streams that were closed since the last
        time."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return set()
        with self._lock:
            unread, self._unread = self._unread, set()
            return unread

    @property
    def waiting_bytes(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> bool:
        """True if there is input to pass on now: data, or the end of the input."""
        return bool(self._waiting) or self._ended

    def pass_on(self, fd: int) -> bool:
        """Write waiting input to the command's pipe, as much as the pipe takes without blocking. False when there is
        nothing more to write, ever: the input has ended, or the command has closed its side."""
        ended = self._ended  # read first: nothing is sent after the end
        with self._lock:
            data = bytes(self._waiting)
        count = 0
        try:
            count = os.write(fd, data) if data else 0
        except BlockingIOError:
            pass
        except OSError as exc:
            if exc.errno not in (errno.EPIPE, errno.EIO):  # EIO: nobody has the terminal any more
                raise
            return False
        if count:
            with self._lock:
                del self._waiting[:count]
            self._taken(count)
        return not ended or count < len(data)
