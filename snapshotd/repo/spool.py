"""Blobs as files, one per content.

    <directory>/key                 the key of the identity hash, mode 0600
    <directory>/blobs/ab/<blob id>  one blob; `ab` are the first two characters of its id
    <directory>/tmp/                blobs being written; emptied at open, so one process at a time may own a directory

A blob's id is the keyed BLAKE3-256 of its plain bytes, in hexadecimal. The key is 32 random bytes per repository:
an agent that controls the content can neither foretell an id nor search for two contents with the same one.

`spool_format.py` has the bytes of a blob file, `key.py` those of the key file.

Write order: the file is complete under its temporary name before it gets its final one; so after `kill -9` a blob is
whole or not there. After power loss a blob that was not flushed may be missing, empty or cut: loading it says DataLoss,
and saving the same content again replaces it.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import blake3
import xxhash
import zstandard

from snapshotd.errors import NO_ROOM, DataLoss, InternalError, NotFound, OutOfSpace
from snapshotd.kernel import files
from snapshotd.repo import spool_format as blob_format
from snapshotd.repo.key import load_key
from snapshotd.repo.spool_format import HEADER_BYTES, PIECE_BYTES, Header
from snapshotd.types import BlobID

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_BLOB_ID = re.compile(r"[0-9a-f]{64}")
_SHORT_BYTES = 128 << 10
"""An output up to this size is compressed in memory at once: nearly every output, and it takes some MiB less memory
than a stream."""
_MAX_HELD = 16
"""Number of new files that stay open for `flush` to sync one by one (each 1-5 ms); with more, one syncfs syncs them
all."""


class Spool:
    """Contents that were captured and are not stored yet. A blob's id is the content's id in the repository of the same
    key. The only object of its directory, in one process at a time.

    Errors: NotFound (no such blob), DataLoss (its bytes are damaged), OutOfSpace (disk full; nothing was saved).
    Thread-safe.
    """

    def __init__(self, directory: Path, *, owner: bool = True) -> None:
        """Open the spool at `directory`, creating it (with its parents, mode 0700) if there is none. A process that is
        not the owner may only read. Errors: DataLoss (the key is damaged, or missing while there are blobs),
        OutOfSpace."""
        self.directory = directory
        self._lock = threading.Lock()
        self._flushing = threading.Lock()
        self._held: dict[BlobID, int] = {}
        self._sync_all = True  # an earlier process may have left blobs that it did not flush
        self._lost: str | None = None
        self._fds: list[int] = []
        try:
            with _disk(f"the repository {directory}"):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._root = self._open(directory)
                self._key = load_key(directory)
                for name in ("blobs", "tmp"):
                    (directory / name).mkdir(mode=0o700, exist_ok=True)
                self._blobs, self._tmp = self._open(directory / "blobs"), self._open(directory / "tmp")
                for name in os.listdir(self._tmp) if owner else ():
                    os.unlink(name, dir_fd=self._tmp)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> int:
        self._fds.append(os.open(path, files.DIR_FLAGS))
        return self._fds[-1]

    def close(self) -> None:
        """Release descriptors. Idempotent. Flushes nothing. Any other call afterwards is a defect."""
        with self._flushing, self._lock:
            for fd in (*self._held.values(), *self._fds):
                os.close(fd)
            self._held.clear()
            self._fds.clear()
            self._root = self._blobs = self._tmp = -1  # a late user must not meet new files under these numbers

    def writer(self) -> BlobWriter:
        """Begin a blob. Memory use is constant for any size."""
        return BlobWriter(self)

    def save_blob(self, data: bytes) -> BlobID:
        """Store bytes that are in memory already."""
        with self.writer() as writer:
            writer.write(data)
            return writer.save()

    def load_blob(self, blob_id: BlobID) -> Iterator[bytes]:
        """The blob's plain bytes in pieces of at most 1 MiB. NotFound comes at the call; a blob that is removed
        afterwards is still read whole. Every byte is checked: DataLoss is raised at the latest when the end is reached,
        and always before wrong data would pass as complete."""
        pieces = self._pieces(blob_id)
        next(pieces)  # opens the file: the archive may remove it at any time
        return pieces

    def _pieces(self, blob_id: BlobID) -> Iterator[bytes]:
        """Yield an empty piece once the file is open, then its bytes. Each piece waits until the next one is read, so
        the last one comes only when everything was found right."""
        where = self._where(blob_id)
        plain, held = blake3.blake3(key=self._key), b""
        with files.closing_fd(self._open_blob(blob_id)) as fd:
            yield b""
            with blob_format.readable(where):
                for piece in blob_format.unpack(fd, blob_format.read_header(fd, where)):
                    plain.update(piece)
                    if held:
                        yield held
                    held = piece
        if plain.hexdigest() != blob_id:
            raise blob_format.damage_error(where, "its content is another blob's")
        if held:
            yield held

    def size_bytes(self, blob_id: BlobID) -> int:
        """Plain size. NotFound."""
        with files.closing_fd(self._open_blob(blob_id)) as fd, blob_format.readable(self._where(blob_id)):
            return blob_format.read_header(fd, self._where(blob_id)).plain_bytes

    def _open_blob(self, blob_id: BlobID) -> int:
        try:
            return os.open(_path(blob_id), _READ, dir_fd=self._blobs)
        except FileNotFoundError as exc:
            raise NotFound(f"there is no blob {blob_id} in the repository {self.directory}") from exc

    def _where(self, blob_id: BlobID) -> str:
        return f"blob {blob_id} ({self.directory / 'blobs' / _path(blob_id)})"

    def blobs(self) -> Iterator[BlobID]:
        """Every blob in the spool."""
        for group in sorted(os.listdir(self._blobs)):
            for name in sorted(os.listdir(self.directory / "blobs" / group)):
                if _BLOB_ID.fullmatch(name):
                    yield BlobID(name)

    def remove(self, blob_id: BlobID) -> None:
        """Delete a blob. Not an error when it is missing."""
        try:
            os.unlink(_path(blob_id), dir_fd=self._blobs)
        except (FileNotFoundError, NotFound):
            return

    def _adopt(self, temporary: str, fd: int, blob_id: BlobID) -> None:
        """Give a complete temporary file its final name, unless an intact file has it already. Takes `fd` over, in any
        case."""
        path = _path(blob_id)
        keep = False
        try:
            try:
                os.mkdir(path[:2], 0o700, dir_fd=self._blobs)
            except FileExistsError:
                pass
            if not self._rename_new(temporary, path):
                existing = self._open_intact(blob_id)
                if existing is not None:
                    os.unlink(temporary, dir_fd=self._tmp)
                    os.close(fd)
                    fd = existing  # the earlier one may not be durable yet
                else:  # durable first: renaming over an older file could leave an empty one after power loss
                    os.fsync(fd)
                    os.rename(temporary, path, src_dir_fd=self._tmp, dst_dir_fd=self._blobs)
            with self._lock:
                stale = self._held.pop(blob_id, None)  # descriptor of a file that was removed or replaced since
                keep = not self._sync_all and len(self._held) < _MAX_HELD
                if keep:
                    self._held[blob_id] = fd
                self._sync_all |= not keep
            if stale is not None:
                os.close(stale)
        finally:
            if not keep:
                os.close(fd)

    def _rename_new(self, temporary: str, path: str) -> bool:
        """False when there is a file at `path` already."""
        try:
            files.rename_no_replace(self._tmp, temporary.encode(), self._blobs, path.encode())
        except FileExistsError:
            return False
        return True

    def _open_intact(self, blob_id: BlobID) -> int | None:
        """The stored file, open, if it passes its checksums (not the identity hash: this is about damage, and 10 GB/s
        fast)."""
        where = self._where(blob_id)
        try:
            fd = self._open_blob(blob_id)
        except NotFound:
            return None  # removed just now
        intact = False
        try:
            with blob_format.readable(where):
                blob_format.check_frame(fd, blob_format.read_header(fd, where))
            intact = True
        except DataLoss:
            return None
        finally:
            if not intact:
                os.close(fd)
        return fd

    def flush(self) -> None:
        """Return when everything saved so far is durable against power loss: sync the new files and their directories; after a
        start, or when there are many, the whole file system (syncfs). A failure is fatal for all unflushed blobs: OSError.

        The files and the directory are open since before they were written, so no write error goes unseen. After a
        failure every later flush fails too, because the kernel forgets the pages it could not write: a second fsync
        would say that all is well.
        """
        with self._flushing:
            if self._lost is not None:
                raise OSError(
                    errno.EIO,
                    f"blobs of {self.directory} were not made durable earlier ({self._lost}): restart after a disk check",
                )
            with self._lock:
                held, sync_all = self._held, self._sync_all
                self._held, self._sync_all = {}, False
            try:
                if sync_all:
                    files.sync_filesystem(self._root)
                elif held:
                    for fd in held.values():
                        os.fsync(fd)
                    for group in {blob_id[:2] for blob_id in held}:
                        files.sync_dir(self.directory / "blobs" / group)
                    os.fsync(self._blobs)
            except OSError as exc:
                self._lost = exc.strerror
                raise
            finally:
                for fd in held.values():
                    os.close(fd)


class BlobWriter:
    """A blob being written: one file below tmp/, made with the first bytes that are written to it. Use as a context manager:
    leaving it by an exception discards the blob. Not for several threads at once."""

    def __init__(self, repository: Spool) -> None:
        self.size_bytes = 0
        """Plain bytes taken so far."""
        self._repository = repository
        self._name = secrets.token_hex(16)
        self._plain = blake3.blake3(key=repository._key)
        self._frame = xxhash.xxh3_128()
        self._frame_bytes = 0
        self._short = bytearray()
        """All that was written, while it is short."""
        self._zstd: zstandard.ZstdCompressionObj | None = None
        self._fd = -1
        self._open = True

    def __enter__(self) -> BlobWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def write(self, data: bytes) -> None:
        """Append plain bytes. OutOfSpace."""
        self._check_open()
        view = memoryview(data)
        with self._space():
            for start in range(0, len(view), PIECE_BYTES):
                piece = view[start : start + PIECE_BYTES]
                self._plain.update(piece)
                self.size_bytes += len(piece)
                self._pack(piece)

    def _pack(self, piece: memoryview) -> None:
        if self._zstd is None:
            self._short += piece
            if len(self._short) <= _SHORT_BYTES:
                return
            self._zstd, piece = blob_format.compressor(), memoryview(bytes(self._short))
            self._short.clear()
        self._append(self._zstd.compress(piece))

    def _append(self, packed: bytes) -> None:
        if self._fd < 0:
            self._fd = os.open(self._name, _CREATE, 0o600, dir_fd=self._repository._tmp)
            os.lseek(self._fd, HEADER_BYTES, os.SEEK_SET)
        self._frame.update(packed)
        self._frame_bytes += len(packed)
        _write_all(self._fd, packed)

    def save(self) -> BlobID:
        """Finish: the blob is complete and visible (it survives kill -9; power loss after `flush`). Returns its id.
        Call once."""
        self._check_open()
        with self._space():
            self._append(blob_format.compress(self._short) if self._zstd is None else self._zstd.flush())
            header = Header(self.size_bytes, self._frame_bytes, self._frame.digest()).encode()
            if os.pwrite(self._fd, header, 0) != len(header):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            blob_id = BlobID(self._plain.hexdigest())
            fd, self._fd, self._open = self._fd, -1, False
            try:
                self._repository._adopt(self._name, fd, blob_id)
            except OSError:
                self._unlink()
                raise
        self._let_go()
        return blob_id

    def _let_go(self) -> None:
        """Free the writer's memory: a caller may keep its object for long."""
        self._zstd = None
        self._short.clear()

    def discard(self) -> None:
        """Drop it. Not an error after `save`, which it does not undo."""
        self._let_go()
        self._open = False
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._unlink()

    def _unlink(self) -> None:
        try:
            os.unlink(self._name, dir_fd=self._repository._tmp)
        except FileNotFoundError:
            pass

    def _check_open(self) -> None:
        if not self._open:
            raise InternalError("a blob was written to after it was saved or discarded")

    @contextmanager
    def _space(self) -> Iterator[None]:
        """If the block fails, nothing is left behind."""
        try:
            with _disk(f"a blob in {self._repository.directory}"):
                yield
        except BaseException:
            self.discard()
            raise


def _path(blob_id: BlobID) -> str:
    """Path of a blob below blobs/. NotFound for a text that is no blob id (it could be any path)."""
    if not _BLOB_ID.fullmatch(blob_id):
        raise NotFound(f"{blob_id[:80]!r} is not the id of a blob")
    return f"{blob_id[:2]}/{blob_id}"


def _write_all(fd: int, data: bytes) -> None:
    done = 0
    while done < len(data):
        done += os.write(fd, data[done:] if done else data)


@contextmanager
def _disk(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        if exc.errno in NO_ROOM:
            raise OutOfSpace(
                f"{what} cannot be written because the disk is full: free some space and try again"
            ) from exc
        raise
