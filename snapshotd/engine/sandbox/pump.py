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
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from snapshotd.engine.base import Event, Stream
from snapshotd.engine.caller import Caller
from snapshotd.engine.sandbox.intake import Intake
from snapshotd.errors import SandboxFailed
from snapshotd.failpoints import hit
from snapshotd.repo.base import BlobWriter, Spool
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
) -> CommandOutcome:
    """Read both streams until the command has ended, then save them. Saved and shown output has gone through `funnel`.
    `max_bytes`: output limit of one stream; bytes beyond it are read and dropped, so that the command is neither stopped
    nor able to fill the disk. `intakes`: hold the output on its way to `show`, if another daemon may have to go on.
    `earlier`: the output that an earlier daemon has shown. `caller` gives the command its input, and may stop reading its
    output; with `abandon` the command is killed when the caller is gone.

    Background children that keep a stream open do not hold this up; what they write later is read and dropped, so that
    they never meet a broken pipe. A terminal is closed: they get SIGHUP, as from any terminal.

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
    attended = _Attended(process, caller, abandon)
    try:
        with spool.writer() as out, spool.writer() as err:
            shown: dict[Stream, int] = {"stdout": 0, "stderr": 0}
            for piece in earlier:
                (out if piece.stream == "stdout" else err).write(piece.data)
                shown[piece.stream] = piece.shown_bytes
            streams = {
                fd: _Stream(fd, name, writer, max_bytes, funnel, show, intakes[name] if intakes else None, shown[name])
                for (fd, name), writer in zip(names.items(), (out, err), strict=True)
            }
            _read(process, streams, open_fds, done_r, attended)
            for stream in streams.values():
                stream.finish()
            waiter.join()
            saved = [w.save() if w.size_bytes else None for w in (out, err)]
            hit("engine.step.outputs_saved")
            return CommandOutcome(
                exit_code[0], saved[0], saved[1], {s.name: s.lost_bytes for s in streams.values() if s.lost_bytes}
            )
    except BaseException:
        process.kill()
        raise
    finally:
        waiter.join()
        os.close(done_r)
        attended.close_input()
        for fd in names:
            if fd in open_fds and not process.terminal:
                _drain_forever(fd)
            else:
                os.close(fd)


def printed(events: Iterable[Event]) -> Iterator[Printed]:
    """The output that a program has printed so far, as far as it was followed."""
    for event in events:
        if event["event"] == "output" and "call" not in event:
            yield Printed(event["stream"], base64.b64decode(event["data_b64"]), event.get("shown_bytes", 0))


class _Stream:
    """The way of one stream of a command, from its pipe to the spool. `shown`: bytes of it that another daemon has
    shown."""

    def __init__(
        self,
        fd: int,
        name: Stream,
        writer: BlobWriter,
        max_bytes: int,
        funnel: Funnel,
        show: Shown,
        intake: Intake | None,
        shown: int,
    ) -> None:
        self._fd, self.name, self._writer, self._show, self._intake, self._shown = fd, name, writer, show, intake, shown
        self._max_bytes = max_bytes
        self._concealer = funnel.concealer(self._pass_on)
        self.lost_bytes = 0
        if intake is not None:
            rest = intake.rest(shown)
            self.lost_bytes = max(0, intake.moved - shown) - len(rest)
            self._concealer.write(rest)

    def take(self) -> int:
        """Pass on a piece of the stream. Returns its length; 0 at the stream's end."""
        data = _read_piece(self._fd) if self._intake is None else self._intake.move(self._fd, _PIECE_BYTES)
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
        self._show(self.name, data, self._shown + self._concealer.decided)


def _read_piece(fd: int) -> bytes:
    """The next piece; nothing at the end, which a terminal's master tells by EIO."""
    try:
        return os.read(fd, _PIECE_BYTES)
    except OSError as exc:
        if exc.errno != errno.EIO:
            raise
        return b""


class _Attended:
    """The caller's part in a command: its input, and its presence."""

    def __init__(self, process: Process, caller: Caller | None, abandon: bool) -> None:
        self._process, self._caller, self._abandon = process, caller, abandon
        self._input_fd = process.stdin_fd
        self._writing = False
        if self._input_fd is not None:
            os.set_blocking(self._input_fd, False)

    def register(self, selector: selectors.BaseSelector) -> None:
        if self._caller is not None:
            selector.register(self._caller.fd, selectors.EVENT_READ)

    def take(self, fd: int, selector: selectors.BaseSelector) -> set[Stream] | None:
        """If `fd` is one of these, do the work that it is ready for. Returns the streams that the caller stops
        reading."""
        if self._caller is None or fd not in (self._caller.fd, self._input_fd):
            return None
        unread: set[Stream] = set()
        if fd == self._caller.fd:
            unread = self._caller.heard()
            if self._process.terminal and self._caller.terminal is not None:
                size = struct.pack("HHHH", *self._caller.terminal, 0, 0)
                fcntl.ioctl(self._process.stdout_fd, termios.TIOCSWINSZ, size)
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


def _read(process: Process, streams: dict[int, _Stream], open_fds: set[int], done_fd: int, attended: _Attended) -> None:
    """Read until the command has ended and its output is here: at end of file, or when nothing has come for `linger_s`
    after the end."""
    ended_at: float | None = None
    late_bytes = 0
    with selectors.DefaultSelector() as selector:
        for fd in (*streams, done_fd):
            selector.register(fd, selectors.EVENT_READ)
        attended.register(selector)
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
                unread = attended.take(fd, selector)
                if unread is not None:
                    for closed_fd in [open_fd for open_fd in open_fds if streams[open_fd].name in unread]:
                        selector.unregister(closed_fd)
                        open_fds.discard(closed_fd)
                        _hang_up(closed_fd)
                    continue
                if fd not in open_fds:
                    continue  # hung up just now
                size = streams[fd].take()
                if not size:
                    selector.unregister(fd)
                    open_fds.discard(fd)
                    continue
                late_bytes += size if ended_at is not None else 0


def _hang_up(fd: int) -> None:
    """Close a pipe's end, and keep its number taken, because the caller will close that number."""
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)


def _drain_forever(fd: int) -> None:
    """Keep reading a stream that a background process still holds, until it lets go."""

    def body() -> None:
        try:
            while os.read(fd, _PIECE_BYTES):
                pass
        finally:
            os.close(fd)

    threading.Thread(target=body, name="drain-output", daemon=True).start()
