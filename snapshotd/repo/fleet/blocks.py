"""Blocks of packs on a node's disk: what was read from the bucket, within a budget, least recently used ones go first.

    <directory>/<value>/<number>    a block: its seal, then its bytes
    <directory>/@tmp/               a block that is being written
    <directory>/used                bytes that all blocks take together (8 bytes)

A block is `BLOCK_BYTES` of a value from a multiple of that on; the last one of a value is shorter. Its seal is a hash under
the repository's key of the value's name, the number and the bytes: a block that was cut off, swapped or damaged is none,
and comes from the bucket again. So nothing is synced. A value never changes, so no block is ever stale.

All processes of a node share the directory. Every change is made under a lock (`flock` of `used`), so the account is exact
but for a process that was killed within a change: `recount` mends it. The age of a block is the time of its file.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import blake3

BLOCK_BYTES = 256 << 10
"""A file of less is one chunk (format/chunks.py), and neighbours of a tree lie beside each other: one request brings what a
listing needs next. At 1 Gbit/s it is 2 ms beside some 30 ms of a bucket's answer."""
BUDGET_SHARE = 10
"""Part of the file system that the blocks may take, unless the settings name a number of bytes."""
_ROOM_SHARE = 10
"""Part of the budget that an eviction frees beyond what is needed, because it looks at every block."""
_SPARE_BYTES, _SPARE_SHARE = 512 << 20, 16
"""Space that stays free: from here on the daemon keeps its reserve in full (engine/storage/reserve.py); on a small disk a
part of it."""
_SEAL_BYTES = 32
_UNIT_BYTES = 4096
_TOUCH_NS = 10_000_000_000
"""Reads of a block within this time count as one, since each is a write to the inode."""
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_log = logging.getLogger(__name__)


class _Block(NamedTuple):
    used_ns: int
    size: int
    path: str


