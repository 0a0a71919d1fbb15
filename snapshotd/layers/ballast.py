"""Keeps the layers' image from ever meeting a full disk below itself.

The image is a file with holes, and the XFS in it knows nothing of them: where the disk is full, a write into a hole fails
after the program that wrote has long gone on, and XFS loses data or stops. So XFS is left only as much free space as the
disk has given already. The rest is taken by one file in it, the ballast, whose blocks are never written:

    image    | used | free: allocated ahead | ballast: holes |
    disk     | used | allocated             | not taken      |

Every block outside of the ballast is allocated below, so a write there needs no space. A thread makes the ballast smaller
before the free space is used up (first the blocks below, then the ballast's end is cut off), and larger when layers went
(first the ballast, then holes are punched: this gives the space back to the disk). On a full disk XFS itself is full, and
whoever writes is told so.

That much is kept ahead as can be written at once, before the thread has looked again: half of what the disk has left, up
to 1 GiB; on a disk with more than 32 GiB left a thirty-second of it, up to `MAX_BYTES`. So many daemons on a disk do not
fill it with the space that each keeps.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

from snapshotd.errors import NO_ROOM
from snapshotd.kernel import files

NAME, SPARE = ".ballast", ".spare"
MAX_BYTES = 4 << 30
_ENOUGH_BYTES = 1 << 30
_LARGE_SHARE = 32
MIN_BYTES = 16 << 20
"""Not given back even on a disk that is full: steps that remove things need some space, too."""
SPARE_BYTES = 4 << 20
"""Space in the layers' file system that is given up when not even a layer can be removed: its new name may need a block."""
_BLOCK_BYTES = 1 << 20
"""The ballast changes by multiples of this."""
_BUSY_S, _IDLE_S = 0.02, 0.1
"""Pause between two looks (two statvfs, 3 us): after a look that changed something, and after another."""
_FIEMAP = 0xC020660B
_HEAD, _EXTENT = struct.Struct("=QQLLLL"), struct.Struct("=QQQQQLLLL")
"""struct fiemap and fiemap_extent (linux/fiemap.h)."""
_EXTENTS = 512
_log = logging.getLogger(__name__)


