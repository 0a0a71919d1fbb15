"""The intake: output of a pipe that is not recorded yet, kept where it survives the daemon's death.

A pipe forgets its data once they are read. So the kernel moves them (splice) into a file in memory, which the keeper
holds as well. The file's length is the stream's length so far, and its pages are freed once their data are recorded.
The next daemon knows from the record how far recording came, and finds the rest here: no byte is lost, and none is
there twice.
"""

from __future__ import annotations

import mmap
import os

from snapshotd.engine.caller import Stream
from snapshotd.kernel import files
from snapshotd.runtime.base import Keeper

_STREAMS: tuple[Stream, ...] = ("stdout", "stderr")


class Intake:
    """The intake of one stream. Takes the descriptor over; `close` it."""

    def __init__(self, fd: int) -> None:
        """`fd`: from `memory`, of this process or of one before it."""
        self.fd = fd
        self.moved = os.fstat(fd).st_size
        """Bytes that came out of the pipe so far."""
        self._given_back = 0

    def move(self, pipe_fd: int, count: int) -> bytes:
        """At most `count` bytes from the pipe; waits for some; empty at the pipe's end. OSError."""
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


def open_intakes(keeper: Keeper, key: str, kept: list[str]) -> dict[Stream, Intake]:
    """The intakes of a kept command's streams: the earlier daemon's if the keeper holds them, new ones otherwise. Their
    keys are added to `kept`. SandboxFailed."""
    found: dict[Stream, Intake] = {}
    try:
        for stream in _STREAMS:
            name = f"{key}.{stream}"
            kept.append(name)
            held = keeper.held(name)
            found[stream] = Intake(memory() if held is None else held)
            if held is None:
                keeper.hold(name, found[stream].fd)
    except BaseException:
        for intake in found.values():
            intake.close()
        raise
    return found


def memory() -> int:
    """A descriptor for a new `Intake`. OSError."""
    return os.memfd_create("snapshotd-output", os.MFD_CLOEXEC)
