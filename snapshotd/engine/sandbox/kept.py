"""A command or program that outlives the daemon, as the keeper holds it: the process, the intakes of its output, and the
end of its input to write to.

An *intake* keeps output of a pipe that is not recorded yet where it survives the daemon's death. A pipe forgets its data
once they are read. So the kernel moves them (splice) into a file in memory, which the keeper holds as well. The file's
length is the stream's length so far, and its pages are freed once their data are recorded. The next daemon knows from
the record how far recording came, and finds the rest here: no byte is lost, and none is there twice.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import threading
import time

from snapshotd.engine.caller import STREAMS, Stream
from snapshotd.errors import Conflict
from snapshotd.kernel import files
from snapshotd.runtime.base import STDIN, Keeper

_WRITE_S = 5.0
"""Seconds for which one `write` waits for a command to take its input."""


class Intake:
    """The intake of one stream. Takes the descriptor over; `close` it."""

    def __init__(self, fd: int) -> None:
        """`fd`: from `memory`, of this process or of one before it."""
        self.fd = fd
        self.moved = os.fstat(fd).st_size
        """Bytes that came out of the pipe so far."""
        self._given_back = 0

    def move(self, pipe_fd: int, count: int) -> bytes:
        """Move at most `count` bytes out of the pipe, and return them. Waits for some; empty at the pipe's end. OSError."""
        size = os.splice(pipe_fd, self.fd, count, offset_dst=self.moved)
        self.moved += size
        return os.pread(self.fd, size, self.moved - size)

    def rest(self, recorded: int) -> bytes:
        """The moved but unrecorded bytes, if the record has the first `recorded` bytes of the stream. Pages that were
        given back, because recording has a limit, are left out."""
        try:
            begin = os.lseek(self.fd, recorded, os.SEEK_DATA)
        except OSError:
            return b""  # there is nothing from there on
        return os.pread(self.fd, self.moved - begin, begin)

    def give_back(self, recorded: int) -> None:
        """The first `recorded` bytes are not needed any more: free their pages."""
        end = recorded - recorded % mmap.PAGESIZE
        files.punch_hole(self.fd, self._given_back, end - self._given_back)
        self._given_back = end

    def close(self) -> None:
        os.close(self.fd)


def memory() -> int:
    """A descriptor for a new `Intake`. OSError."""
    return os.memfd_create("snapshotd-output", os.MFD_CLOEXEC)


class KeptProcess:
    """See the module's text. `open` it before the command starts, `close` it at the end. `write` is thread-safe."""

    def __init__(self, keeper: Keeper, key: str, held: list[str]) -> None:
        """`key`: the one under which the keeper has the process. `held`: gets the keys of all that is held, for the end
        of the sandbox."""
        self.key, self.intakes = key, dict[Stream, Intake]()
        self._keeper, self._held = keeper, held
        self._stdin_fd: int | None = None
        """None: it has no input, or its input has ended. Changed under `_writing`."""
        self._writing = threading.Lock()

    def open(self) -> None:
        """Open the intakes of its streams: the earlier daemon's if the keeper holds them, new ones otherwise.
        SandboxFailed: `close` and `drop` it."""
        self._held.append(self.key)
        for stream in STREAMS:
            name = f"{self.key}.{stream}"
            self._held.append(name)
            fd = self._keeper.open_held(name)
            self.intakes[stream] = Intake(memory() if fd is None else fd)
            if fd is None:
                self._keeper.hold(name, self.intakes[stream].fd)

    def open_input(self) -> None:
        """Open its input, which it was started with. SandboxFailed."""
        self._held.append(self.key + STDIN)
        self._stdin_fd = self._keeper.open_held(self.key + STDIN)
        if self._stdin_fd is not None:
            os.set_blocking(self._stdin_fd, False)

    def write(self, data: bytes, name: str, *, end: bool) -> int:
        """Write to its input, and with `end` close it behind all the data. Returns the number of bytes that it took within
        some seconds. Conflict, which names the command by `name`: its input has ended."""
        with self._writing:
            count = self._write(data, name)
            if end and count == len(data):
                self._keeper.drop(self.key + STDIN)
                self._end_input()
            return count

    def _write(self, data: bytes, name: str) -> int:
        count, deadline = 0, time.monotonic() + _WRITE_S
        view = memoryview(data)
        while count < len(data):
            if self._stdin_fd is None:
                raise Conflict(f"the input of command {name} has ended; nothing more can be written to it")
            try:
                count += os.write(self._stdin_fd, view[count:])
            except BlockingIOError:
                left_s = deadline - time.monotonic()
                poller = select.poll()
                poller.register(self._stdin_fd, select.POLLOUT)
                if left_s <= 0 or not poller.poll(left_s * 1000):
                    return count
            except OSError as exc:
                if exc.errno != errno.EPIPE:
                    raise
                raise Conflict(
                    f"command {name} reads no more input: it has ended, or closed its standard input"
                ) from None
        return count

    def _end_input(self) -> None:
        if self._stdin_fd is not None:
            os.close(self._stdin_fd)
            self._stdin_fd = None

    def close(self) -> None:
        """Close all that is open here; the keeper still holds it. Idempotent."""
        while self.intakes:
            self.intakes.popitem()[1].close()
        with self._writing:
            self._end_input()

    def drop(self) -> None:
        """Have the keeper let go of it."""
        for key in (self.key, *(f"{self.key}.{stream}" for stream in STREAMS), self.key + STDIN):
            self._keeper.drop(key)
            if key in self._held:
                self._held.remove(key)
