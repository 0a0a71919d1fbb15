"""A process that makes packs of plain files, beside the repository's writer (packers.py), which alone writes the index.

Python lets one thread of a process run at a time, and storing many files of some ten KiB is as much Python as it is
hashing and compressing.

Requests and answers are JSON objects, one a packet, answered in order. Before the first request it says {"ready":
true}.

    {"device", "folders": [[[name in hexadecimal, inode, size], ...], ...]} and the directories' descriptors
        "files": for each of them, content id, [content id, [[chunk id, length], ...]] or null: the writer has to look
        itself
        "objects": [[pack, offset, [[chunk id, stored, plain], ...]], ...], the ones that no index knows, one behind the
        other in packs to come
        "packs": [[id, bytes, objects], ...], the ones that have become durable
    {"flush": true}
        "packs": all others
    {"error": {"code", "message"}}, and the process ends

It ends when the writer has gone, or has sent no request for a while. Data that it has written and that no index knows
are garbage for the garbage collection.
"""

from __future__ import annotations

import io
import json
import os
import select
import socket
import stat
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NoReturn

from snapshotd.errors import InternalError, OutOfSpace, ServiceAwayError, SnapshotdError, Unavailable
from snapshotd.kernel import memory
from snapshotd.repo.base import ObjectKind
from snapshotd.repo.format import chunks, compress, encode
from snapshotd.repo.format.encode import Job
from snapshotd.repo.format.pack import PACK_BYTES
from snapshotd.repo.reading.reader import PackReader
from snapshotd.repo.writing.pending import Building, put_pack

MESSAGE_MAX_BYTES = 128 << 10
"""Less than a socket takes at once (net.core.wmem_default)."""
FILES_MAX, FOLDERS_MAX, BATCH_BYTES = 128, 16, 8 << 20
"""Limits of one request, which costs about as much as five files; a longer file comes alone."""
FILE_MAX_BYTES = 16 << 20
"""Its chunks have to fit into a message."""
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_MAX_PUTS = 2
_PACK_BYTES = PACK_BYTES // 2
"""The last one is all that a flush has to wait for."""
_CHECK_EVERY = 16
"""One in this number of batches is decompressed again before it counts."""
_IDLE_S = 10.0


