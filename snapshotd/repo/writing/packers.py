"""The writer's side of the processes that make packs of plain files (packer.py).

They start when there is much to do, and end when they have been idle for a while. A killed process loses only data that
it has not made durable; the writer's caller then gets an error and does its job again.

A file's name decides which process gets it, so copies of a package meet in one of them and are stored once.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from snapshotd.errors import InternalError, error_of
from snapshotd.repo.base import ObjectKind, PlainFile
from snapshotd.repo.format.index import IndexEntry, PackRow
from snapshotd.repo.writing.packer import BATCH_BYTES, FILE_MAX_BYTES, FILES_MAX, FOLDERS_MAX, MESSAGE_MAX_BYTES

_log = logging.getLogger(__name__)
_MOST_PROCESSES = 4
_MOST_BATCHES = 3
"""Number of batches on their way to one process at a time."""
_MOST_FAILED = 6

Saved = str | tuple[str, list[tuple[bytes, int]]] | None
"""A content's id, of a large one with its chunks and their lengths; None: the file was no plain one."""
Told = Callable[[list[IndexEntry], list[PackRow]], object]


class Lost(Exception):  # noqa: N818
    """A process was killed, and everything that it had saved since the last flush is lost."""


class Packers:
    """As many processes as there are processors (at most four). Not thread-safe. After an error `drop` is due."""

    def __init__(self, argv: Sequence[str], told: Told) -> None:
        """`told`: called, in the middle of any method, with chunks that are in packs to come and with packs that have
        become durable."""
        self._argv = list(argv)
        self._told = told
        self._failed = 0
        """Number of failed starts since all processes were ready."""
        self._peers: list[_Peer | None] = [None] * min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
        self._open: dict[int, _Batch] = {}
        """By process: the batch that it gets when it is full, or when a caller waits for it."""

    def running(self) -> bool:
        """True if they were started, and have not ended for want of work."""
        return all([peer is not None and not peer.has_ended() for peer in self._peers])

    def ready(self) -> bool:
        """True if all processes can take requests. A process that does not run is started, without waiting: meanwhile
        the writer does the work. After some failed starts the writer stops starting them."""
        for number, peer in enumerate(self._peers):
            if (
                peer is not None and not peer.holds and not peer.batches and peer.has_ended()
            ):  # otherwise the waiting caller has to get the error
                self._failed += not peer.is_ready()
                peer.kill()
                peer = self._peers[number] = None
            if peer is None and self._failed < _MOST_FAILED:
                self._start(number)
        if not all([peer is not None and peer.is_ready() for peer in self._peers]):
            return False
        self._failed = 0
        return True

    def _start(self, number: int) -> None:
        try:
            self._peers[number] = _Peer(number, self._argv)
        except OSError as exc:
            self._failed += 1
            _log.warning("a process that helps with large steps cannot be started: %s", exc)

    def save(self, dir_fd: int, files: Sequence[PlainFile]) -> Callable[[], list[Saved]]:
        """Begin to save files of a directory, when all are `ready`. The returned function waits, and gives an answer
        for each file, in order. Lost, and the errors of a process (OutOfSpace, InternalError)."""
        answers: list[Saved] = [None] * len(files)
        waiting: dict[_Batch, None] = {}
        for place, file in enumerate(files):
            if file.size > FILE_MAX_BYTES:
                continue
            number = zlib.crc32(file.name) % len(self._peers)
            batch = self._open.get(number)
            if batch is not None and (batch.bytes + file.size > BATCH_BYTES or not batch.has_room(answers)):
                self._send(batch)
                batch = None
            if batch is None:
                batch = self._open[number] = _Batch(number)
            batch.add(dir_fd, file, answers, place)
            waiting[batch] = None
        return lambda: self._answers(waiting, answers)

    def begin_flush(self) -> None:
        """Have everything made durable, without waiting."""
        self._send_open()
        for peer in self._peers:
            while peer is not None and peer.batches:  # batches of an archive that was given up
                self._receive(peer)
            if peer is not None and peer.holds and not peer.flushing:
                peer.flushing = True
                peer.send({"flush": True})

    def flush(self) -> None:
        """Return when everything is durable, and `told`. Raises as `save`."""
        self.begin_flush()
        for peer in self._peers:
            while peer is not None and peer.flushing:
                self._receive(peer)

    def drop(self) -> None:
        """Give up everything that is not durable. The next files go to fresh processes."""
        for number, peer in enumerate(self._peers):
            if peer is not None:
                peer.kill()
                self._peers[number] = None
        for batch in self._open.values():
            batch.close()
        self._open.clear()

    close = drop

    def _send_open(self) -> None:
        for batch in list(self._open.values()):
            self._send(batch)

    def _send(self, batch: _Batch) -> None:
        peer = self._peers[batch.number]
        while peer is not None and len(peer.batches) >= _MOST_BATCHES:
            self._receive(peer)
            peer = self._peers[batch.number]
        del self._open[batch.number]
        try:
            if peer is None or not peer.is_ready():  # it has ended meanwhile: the files are left to the writer
                batch.done = True
                return
            peer.batches.append(batch)
            peer.send(batch.request(), batch.fds)
        finally:
            batch.close()

    def _answers(self, batches: Iterable[_Batch], answers: list[Saved]) -> list[Saved]:
        for batch in batches:
            if self._open.get(batch.number) is batch:
                self._send_open()  # the caller waits for the other batches next
            while not batch.done:
                peer = self._peers[batch.number]
                if peer is None or batch not in peer.batches:
                    raise InternalError("files were given up, and are waited for all the same")
                self._receive(peer)
        return answers

    def _receive(self, peer: _Peer) -> None:
        """Take one answer of a process, or note its end."""
        answer = peer.receive()
        if answer is None:
            self._drop_peer(peer)
            return
        if "error" in answer:
            raise error_of(answer)
        if peer.flushing and not peer.batches:
            peer.flushing = peer.holds = False
        else:
            peer.batches.popleft().answer(answer["files"])
            peer.holds |= bool(answer["objects"])
        entries: list[IndexEntry] = []
        for pack, offset, objects in answer.get("objects", ()):
            pack_id = bytes.fromhex(pack)
            for raw, stored, plain in objects:
                entries.append(
                    IndexEntry(bytes.fromhex(raw), ObjectKind.CHUNK, pack_id, offset, stored, plain, None, 0)
                )
                offset += stored
        self._told(entries, [PackRow(bytes.fromhex(pack), size, count) for pack, size, count in answer["packs"]])

    def _drop_peer(self, peer: _Peer) -> None:
        """Leave the files of a dead process to the writer. Lost: the process held objects that are not durable."""
        peer.kill()
        self._peers[peer.number] = None
        if peer.holds:
            raise Lost
        while peer.batches:
            peer.batches.popleft().done = True


