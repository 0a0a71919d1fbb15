"""The events of runs: one append-only file of JSON lines per trajectory, which any number of readers can follow.

A reader that comes late or comes back reads from the beginning; a slow reader holds up nothing else; memory does not
grow with output. After `max_bytes` of one run only snapshots, warnings and the end are recorded. The whole output stays
with the exit snapshot: an event `rest`, which no follower sees, names that snapshot, and `with_whole_output` takes the missing
output from there.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from snapshotd.engine.base import Stream, output_event
from snapshotd.engine.watch import Event, Watch
from snapshotd.types import TrajectoryID

_PIECE_BYTES = 64 << 10
_LOOK_S = 0.5
"""A follower whose reader is gone ends within this time."""
Wait = bool | Callable[[], bool]
"""A follower waits for more: always, never, or as long as this is true."""
_FULL = {
    "event": "warning",
    "message": "more output than is followed live; what comes now is shown when the program has ended",
}


class EventLog:
    """The event log of one run. Thread-safe."""

    def __init__(self, path: Path, max_bytes: int, watch: Watch) -> None:
        """`watch` is told of the run's end."""
        self._path, self._max_bytes, self._watch = path, max_bytes, watch
        self._file: BinaryIO | None = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by `finish`
        self._changed = threading.Condition()
        self._bytes = _without_half_a_line(path)
        self.left_out: Counter[str] = Counter()
        """Bytes of output that this log has not, by stream of the program or "calls", since it was opened and before
        `rest`."""
        self.finished = False

    @property
    def full(self) -> bool:
        """True if the log has reached its size limit: no more output is recorded."""
        return self._bytes >= self._max_bytes

    def append(self, event: Event) -> None:
        """Record one event. Not an error after the end (a late line of output is dropped). OSError, and nothing of it is
        recorded: the disk is full."""
        line = json.dumps(event, separators=(",", ":")).encode() + b"\n"
        with self._changed:
            if self._file is None:
                return
            if event["event"] == "output" and self.full:
                self.left_out[_source(event)] += _size(event)
                return
            if event["event"] == "rest":
                self.left_out["stdout"] = self.left_out["stderr"] = 0
            elif event["event"] != "finished" and not self.full and self._bytes + len(line) >= self._max_bytes:
                line += json.dumps(_FULL).encode() + b"\n"
            self._write(line)
            if event["event"] == "finished":
                self.finished = True
                self._file.close()
                self._file = None
                self._watch.publish(event)
            self._changed.notify_all()

    def _write(self, line: bytes) -> None:
        """Write a whole line, or nothing: behind half a line nothing could be read any more. OSError."""
        assert self._file is not None
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # a full disk takes a part without an error
        except OSError:
            self._file.truncate(self._bytes)
            raise
        self._bytes += len(line)

    def follow(self, *, wait: Wait) -> Iterator[Event]:
        """All events from the beginning; until `finished`, as long as `wait` is true."""
        at, held = 0, b""
        with open(self._path, "rb", buffering=0) as f:
            while True:
                with self._changed:
                    end = self._bytes  # a line behind it may be taken back
                    if at == end:
                        if self.finished or not (wait if isinstance(wait, bool) else wait()):
                            return
                        self._changed.wait(_LOOK_S)
                        continue
                piece = f.read(min(_PIECE_BYTES, end - at))
                if not piece:
                    return  # another run has the file
                at += len(piece)
                *lines, held = (held + piece).split(b"\n")
                yield from map(json.loads, lines)


def _without_half_a_line(path: Path) -> int:
    """Cut off the half line that a killed daemon left at the end. Returns the length of the rest, in bytes."""
    with open(path, "rb+") as f:
        end = f.seek(0, os.SEEK_END)
        while end:
            begin = max(0, end - _PIECE_BYTES)
            f.seek(begin)
            line_end = f.read(end - begin).rfind(b"\n")
            if line_end >= 0:
                end = begin + line_end + 1
                break
            end = begin
        f.truncate(end)
    return end


