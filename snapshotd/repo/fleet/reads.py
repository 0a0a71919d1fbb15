"""The order in which a tree was read when it began cold for the first time: nodes on which it begins later fetch that ahead.

    reads/<tree>.<below>    in the bucket: magic "snapread", version u8 = 1, the ids of objects (32 bytes each), and a seal (32):
                            keyed BLAKE3-256 of the key and the bytes before

`below` is the tree of the image that the layer lies on. The first node that reads a tree notes the directories and chunks that
are asked for, through FUSE, and writes them once nothing more is asked for, or there are enough. The next ones
look their places up in the index, and get the blocks by few large requests into their disk's cache (cached.py), in the
order in which they were needed. Objects, not places, are noted: a collection may move them. A wrong or old order costs
requests, at most `AHEAD_BYTES` of them, and nothing else. A collection removes the orders of trees that are gone.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from snapshotd.errors import Conflict, NotFound, SnapshotdError
from snapshotd.repo.base import FollowedReads, ForwardedReads, ReadOrders, Tree
from snapshotd.repo.fleet.blocks import BLOCK_BYTES
from snapshotd.repo.fleet.index import FleetIndex
from snapshotd.repo.format import pack
from snapshotd.repo.format.ids import raw_id
from snapshotd.repo.format.index import IndexEntry
from snapshotd.repo.format.segment import SEAL_BYTES, Sealer
from snapshotd.repo.reading.reader import MAX_DEPTH, PackReader
from snapshotd.store.base import Store
from snapshotd.types import BlobID, TreeID

AHEAD_BYTES = 64 << 20
"""Most that is fetched ahead for one tree."""
MOST_OBJECTS = 8192
QUIET_S = 3.0
"""An order is written when nothing more was asked for in this time."""
_MOST_ROUNDS = 10
_AT_ONCE = 4
"""Requests for one tree at a time: enough to fill 1 Gbit/s at 40 ms each."""
_RUN_BLOCKS = 16
_HEAD = b"snapread\x01"
_MOST_BYTES = len(_HEAD) + MOST_OBJECTS * pack.ID_BYTES + SEAL_BYTES
_PREFIX = "reads/"
_KEY = re.compile(r"reads/([0-9a-f]{64})\.[0-9a-f]{64}")
_log = logging.getLogger(__name__)


class BucketOrders(ReadOrders):
    """See the module's text. Thread-safe."""

    def __init__(self, reader: PackReader, bucket: Store, key: bytes, quiet_s: float = QUIET_S) -> None:
        """`reader`: reads the bucket through the disk's cache."""
        self._reader, self._bucket, self._sealer = reader, bucket, Sealer(key)
        self._quiet_s = quiet_s

    def follow(self, tree: TreeID, below: TreeID) -> FollowedReads:
        return _Followed(self, self._reader, order_key(tree, below), self._quiet_s)

    def read(self, key: str) -> list[bytes] | None:
        """The ids of an order; None if there is none that the fleet has written. OSError."""
        try:
            data = self._bucket.get(key, 0, _MOST_BYTES + 1)  # another writer of the bucket may have made it any length
        except NotFound:
            return None
        body, seal = data[:-SEAL_BYTES], data[-SEAL_BYTES:]
        if self._sealer.seal(key.encode() + body) != seal or not body.startswith(_HEAD):
            _log.warning("the order of reads %s is damaged or forged, and not used", key)
            return []
        return [body[at : at + pack.ID_BYTES] for at in range(len(_HEAD), len(body), pack.ID_BYTES)]

    def write(self, key: str, ids: Sequence[bytes]) -> None:
        """Write an order, unless another node was faster. OSError, OutOfSpace."""
        body = b"".join([_HEAD, *ids])
        try:
            self._bucket.put(key, [body, self._sealer.seal(key.encode() + body)])
        except Conflict:
            _log.debug("another node has written %s", key)


def order_key(tree: TreeID, below: TreeID) -> str:
    return f"{_PREFIX}{tree}.{below}"


def remove_stale(bucket: Store, index: FleetIndex) -> None:
    """Delete the orders of trees that the index does not know any more. OSError."""
    for key in bucket.keys(_PREFIX):
        match = _KEY.fullmatch(key)
        if match and index.find_readable(bytes.fromhex(match[1])) is None:
            bucket.delete(key)