class _Batch:
    """Files of some directories for one process."""

    __slots__ = ("_files", "_places", "bytes", "done", "fds", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.bytes = 0
        self.done = False
        self.fds: list[int] = []
        """The directories, until the batch is sent."""
        self._files: list[list[PlainFile]] = []
        """The files of each directory."""
        self._places: list[tuple[list[Saved], int]] = []
        """For each file, the place of its answer."""

    def has_room(self, answers: list[Saved]) -> bool:
        """True if there is room for one more file, whose directory's answers are these."""
        return len(self._places) < FILES_MAX and (len(self.fds) < FOLDERS_MAX or self._places[-1][0] is answers)

    def add(self, dir_fd: int, file: PlainFile, answers: list[Saved], place: int) -> None:
        if not self._places or self._places[-1][0] is not answers:
            self.fds.append(os.dup(dir_fd))
            self._files.append([])
        self._files[-1].append(file)
        self._places.append((answers, place))
        self.bytes += file.size

    def request(self) -> dict[str, Any]:
        folders = [[[file.name.hex(), file.inode, file.size] for file in files] for files in self._files]
        return {"device": self._files[0][0].device, "folders": folders}

    def answer(self, saved: list[Any]) -> None:
        """Put the answers into the lists of the callers."""
        for (answers, place), one in zip(self._places, saved, strict=True):
            answers[place] = (
                (one[0], [(bytes.fromhex(part), length) for part, length in one[1]]) if isinstance(one, list) else one
            )
        self.done = True

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()


class _Peer:
    """One process."""

    def __init__(self, number: int, argv: Sequence[str]) -> None:
        self.number = number
        self.batches: deque[_Batch] = deque()
        """Batches that the process has not answered."""
        self.holds = False
        """It has saved objects that are not durable."""
        self.flushing = False
        self._ready = False
        self._socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            try:
                self._process = subprocess.Popen(argv, stdin=its.fileno(), stdout=subprocess.DEVNULL)
            except OSError:
                self._socket.close()
                raise

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def is_ready(self) -> bool:
        """True if the process has said that it serves."""
        if not self._ready:
            with suppress(BlockingIOError, ConnectionResetError):
                self._ready = self._socket.recv(MESSAGE_MAX_BYTES, socket.MSG_DONTWAIT) != b""
        return self._ready

    def send(self, request: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Never waits for the process: the requests under way fit into the socket."""
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the process has ended; the caller that waits for the answer gets the error

    def receive(self) -> dict[str, Any] | None:
        """The next answer; None when the process has ended."""
        try:
            data = self._socket.recv(MESSAGE_MAX_BYTES)
        except ConnectionResetError:
            data = b""
        answer: dict[str, Any] | None = json.loads(data) if data else None
        return answer

    def kill(self) -> None:
        """Idempotent."""
        self._socket.close()
        self._process.kill()
        self._process.wait()