def with_whole_output(events: Iterable[Event], recorded: Callable[[str, Stream], Iterator[bytes]]) -> Iterator[Event]:
    """These events, with the output that the log left out in place of `rest`. `recorded`: the output that a snapshot has.

    The events come out equal each time: a follower that asks again compares them.
    """
    shown: dict[Stream, int] = {"stdout": 0, "stderr": 0}
    for event in events:
        if event["event"] == "rest":
            for stream, size in shown.items():
                for piece in _behind(recorded(event["snapshot"], stream), size):
                    yield output_event(stream, piece)
            continue
        if event["event"] == "output" and "call" not in event:
            shown[event["stream"]] += _size(event)
        yield event


def _source(event: Event) -> str:
    return "calls" if "call" in event else event["stream"]


def _size(event: Event) -> int:
    encoded: str = event["data_b64"]
    return len(encoded) // 4 * 3 - encoded[-2:].count("=")


def _behind(pieces: Iterator[bytes], passed: int) -> Iterator[bytes]:
    """Yields the bytes after the first `passed`, in pieces of one size, however the input is cut."""
    held = bytearray()
    for piece in pieces:
        held += piece[passed:]
        passed -= min(passed, len(piece))
        while len(held) >= _PIECE_BYTES:
            yield bytes(held[:_PIECE_BYTES])
            del held[:_PIECE_BYTES]
    if held:
        yield bytes(held)


class EventLogs:
    """The logs of all runs of a state directory, and the watch over all of them. `directory` is made if missing; after
    `max_bytes` a log takes no more output. A log's name is its trajectory's id, or any path below `directory`."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory, self._max_bytes = directory, max_bytes
        self.watch = Watch()
        directory.mkdir(mode=0o700, exist_ok=True)
        self._live: dict[str, EventLog] = {}
        self._lock = threading.Lock()

    def begin(self, trajectory: str, *, afresh: bool = False) -> EventLog:
        """Start (or go on with) the log of a run. `afresh`: a new run; the events of the one before are forgotten."""
        with self._lock:
            log = self._live.get(trajectory)
            if log is None or log.finished or afresh:
                if afresh:
                    self._path(trajectory).unlink(missing_ok=True)
                log = self._live[trajectory] = EventLog(self._path(trajectory), self._max_bytes, self.watch)
            return log

    def tell(self, trajectory: TrajectoryID, event: Event) -> None:
        """Record an event that outside tools wait for, too: in the trajectory's log, if a run of it goes on, and to
        every watcher."""
        log = self.live(trajectory)
        if log is not None:
            log.append(event)
        self.watch.publish({**event, "trajectory": trajectory})

    def tell_of_change(self, trajectory: TrajectoryID) -> None:
        """Tell every watcher that a trajectory began, changed its status, or is gone."""
        self.watch.publish({"event": "trajectory", "trajectory": trajectory})

    def live(self, trajectory: str) -> EventLog | None:
        with self._lock:
            return self._live.get(trajectory)

    def follow(self, trajectory: str, *, wait: Wait) -> Iterator[Event]:
        """The events of a trajectory's run, as `EventLog.follow`; none if it never ran an agent."""
        log = self.live(trajectory)
        if log is not None:
            yield from log.follow(wait=wait)
            return
        path = self._path(trajectory)
        if path.exists():
            with open(path, "rb") as f:
                for line in f:
                    if line.endswith(b"\n"):  # a crash can leave half a line at the end
                        yield json.loads(line)

    def remove(self, trajectory: str) -> None:
        """Forget a run's events. Not an error when there are none."""
        with self._lock:
            self._live.pop(trajectory, None)
        self._path(trajectory).unlink(missing_ok=True)

    def let_go(self, trajectory: str) -> None:
        """Forget a log that is finished: from now on it is read from the file."""
        with self._lock:
            self._live.pop(trajectory, None)

    def _path(self, trajectory: str) -> Path:
        return self._directory / f"{trajectory}.ndjson"