class Packer:
    """The work of one process. Contents in one pack are chunks that refer to nothing, so packs may become durable in
    any order."""

    def __init__(self, reader: PackReader) -> None:
        self._reader = reader
        self._fresh: set[bytes] = set()
        """Objects in packs that no index knows yet."""
        self._building: Building | None = None
        self._putter = ThreadPoolExecutor(_MAX_PUTS, "packer-put")
        self._puts: deque[tuple[Future[None], list[Any]]] = deque()
        self._batches = 0

    @property
    def clean(self) -> bool:
        """True if nothing is lost when the process ends."""
        return not self._fresh

    def files(self, dir_fds: list[int], request: dict[str, Any]) -> dict[str, Any]:
        """Save the contents of files."""
        wanted: dict[bytes, bytes] = {}
        found: list[str | list[Any] | None] = []
        for dir_fd, files in zip(dir_fds, request["folders"], strict=True):
            for name, inode, size in files:
                data = _read(dir_fd, bytes.fromhex(name), request["device"], inode, size)
                found.append(None if data is None else self._content(data, wanted))
        return {"files": found, "objects": self._save(wanted), "packs": self._durable(_MAX_PUTS)}

    def flush(self) -> dict[str, Any]:
        """Return when all that was saved is durable."""
        self._finish_pack()
        packs = self._durable(0)
        self._fresh.clear()
        return {"packs": packs}

    def _content(self, data: bytes, wanted: dict[bytes, bytes]) -> str | list[Any]:
        content = self._reader.identity.content(data)
        if len(data) <= chunks.WHOLE_BYTES:
            wanted[content] = data
            return content.hex()
        source = io.BytesIO(data)
        parts = []
        for chunk in chunks.cut_chunks(source.read(chunks.WHOLE_BYTES + 1), source.read):
            raw = self._reader.identity.content(chunk)
            wanted[raw] = chunk
            parts.append([raw.hex(), len(chunk)])
        return [content.hex(), parts]

    def _save(self, wanted: dict[bytes, bytes]) -> list[list[Any]]:
        index = self._reader.open_index()
        new = [raw for raw in wanted if raw not in self._fresh]
        known = index.find_many(new) if index is not None else {}
        self._batches += 1
        check = self._batches % _CHECK_EVERY == 1
        level = compress.BULK_LEVEL
        jobs = [Job(ObjectKind.CHUNK, raw, wanted[raw], None, None, level, check) for raw in new if raw not in known]
        placed: list[list[Any]] = []
        for frame in encode.encode_all(jobs):
            if self._building is None or not placed:
                self._building = self._building or Building()
                placed.append([self._building.id.hex(), self._building.bytes, []])
            self._building.add(frame, 0)
            self._fresh.add(frame.id)
            placed[-1][2].append([frame.id.hex(), frame.stored, frame.plain])
            if self._building.bytes >= _PACK_BYTES:
                self._finish_pack()
        return placed

    def _finish_pack(self) -> None:
        building, self._building = self._building, None
        if building is not None:
            row = building.row()
            self._puts.append(
                (self._putter.submit(put_pack, self._reader.store, building), [row.id.hex(), row.bytes, row.objects])
            )

    def _durable(self, leave: int) -> list[list[Any]]:
        """Packs that have become durable; waits while there are more on the way than may be left."""
        done = []
        while len(self._puts) > leave or (self._puts and self._puts[0][0].done()):
            future, row = self._puts[0]
            future.result()
            self._puts.popleft()
            done.append(row)
        return done


def _read(dir_fd: int, name: bytes, device: int, inode: int, size: int) -> bytes | None:
    """The content of a file that is nothing but its content: no attributes, no holes, and the one that was listed."""
    try:
        fd = os.open(name, _FILE_FLAGS, dir_fd=dir_fd)
    except OSError:
        return None
    try:
        now = os.fstat(fd)
        listed = stat.S_ISREG(now.st_mode) and (now.st_dev, now.st_ino, now.st_size) == (device, inode, size)
        if not listed or os.listxattr(fd) or os.lseek(fd, 0, os.SEEK_HOLE) < size:
            return None
        data = os.pread(fd, size, 0)
        return data if len(data) == size else None
    except OSError:
        return None
    finally:
        os.close(fd)


def serve(reader: PackReader) -> None:
    """Be such a process: answer requests from standard input until the writer is gone or idle for long."""
    memory.keep_freed()
    memory.collect_rarely()
    with socket.socket(fileno=os.dup(0)) as writer, suppress(ConnectionError):  # the writer was killed
        packer = Packer(reader)
        writer.send(b'{"ready": true}')
        _serve(writer, packer)


def _serve(writer: socket.socket, packer: Packer) -> None:
    while select.select([writer], [], [], _IDLE_S if packer.clean else None)[0]:
        data, fds, _, _ = socket.recv_fds(writer, MESSAGE_MAX_BYTES, FOLDERS_MAX)
        if not data:
            return
        try:
            request = json.loads(data)
            answer = packer.flush() if "flush" in request else packer.files(fds, request)
        except OutOfSpace as exc:
            _fail(writer, exc)
        except ServiceAwayError as exc:
            _fail(writer, Unavailable(str(exc)))
        except (SnapshotdError, OSError) as exc:
            _fail(writer, InternalError(f"a process that makes packs cannot go on: {exc}"))
        finally:
            for fd in fds:
                os.close(fd)
        writer.send(json.dumps(answer).encode())


def _fail(writer: socket.socket, error: SnapshotdError) -> NoReturn:
    try:
        writer.send(json.dumps(error.as_json()).encode())
    except OSError:
        pass  # the writer has gone
    os._exit(error.exit_code)
