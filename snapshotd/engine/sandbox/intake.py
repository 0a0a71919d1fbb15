"""What came out of a pipe and is not recorded yet, where the daemon's death does not take it along.

A pipe forgets what was read. So the kernel moves what comes (splice) into a file in memory, which the keeper holds,
too: the file is as long as the stream was so far, and its pages are given back once what was in them is recorded.
Whoever comes after knows from the record how far that came, and finds the rest here: nothing is lost, nothing is there
twice.
"""

from __future__ import annotations

import mmap
import os

from snapshotd.kernel import files


class Intake:
    """Of one stream. Takes the descriptor over; `close` it."""

    def __init__(self, fd: int) -> None:
        """`fd`: from `memory`, of this process or of one before it."""
        self.fd = fd
        self.moved = os.fstat(fd).st_size
        """So many bytes came out of the pipe so far."""
        self._given_back = 0

    def move(self, pipe_fd: int, count: int) -> bytes:
        """At most `count` bytes of what is in the pipe, waiting for some; empty at its end. OSError."""
        size = os.splice(pipe_fd, self.fd, count, offset_dst=self.moved)
        self.moved += size
        return os.pread(self.fd, size, self.moved - size)

    def rest(self, recorded: int) -> bytes:
        """What was moved and not recorded, where the record has the first `recorded` bytes of the stream. What was
        given back because there is a limit to what is recorded is left out."""
        try:
            begin = os.lseek(self.fd, recorded, os.SEEK_DATA)
        except OSError:
            return b""  # there is nothing from there on
        return os.pread(self.fd, self.moved - begin, begin)

    def give_back(self, recorded: int) -> None:
        """The first `recorded` bytes are not needed any more."""
        end = recorded - recorded % mmap.PAGESIZE
        files.punch_hole(self.fd, self._given_back, end - self._given_back)
        self._given_back = end

    def close(self) -> None:
        os.close(self.fd)


def memory() -> int:
    """A descriptor for a new `Intake`. OSError."""
    return os.memfd_create("snapshotd-output", os.MFD_CLOEXEC)