class _Followed(FollowedReads):
    """The reads of one tree that begins. Its order is fetched ahead if it is known, else noted."""

    def __init__(self, orders: BucketOrders, reader: PackReader, key: str, quiet_s: float) -> None:
        self._orders, self._reader, self._key, self._quiet_s = orders, reader, key, quiet_s
        self._noted: dict[bytes, None] = {}
        self._closed = threading.Event()
        self.repository = self._noting = _Noting(reader, self._note)
        threading.Thread(target=self._work, name="read-ahead", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _note(self, raw: bytes) -> None:
        if len(self._noted) < MOST_OBJECTS:
            self._noted.setdefault(raw)

    def _work(self) -> None:
        try:
            known = self._orders.read(self._key)
            if known is not None:
                self._noting.note = None
                self._fetch(known)
            else:
                self._wait_until_quiet()
                self._noting.note = None
                noted, self._noted = list(self._noted), {}
                if noted:
                    self._orders.write(self._key, noted)
        except (SnapshotdError, OSError) as exc:
            _log.info("reads of %s are not fetched ahead: %s", self._key, exc)

    def _wait_until_quiet(self) -> None:
        before = -1
        for _ in range(_MOST_ROUNDS):
            count = len(self._noted)
            if (count and count == before) or count >= MOST_OBJECTS or self._closed.wait(self._quiet_s):
                return
            before = count

    def _fetch(self, ids: Sequence[bytes]) -> None:
        def get(run: tuple[bytes, int, int]) -> None:
            raw, first, count = run
            if not self._closed.is_set():
                self._reader.store.get(pack.pack_key(raw), first * BLOCK_BYTES, count * BLOCK_BYTES)

        with ThreadPoolExecutor(_AT_ONCE, "read-ahead") as threads:
            for _ in threads.map(get, runs_of(self._reader, ids)):
                pass


def runs_of(reader: PackReader, ids: Sequence[bytes]) -> Iterator[tuple[bytes, int, int]]:
    """Pack, first block and number of blocks of the requests that bring these objects and what they are deltas of, those first that
    are needed first."""
    wanted: dict[tuple[bytes, int], None] = {}
    for entry in _entries(reader, ids):
        for number in range(entry.offset // BLOCK_BYTES, (entry.offset + entry.stored - 1) // BLOCK_BYTES + 1):
            if len(wanted) < AHEAD_BYTES // BLOCK_BYTES:
                wanted.setdefault((entry.pack, number))
    while wanted:
        raw, first = next(iter(wanted))
        last = first
        while last - first + 1 < _RUN_BLOCKS and (raw, last + 1) in wanted:
            last += 1
        while last - first + 1 < _RUN_BLOCKS and (raw, first - 1) in wanted:
            first -= 1
        for number in range(first, last + 1):
            del wanted[raw, number]
        yield raw, first, last - first + 1


def _entries(reader: PackReader, ids: Sequence[bytes]) -> Iterator[IndexEntry]:
    """The places of objects in their order, each with its bases. Objects that are not known are left out."""
    index = reader.open_index()
    found: dict[bytes, IndexEntry] = {}
    missing: Sequence[bytes] = list(dict.fromkeys(ids))
    for _ in range(MAX_DEPTH):
        if index is None or not missing:
            break
        new = index.find_many(missing)
        found.update(new)
        missing = [one.base for one in new.values() if one.base is not None and one.base not in found]
    for raw in ids:
        entry = found.get(raw)
        while entry is not None:
            if entry.pack:
                yield entry
            entry = found.get(entry.base) if entry.base is not None else None


class _Noting(ForwardedReads):
    """A repository whose reads of directories and contents are noted."""

    def __init__(self, reader: PackReader, note: Callable[[bytes], None] | None) -> None:
        """`note` is told of the id of each object; None: nobody is."""
        self.reader: PackReader = reader
        self.note = note

    def load_tree(self, tree_id: TreeID) -> Tree:
        if self.note is not None:
            self.note(raw_id(tree_id, "tree"))
        return self.reader.load_tree(tree_id)

    def read(self, content: BlobID, offset: int, length: int) -> bytes:
        note = self.note
        if note is not None:
            raw = raw_id(content, "content")
            note(raw)
            start = 0
            for part, size in self.reader.contents.parts_of(raw):
                if start < offset + length and offset < start + size:
                    note(part)
                start += size
        return self.reader.read(content, offset, length)

    def close(self) -> None:
        """The reader is another's."""
