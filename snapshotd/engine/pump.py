"""Moves a command's output from its pipes to where it belongs: the repository, and whoever is watching. Memory use is constant."""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from snapshotd.engine.base import Stream
from snapshotd.engine.intake import Intake
from snapshotd.errors import SandboxFailed
from snapshotd.failpoints import hit
from snapshotd.repo.base import BlobWriter, Spool
from snapshotd.runtime.base import Process
from snapshotd.secrets.redactor import Funnel
from snapshotd.types import BlobID

_PIECE_BYTES = 64 << 10
_LATE_BYTES = 1 << 20
"""A pipe holds at most this much: what is read beyond it after a command's end was not written by the command."""
MAX_OUTPUT_BYTES = 4 << 30
"""Of one stream of one command. What comes after is read and dropped, so that the command is neither stopped nor able to fill the disk."""


Shown = Callable[[Stream, bytes, int], None]
"""Like `OutputSink`. The number: with this, so many bytes of the stream, as it came, are shown."""


@dataclass(frozen=True, slots=True)
class Printed:
    """A piece of what an earlier daemon has shown, as it was given to `Shown`."""

    stream: Stream
    data: bytes
    shown_bytes: int


@dataclass(frozen=True, slots=True)
class Outcome:
    exit_code: int | None
    """None: it is lost."""
    stdout: BlobID | None
    stderr: BlobID | None


def pump(
    process: Process, spool: Spool, funnel: Funnel, show: Shown, *, intakes: Mapping[Stream, Intake] | None = None,
    earlier: Iterable[Printed] = (),
) -> Outcome:  # fmt: skip
    """Read both streams until the command has ended, then save them. What is saved and shown has gone through `funnel`. `intakes`: where
    lies what is on its way to `show`, if another daemon may have to go on. `earlier`: what was shown before, by such another one.

    Background children that keep a stream open do not hold this up; what they write later is read and dropped, so that they never meet a
    broken pipe.

    Raises OutOfSpace when the output cannot be stored (the command is killed).
    """
    exit_code: list[int | None] = []
    done_r, done_w = os.pipe2(os.O_CLOEXEC)

    def wait() -> None:
        try:
            code = process.wait()
            assert code is not None
            exit_code.append(code)
        except SandboxFailed:
            exit_code.append(None)
        finally:
            os.close(done_w)

    waiter = threading.Thread(target=wait, name="wait-for-command")
    waiter.start()
    names: dict[int, Stream] = {process.stdout_fd: "stdout", process.stderr_fd: "stderr"}
    open_fds = set(names)
    try:
        with spool.writer() as out, spool.writer() as err:
            shown: dict[Stream, int] = {"stdout": 0, "stderr": 0}
            for piece in earlier:
                (out if piece.stream == "stdout" else err).write(piece.data)
                shown[piece.stream] = piece.shown_bytes
            streams = {
                fd: _Stream(fd, name, writer, funnel, show, None if intakes is None else intakes[name], shown[name])
                for (fd, name), writer in zip(names.items(), (out, err), strict=True)
            }
            _read(process, streams, open_fds, done_r)
            for stream in streams.values():
                stream.finish()
            waiter.join()
            saved = [w.save() if w.size_bytes else None for w in (out, err)]
            hit("engine.step.outputs_saved")
            return Outcome(exit_code[0], saved[0], saved[1])
    except BaseException:
        process.kill()
        raise
    finally:
        waiter.join()
        os.close(done_r)
        for fd in names:
            if fd in open_fds:
                _drain_forever(fd)
            else:
                os.close(fd)


class _Stream:
    """Where one stream of a command comes from, and goes. `shown`: so many bytes of it were shown by another daemon."""

    def __init__(
        self, fd: int, name: Stream, writer: BlobWriter, funnel: Funnel, show: Shown, intake: Intake | None, shown: int
    ) -> None:  # fmt: skip
        self._fd, self._name, self._writer, self._show, self._intake, self._shown = fd, name, writer, show, intake, shown
        self._concealer = funnel.concealer(self._pass_on)
        if intake is not None:
            self._concealer.write(intake.rest(shown))

    def take(self) -> int:
        """Pass on a piece of what has come; how long it is, 0 at the stream's end."""
        data = os.read(self._fd, _PIECE_BYTES) if self._intake is None else self._intake.move(self._fd, _PIECE_BYTES)
        hit("engine.output.moved")
        self._concealer.write(data)
        hit("engine.output.shown")
        if self._intake is not None:
            self._intake.give_back(self._shown + self._concealer.decided)
        return len(data)

    def finish(self) -> None:
        self._concealer.finish()

    def _pass_on(self, data: bytes) -> None:
        if self._writer.size_bytes < MAX_OUTPUT_BYTES:
            self._writer.write(data)
        self._show(self._name, data, self._shown + self._concealer.decided)


def _read(process: Process, streams: dict[int, _Stream], open_fds: set[int], done_fd: int) -> None:
    """Until the command has ended and its output is here: at end of file, or when nothing has come for `linger_s` after the end."""
    ended_at: float | None = None
    late_bytes = 0
    with selectors.DefaultSelector() as selector:
        for fd in (*streams, done_fd):
            selector.register(fd, selectors.EVENT_READ)
        while open_fds or ended_at is None:
            wait = None if ended_at is None else max(0.0, ended_at + process.linger_s - time.monotonic())
            ready = [key.fd for key, _ in selector.select(wait)]
            if wait is not None and (not ready or (wait == 0 and late_bytes > _LATE_BYTES)):
                return
            for fd in ready:
                if fd == done_fd:
                    ended_at = time.monotonic()
                    selector.unregister(done_fd)
                    continue
                size = streams[fd].take()
                if not size:
                    selector.unregister(fd)
                    open_fds.discard(fd)
                    continue
                late_bytes += size if ended_at is not None else 0


def _drain_forever(fd: int) -> None:
    """Keep reading a stream that a background process still holds, until it lets go."""

    def body() -> None:
        try:
            while os.read(fd, _PIECE_BYTES):
                pass
        finally:
            os.close(fd)

    threading.Thread(target=body, name="drain-output", daemon=True).start()