class DiskBlocks:
    """See the module's text. Thread-safe; any number of them, in any processes. No method fails for the disk's sake: a block
    that cannot be kept is not kept."""

    def __init__(self, directory: Path, key: bytes, budget_bytes: int | None = None) -> None:
        """The directory is made if it is missing. `budget_bytes`: None: a part of the file system. OSError."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        (directory / "@tmp").mkdir(mode=0o700, exist_ok=True)
        self._directory = str(directory)
        st = os.statvfs(directory)
        self.budget_bytes = _budget(st) if budget_bytes is None else budget_bytes
        self._spare = min(_SPARE_BYTES, st.f_blocks * st.f_frsize // _SPARE_SHARE)
        self._seal_key = blake3.blake3(key, derive_key_context="snapshotd 1 block of a node's cache").digest()
        self._lock = threading.Lock()
        self._account = os.open(directory / "used", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if os.fstat(self._account).st_size != 8:
            self.recount()

    def close(self) -> None:
        with self._lock:
            if self._account >= 0:
                os.close(self._account)
            self._account = -1

    def used_bytes(self) -> int:
        """Disk use of all blocks."""
        return int.from_bytes(os.pread(self._account, 8, 0), "little")

    def load(self, value: str, number: int) -> bytes | None:
        """A block's bytes, verified; None if it is not here."""
        path = self._path(value, number)
        try:
            fd = os.open(path, _READ)
        except OSError:
            return None
        try:
            st = os.fstat(fd)
            data = os.read(fd, _SEAL_BYTES + BLOCK_BYTES + 1)
            if time.time_ns() - st.st_mtime_ns > _TOUCH_NS:
                os.utime(fd)
        except OSError as exc:
            _log.warning("a block of the cache cannot be read: %s", exc)
            data = b""
        finally:
            os.close(fd)
        if data[:_SEAL_BYTES] == self._seal(value, number, data[_SEAL_BYTES:]):
            return data[_SEAL_BYTES:]
        _log.warning("a block of the cache is damaged and removed: %s", path)
        self.forget(value)
        return None

    def save(self, value: str, number: int, data: bytes) -> None:
        """Keep a block, if the budget and the disk have room for it after older ones went."""
        path, size = self._path(value, number), _disk_use(_SEAL_BYTES + len(data))
        try:
            with self._changing() as used:
                if os.path.exists(path) or not self._has_room(used, size):
                    return
                temporary = f"{self._directory}/@tmp/{os.getpid()}"
                with open(temporary, "wb", buffering=0) as file:
                    for part in (self._seal(value, number, data), data):
                        if file.write(part) != len(part):
                            return  # the disk is full
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                os.rename(temporary, path)
                used[0] += size
        except OSError as exc:
            _log.info("a block is not kept: %s", exc)

    def forget(self, value: str) -> bool:
        """Remove the blocks of a value. False if there are none."""
        folder = os.path.dirname(self._path(value, 0))
        try:
            with self._changing() as used:
                found = list(_blocks(folder))
                shutil.rmtree(folder, ignore_errors=True)
                used[0] -= sum(one.size for one in found)
                return bool(found)
        except OSError as exc:
            _log.warning("blocks of the cache cannot be removed: %s", exc)
            return False

    def recount(self) -> None:
        """Make the account right after a process was killed, and bring the blocks within their budget."""
        with suppress(OSError), self._changing() as used:
            self._evict(used, 0)

    def give_room(self) -> None:
        """Remove blocks where others have filled the disk."""
        with suppress(OSError), self._changing() as used:
            self._has_room(used, 0)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _has_room(self, used: list[int], size: int) -> bool:
        """True if a block of that size may be added, after an eviction if need be."""
        if used[0] + size <= self.budget_bytes and self._free() - size >= self._spare:
            return True
        if size <= self.budget_bytes and used[0]:
            self._evict(used, size)
        return used[0] + size <= self.budget_bytes and self._free() - size >= self._spare

    def _evict(self, used: list[int], size: int) -> None:
        """Count, and remove the blocks that were not used for longest until there is some room."""
        for name in os.listdir(f"{self._directory}/@tmp"):
            os.unlink(f"{self._directory}/@tmp/{name}")  # a killed process left it: this one has the lock
        found = [one for folder in os.scandir(self._directory) if folder.is_dir() for one in _blocks(folder.path)]
        total = sum(one.size for one in found)
        over = total + size - self.budget_bytes
        short = self._spare + size - self._free()
        if over > 0 or short > 0:
            need = max(over, short) + self.budget_bytes // _ROOM_SHARE
            for one in sorted(found):
                if need <= 0:
                    break
                os.unlink(one.path)
                need -= one.size
                total -= one.size
                with suppress(OSError):
                    os.rmdir(os.path.dirname(one.path))  # with its last block
        used[0] = total

    def _free(self) -> int:
        st = os.statvfs(self._directory)
        return st.f_bavail * st.f_frsize

    @contextmanager
    def _changing(self) -> Iterator[list[int]]:
        """The lock, and the account as the one number of a list. OSError: it was closed."""
        with self._lock:
            fcntl.flock(self._account, fcntl.LOCK_EX)
            try:
                used = [self.used_bytes()]
                before = used[0]
                try:
                    yield used
                finally:
                    if used[0] != before or not before:
                        os.pwrite(self._account, max(0, used[0]).to_bytes(8, "little"), 0)
            finally:
                fcntl.flock(self._account, fcntl.LOCK_UN)

    def _path(self, value: str, number: int) -> str:
        return f"{self._directory}/{blake3.blake3(value.encode()).hexdigest(16)}/{number}"

    def _seal(self, value: str, number: int, data: bytes) -> bytes:
        return blake3.blake3(f"{value} {number} ".encode() + data, key=self._seal_key).digest()


def measure(directory: Path, budget_bytes: int | None = None) -> tuple[int, int]:
    """Disk use of the blocks in a directory, and their budget, for a process that does not open them. Changes nothing. OSError."""
    used = int.from_bytes((directory / "used").read_bytes(), "little")
    return used, _budget(os.statvfs(directory)) if budget_bytes is None else budget_bytes


def _budget(st: os.statvfs_result) -> int:
    return st.f_blocks * st.f_frsize // BUDGET_SHARE


def _blocks(folder: str) -> Iterator[_Block]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                st = entry.stat(follow_symlinks=False)
                yield _Block(st.st_mtime_ns, _disk_use(st.st_size), entry.path)
    except FileNotFoundError:
        return


def _disk_use(size: int) -> int:
    return -(-size // _UNIT_BYTES) * _UNIT_BYTES
