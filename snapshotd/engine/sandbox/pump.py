"""Moves a command's output from its pipes to the repository and to its watchers. Memory use is constant."""

from __future__ import annotations

import base64
import errno
import fcntl
import os
import selectors
import struct
import termios
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from snapshotd.engine.base import Event, Stream
from snapshotd.engine.caller import Caller
from snapshotd.engine.sandbox.kept import Intake
from snapshotd.errors import SandboxFailed
from snapshotd.failpoints import hit
from snapshotd.repo.spool import BlobWriter, Spool
from snapshotd.runtime.base import Process
from snapshotd.secrets.redactor import Funnel
from snapshotd.types import BlobID

_PIECE_BYTES = 64 << 10
_LATE_BYTES = 1 << 20
"""A pipe holds at most this much: bytes beyond it that are read after a command's end come from another process."""

Shown = Callable[[Stream, bytes, int], None]
"""Like `OutputSink`. The number: raw bytes of the stream that are shown so far, this piece included."""


@dataclass(frozen=True, slots=True)
class Printed:
    """A piece of output that an earlier daemon has shown, as `Shown` received it."""

    stream: Stream
    data: bytes
    shown_bytes: int


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    exit_code: int | None
    """None: it is lost."""
    stdout: BlobID | None
    stderr: BlobID | None
    lost_bytes: Mapping[Stream, int] = field(default_factory=dict)
    """Bytes of each stream that were not saved; streams without a loss are left out."""


def pump(
    process: Process,
    funnel: Funnel,
    show: Shown,
    *,
    spool: Spool,
    max_bytes: int,
    intakes: Mapping[Stream, Intake] | None = None,
    earlier: Iterable[Printed] = (),
    caller: Caller | None = None,
    abandon: bool = False,
    save: bool = True,
) -> CommandOutcome:
    """Read both streams until the command has ended, then save them, unless not to `save`. Saved and shown output has
    gone through `funnel`. `max_bytes`: output limit of one stream; bytes beyond it are read and dropped, so that the
    command is neither stopped nor able to fill the disk. `intakes`: hold the output on its way to `show`, if another
    daemon may have to go on. `earlier`: the output that an earlier daemon has shown. `caller` gives the command its
    input, and may stop reading its output; with `abandon` the command is killed when the caller is gone.

    Background children that keep a stream open do not hold this up; what they write later is read and dropped, so that
    they never meet a broken pipe. A terminal is closed: they get SIGHUP, as from any terminal.

    Raises OutOfSpace when the output cannot be stored (the command is killed).
    """
    pipes = (_Pipe(process.stdout_fd, "stdout"), _Pipe(process.stderr_fd, "stderr"))
    attended = _Attended(process, pipes[0], caller, abandon)
    try:
        with spool.writer() as out, spool.writer() as err:
            shown: dict[Stream, int] = {"stdout": 0, "stderr": 0}
            for piece in earlier:
                (out if piece.stream == "stdout" else err).write(piece.data)
                shown[piece.stream] = piece.shown_bytes
            streams = [
                _Stream(
                    pipe, writer, max_bytes, funnel, show, intakes[pipe.name] if intakes else None, shown[pipe.name]
                )
                for pipe, writer in zip(pipes, (out, err), strict=True)
            ]
            _read(process, streams, attended)
            for stream in streams:
                stream.finish()
            exit_code = _wait(process)
            saved = [w.save() if save and w.size_bytes else None for w in (out, err)]
            hit("engine.step.outputs_saved")
            return CommandOutcome(
                exit_code, saved[0], saved[1], {s.pipe.name: s.lost_bytes for s in streams if s.lost_bytes}
            )
    except BaseException:
        process.kill()
        _wait(process)
        raise
    finally:
        attended.close_input()
        for pipe in pipes:
            if pipe.reading and not process.terminal:
                pipe.drain_forever()
            else:
                pipe.close()


def printed_output(events: Iterable[Event]) -> Iterator[Printed]:
    """The pieces of a program's output among these events, without those of its tool calls."""
    for event in events:
        if event["event"] == "output" and "call" not in event:
            yield Printed(event["stream"], base64.b64decode(event["data_b64"]), event.get("shown_bytes", 0))


class _Pipe:
    """The reading end of one stream of a command: the owner of its descriptor."""

    def __init__(self, fd: int, name: Stream) -> None:
        self._fd, self.name = fd, name
        self.reading = True
        """More may come."""

    def fileno(self) -> int:
        return self._fd

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def read(self, intake: Intake | None) -> bytes:
        """The next piece, through the intake if there is one; nothing at the end, which a terminal's master tells by
        EIO."""
        try:
            data = os.read(self._fd, _PIECE_BYTES) if intake is None else intake.move(self._fd, _PIECE_BYTES)
        except OSError as exc:
            if intake is not None or exc.errno != errno.EIO:
                raise
            data = b""
        self.reading = bool(data)
        return data

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if not self.closed:
            os.close(self._fd)
        self._fd, self.reading = -1, False

    def drain_forever(self) -> None:
        """Keep reading a stream that a background process still holds, until it lets go."""

        def body() -> None:
            try:
                while os.read(self._fd, _PIECE_BYTES):
                    pass
            finally:
                self.close()

        threading.Thread(target=body, name="drain-output", daemon=True).start()


