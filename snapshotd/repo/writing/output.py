"""The packs that a writer makes: one that is being built, some on their way to the store, and durable ones that are not
indexed yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from snapshotd.repo.format import pack
from snapshotd.repo.format.encode import Encoded
from snapshotd.repo.format.index import IndexEntry, PackRow
from snapshotd.repo.writing.pending import INLINE_BYTES, Building, put_pack
from snapshotd.repo.writing.unflushed import Stored
from snapshotd.store.base import Store

_MAX_PUTS, _PUTTERS = 3, 2


class PackOutput:
    """Packs reach `stored` in the order in which they were built. For one thread."""

    def __init__(self, store: Store, durable: Callable[[list[IndexEntry]], None]) -> None:
        """`durable`: called with the objects of each pack that the store has."""
        self._store, self._durable = store, durable
        self._putter: ThreadPoolExecutor | None = None
        self.clear()

    def clear(self) -> None:
        """Forget all packs."""
        self._building: Building | None = None
        self._puts: deque[tuple[Future[None], PackRow, list[IndexEntry]]] = deque()
        self.stored: Stored = []

    def add(self, frame: Encoded, depth: int) -> IndexEntry:
        """Append a frame to the present pack."""
        if self._building is None:
            self._building = Building()
        return self._building.add(frame, depth)

    def add_stored(self, stored: Stored) -> None:
        """Take durable packs of another process, to be indexed with these."""
        self.stored += stored

    @property
    def full(self) -> bool:
        """True if the present pack is large enough."""
        return self._building is not None and self._building.bytes >= pack.PACK_BYTES

    @property
    def empty(self) -> bool:
        """True if no finished pack waits for the index."""
        return not self.stored and not self._puts

    def finish(self) -> None:
        """End the present pack and put it into the store."""
        building, self._building = self._building, None
        if building is None:
            return
        row = building.row()
        if not self._puts and building.bytes <= INLINE_BYTES:
            put_pack(self._store, building)
            self._note_put(row, building.entries)
            return
        if self._putter is None:
            self._putter = ThreadPoolExecutor(_PUTTERS, "repo-put")
        self._puts.append((self._putter.submit(put_pack, self._store, building), row, building.entries))
        self.wait(_MAX_PUTS)

    def wait(self, leave: int) -> None:
        """Return when at most `leave` packs are on their way."""
        while len(self._puts) > leave or (self._puts and self._puts[0][0].done()):
            future, row, entries = self._puts[0]
            future.result()
            self._puts.popleft()
            self._note_put(row, entries)

    def _note_put(self, row: PackRow, entries: list[IndexEntry]) -> None:
        self.stored.append((row, entries))
        self._durable(entries)

    def take_stored(self) -> Stored:
        """The durable packs; they are not the output's any more."""
        stored, self.stored = self.stored, []
        return stored

    def put_so_far(self) -> list[PackRow]:
        """The packs that the store has, or may have, when writing ends early."""
        rows = [row for row, _ in self.stored]
        for future, row, _ in self._puts:
            if not future.cancel():
                rows.append(row)
                future.exception()  # waits; the first failure is the one that is raised
        return rows

    def close(self) -> None:
        """End the threads."""
        if self._putter is not None:
            self._putter.shutdown(wait=True, cancel_futures=True)