class Ballast:
    """See the module's text. `fd`: the root directory of the mounted file system; `image`: the file below it. When the
    constructor has returned, every free block is allocated, unless it has logged why not."""

    def __init__(self, fd: int, image: Path) -> None:
        self._fd = os.dup(fd)
        self._file = os.open(NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=fd)
        self._image = os.open(image, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="ballast")
        self._works = self._begin()
        if self._works:
            self._thread.start()

    def close(self) -> None:
        """End, and give the disk back what was kept ahead: nobody writes to the layers until the next daemon starts."""
        self._closing.set()
        if self._works:
            self._thread.join()
            with contextlib.suppress(OSError):  # the file system has failed; the next start finds out
                self._grow(self._free() - MIN_BYTES)
        for fd in (self._file, self._image, self._fd):
            os.close(fd)

    def give_up_spare(self) -> bool:
        """Have a little space, so that something can be removed. False when that was done already."""
        try:
            os.unlink(SPARE, dir_fd=self._fd)
        except FileNotFoundError:
            return False
        return True

    def reserve_bytes(self) -> int:
        """Space that could still be added to the free space of the layers."""
        return min(os.fstat(self._file).st_size, self._disk_free())

    # -- inside --------------------------------------------------------------------------------------------------------

    def _begin(self) -> bool:
        """Make it true that every block outside of the ballast is allocated. False where the disk below cannot do it."""
        try:
            free = self._free()
            self._grow(free - min(_ahead(self._disk_free()), free))
            for _, physical, size in self._extents(0, os.fstat(self._file).st_size):
                files.punch_hole(self._image, physical, size)  # a daemon was killed in the middle of a change
            if not self._allocate_all():
                self._grow(self._free() - MIN_BYTES)
                if not self._allocate_all():
                    _log.warning(
                        "the disk is full: the layers may fail, and what is not stored is lost then; free space"
                    )
            self._look()
            return True
        except OSError as exc:
            _log.warning("blocks for the layers cannot be allocated ahead; a full disk may end them: %s", exc)
            return False

    def _allocate_all(self) -> bool:
        """Allocate all blocks of the image outside of the ballast. False when the disk is full."""
        position = 0
        holes = sorted((p, size) for _, p, size in self._extents(0, os.fstat(self._file).st_size))
        for begin, size in (*holes, (os.fstat(self._image).st_size, 0)):
            if begin > position and not self._allocate(position, begin - position):
                return False
            position = begin + size
        return True

    def _work(self) -> None:
        pause = _IDLE_S
        while not self._closing.wait(pause):
            try:
                pause = _BUSY_S if self._look() else _IDLE_S
            except OSError as exc:
                _log.warning("the free space of the layers is not looked after any more: %s", exc)
                return  # the file system has failed

    def _look(self) -> bool:
        """Bring the free space to what is wanted. True when something was done."""
        free, below = self._free(), self._disk_free()
        if free > 4 * SPARE_BYTES:
            self._make_spare()
        wanted = max(_ahead(free + below), MIN_BYTES)
        slop = max(wanted // 8, 2 * _BLOCK_BYTES)
        if free < wanted - slop:
            return self._shrink(min(wanted - free, below))
        if free > wanted + slop:
            return self._grow(free - wanted)
        return False

    def _make_spare(self) -> None:
        try:
            fd = os.open(SPARE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._fd)
        except FileExistsError:
            return
        with files.closing_fd(fd):
            os.posix_fallocate(fd, 0, SPARE_BYTES)

    def _grow(self, count: int) -> bool:
        """Take free space into the ballast and give it back to the disk."""
        count -= count % _BLOCK_BYTES
        size = os.fstat(self._file).st_size
        if count <= 0:
            return False
        try:
            os.posix_fallocate(self._file, size, count)
        except OSError as exc:
            os.ftruncate(self._file, size)
            if exc.errno in NO_ROOM:
                return False  # it was written to meanwhile
            raise
        for _, physical, length in self._extents(size, count):
            files.punch_hole(self._image, physical, length)
        return True

    def _shrink(self, count: int) -> bool:
        """Give the end of the ballast to the layers, with blocks of the disk below it."""
        size = os.fstat(self._file).st_size
        count = min(count + -count % _BLOCK_BYTES, size)
        left = size - count
        for begin, physical, length in self._extents(left, count):
            if not self._allocate(physical, length):
                files.punch_hole(self._image, physical, length)  # a part of it may have got blocks
                left = begin + length
        os.ftruncate(self._file, left)
        return left < size

    def _allocate(self, begin: int, size: int) -> bool:
        """Allocate blocks of the image. False when the disk is full."""
        try:
            files.allocate(self._image, begin, size)
        except OSError as exc:
            if exc.errno not in NO_ROOM:
                raise
            return False
        return True

    def _extents(self, begin: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Where parts of the ballast lie in the image, in order: offset in the ballast, in the image, and length; no
        more than is asked for."""
        end = begin + count
        while begin < end:
            buffer = bytearray(_HEAD.size + _EXTENTS * _EXTENT.size)
            _HEAD.pack_into(buffer, 0, begin, end - begin, 0, 0, _EXTENTS, 0)
            fcntl.ioctl(self._file, _FIEMAP, buffer)
            found = _HEAD.unpack_from(buffer)[3]
            if not found:
                return
            for number in range(found):
                logical, physical, length = _EXTENT.unpack_from(buffer, _HEAD.size + number * _EXTENT.size)[:3]
                first, last = max(logical, begin), min(logical + length, end)
                yield first, physical + first - logical, last - first
            begin = last

    def _free(self) -> int:
        return files.free_bytes(self._fd)

    def _disk_free(self) -> int:
        return files.free_bytes(self._image)


def _ahead(left: int) -> int:
    """Bytes to keep ahead where the disk has `left`."""
    return min(left // 2, max(_ENOUGH_BYTES, left // _LARGE_SHARE), MAX_BYTES)