class _Stream:
    """The way of one stream of a command, from its pipe to the spool. `shown`: bytes of it that another daemon has
    shown."""

    def __init__(
        self,
        pipe: _Pipe,
        writer: BlobWriter,
        max_bytes: int,
        funnel: Funnel,
        show: Shown,
        intake: Intake | None,
        shown: int,
    ) -> None:
        self.pipe, self._writer, self._show, self._intake, self._shown = pipe, writer, show, intake, shown
        self._max_bytes = max_bytes
        self._concealer = funnel.concealer(self._pass_on)
        self.lost_bytes = 0
        if intake is not None:
            rest = intake.rest(shown)
            self.lost_bytes = max(0, intake.moved - shown) - len(rest)
            self._concealer.write(rest)

    def take(self) -> int:
        """Pass on a piece of the stream. Returns its length; 0 at the stream's end."""
        data = self.pipe.read(self._intake)
        hit("engine.output.moved")
        self._concealer.write(data)
        hit("engine.output.shown")
        if self._intake is not None:
            self._intake.give_back(self._shown + self._concealer.decided)
        return len(data)

    def finish(self) -> None:
        self._concealer.finish()

    def _pass_on(self, data: bytes) -> None:
        if self._writer.size_bytes < self._max_bytes:
            self._writer.write(data)
        else:
            self.lost_bytes += len(data)
        self._show(self.pipe.name, data, self._shown + self._concealer.decided)


class _Attended:
    """The caller's part in a command: its input, and its presence."""

    def __init__(self, process: Process, terminal: _Pipe, caller: Caller | None, abandon: bool) -> None:
        """`terminal`: the terminal's master, if the process has a terminal."""
        self._process, self._terminal, self._caller, self._abandon = process, terminal, caller, abandon
        self._input_fd = process.stdin_fd
        self._writing = False
        if self._input_fd is not None:
            os.set_blocking(self._input_fd, False)

    def register(self, selector: selectors.BaseSelector) -> None:
        if self._caller is not None:
            selector.register(self._caller.fd, selectors.EVENT_READ)

    def take(self, fd: int, selector: selectors.BaseSelector) -> set[Stream]:
        """Pass on the input, or news of the caller, for which `fd` is ready. Returns the streams that the caller stops
        reading."""
        if self._caller is None or fd not in (self._caller.fd, self._input_fd):
            return set()  # the input was closed just now
        unread: set[Stream] = set()
        if fd == self._caller.fd:
            unread = self._caller.hear()
            if self._process.terminal and self._caller.terminal is not None and not self._terminal.closed:
                size = struct.pack("HHHH", *self._caller.terminal, 0, 0)
                fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, size)
            if self._caller.gone and self._abandon:
                self._process.kill()
        elif self._input_fd is not None and not self._caller.pass_on(self._input_fd):
            self.close_input(selector)
        writing = self._input_fd is not None and self._caller.waiting
        if self._input_fd is not None and writing != self._writing:
            if writing:
                selector.register(self._input_fd, selectors.EVENT_WRITE)
            else:
                selector.unregister(self._input_fd)
            self._writing = writing
        return unread

    def close_input(self, selector: selectors.BaseSelector | None = None) -> None:
        """The command reads the end of its input. Idempotent."""
        if self._input_fd is None:
            return
        if selector is not None and self._writing:
            selector.unregister(self._input_fd)
        os.close(self._input_fd)
        self._input_fd, self._writing = None, False


def _wait(process: Process) -> int | None:
    """Wait until the command has ended. Its exit code; None: it is lost."""
    try:
        return process.wait()
    except SandboxFailed:
        return None


def _read(process: Process, streams: list[_Stream], attended: _Attended) -> None:
    """Read until the command has ended and its output is here: at end of file, or when nothing is left after the end."""
    end_fd = process.end_fd()
    ended = end_fd is None
    late_bytes = 0
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream.pipe, selectors.EVENT_READ, stream)
        if end_fd is not None:
            selector.register(end_fd, selectors.EVENT_READ)
        attended.register(selector)
        while not ended or any(stream.pipe.reading for stream in streams):
            ready = [key for key, _ in selector.select(0 if ended else None)]
            if ended and (not ready or late_bytes > _LATE_BYTES):
                return
            for key in ready:
                if key.fd == end_fd:
                    ended = True
                    selector.unregister(end_fd)
                elif key.data is None:
                    unread = attended.take(key.fd, selector)
                    for pipe in [stream.pipe for stream in streams if stream.pipe.reading]:
                        if pipe.name in unread:
                            selector.unregister(pipe)
                            pipe.close()
                elif key.data.pipe.reading:  # else it was closed just now
                    size = key.data.take()
                    if not size:
                        selector.unregister(key.data.pipe)
                    late_bytes += size if ended else 0
