"""Objects that the writer has not stored yet: queued, planned, and frames of the pack that is being built."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Sequence
from pathlib import Path

import xxhash

from snapshotd import failpoints
from snapshotd.errors import Conflict
from snapshotd.repo.base import ObjectKind
from snapshotd.repo.format import pack
from snapshotd.repo.format.encode import Encoded
from snapshotd.repo.format.index import IndexEntry, PackRow
from snapshotd.repo.writing.similar import Similar
from snapshotd.store.base import Store

INLINE_BYTES = 128 << 10
"""As few bytes are encoded and put in the caller's thread."""
LOCK_WAIT_S = 10.0
LOCK_POLL_S = 0.05


class Step:
    """Bytes saved since the last record; the number selects the compression level."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes = 0


class Queued:
    """An object that was saved and is not encoded yet."""

    __slots__ = (
        "base",
        "branch",
        "data",
        "depth",
        "id",
        "kind",
        "level",
        "number",
        "previous",
        "similar",
        "sort",
        "step",
    )

    def __init__(
        self, number: int, kind: ObjectKind, object_id: bytes, data: bytes, previous: bytes | None, step: Step
    ) -> None:
        self.number = number
        self.step = step
        self.level = 0
        self.sort: bytes | None = None
        """Sort of a whole file: the file may be like others of its sort."""
        self.similar: tuple[Similar, ...] = ()
        self.kind, self.id, self.data, self.previous = kind, object_id, data, previous
        self.base: IndexEntry | Queued | None = None
        self.branch = False
        """The chain of `base` is full: an earlier version in it becomes the base."""
        self.depth = 0
        """Deltas to undo, at most."""


class Building:
    """The pack that frames are added to, new ones or those of another pack."""

    def __init__(self, made_at_s: float | None = None) -> None:
        """`made_at_s`: see `pack.new_pack_id`."""
        self.id = pack.new_pack_id(made_at_s)
        head = pack.encode_head(self.id)
        self.parts: list[pack.Part] = [head]
        self.bytes = len(head)
        self.entries: list[IndexEntry] = []
        self._checksum = xxhash.xxh3_64(head)

    def add(self, frame: Encoded, depth: int) -> IndexEntry:
        entry = IndexEntry(frame.id, frame.kind, b"", 0, 0, frame.plain, frame.base, depth)
        return self.append(entry, frame.parts)

    def append(self, entry: IndexEntry, parts: Sequence[pack.Part]) -> IndexEntry:
        """Take over a whole frame; `entry` describes it, and is returned with its place here."""
        entry = entry._replace(pack=self.id, offset=self.bytes, stored=sum(map(len, parts)))
        self.parts += parts
        for part in parts:  # now, while they are in the processor's cache
            self._checksum.update(part)
        self.bytes += entry.stored
        self.entries.append(entry)
        return entry

    def row(self) -> PackRow:
        """The finished pack's row for the index."""
        return PackRow(self.id, self.bytes + pack.END_BYTES, len(self.entries))

    def finish(self) -> list[pack.Part]:
        """Return all parts of the pack with its end, when nothing is added any more. Runs in any thread."""
        return [*self.parts, pack.encode_end(len(self.entries), self._checksum.copy())]


def put_pack(store: Store, building: Building) -> None:
    """Make a pack durable. In any thread."""
    failpoints.hit("repo.pack.written")
    store.put(pack.pack_key(building.id), building.finish())
    failpoints.hit("repo.pack.stored")


class Guide:
    """Guesses the chunk of the previous version that a new chunk is likely a change of: the one after the last that
    both have."""

    def __init__(self, parts: list[tuple[bytes, int]]) -> None:
        self._parts = parts
        self._place = {raw: place for place, (raw, _) in enumerate(parts)}
        self._next = 0

    def base_for(self, raw: bytes) -> bytes | None:
        place = self._place.get(raw)
        if place is None:
            place = self._next
            base = self._parts[place][0] if place < len(self._parts) else None
        else:
            base = None  # it exists
        self._next = place + 1
        return base


def lock(index_path: Path) -> int:
    """Take the lock of the one writer. It lies beside the index, because no other descriptor of SQLite's own file may
    be closed while that is open. A process of a killed daemon may still be ending: it gets `LOCK_WAIT_S` for that.
    Conflict."""
    fd = os.open(f"{index_path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except OSError as exc:
            if exc.errno == errno.EWOULDBLOCK and time.monotonic() < deadline:
                time.sleep(LOCK_POLL_S)
                continue
            os.close(fd)
            if exc.errno != errno.EWOULDBLOCK:
                raise
            raise Conflict(
                f"the repository of {index_path} is being written to by another process: stop that one first"
            ) from None
