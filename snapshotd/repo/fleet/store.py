"""The packs of a fleet as one store: each below the prefix of the node that made it.

The code above keeps the keys `packs/aa/<id>`. A new pack goes below this node's prefix; the index knows where any other is.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

from snapshotd.errors import Conflict, NotFound
from snapshotd.repo.base import Peers
from snapshotd.repo.fleet.index import FleetIndex
from snapshotd.repo.format import pack
from snapshotd.store.base import Store


class FleetStore(Store):
    """See the module's text. `close` closes the bucket's store. Thread-safe."""

    def __init__(
        self,
        bucket: Store,
        node: str,
        peers: Peers,
        homes: Callable[[], FleetIndex | None],
        missed: Callable[[], object] = lambda: None,
    ) -> None:
        """`homes`: the index, None while there is none. `missed`: called when a pack is gone, before NotFound is raised: it
        merges what is new, and the reader looks again."""
        self.bucket, self.node = bucket, node
        self._peers, self._homes, self._missed = peers, homes, missed

    def close(self) -> None:
        self.bucket.close()

    def place_of(self, key: str) -> str:
        """Key in the bucket of a pack's key."""
        raw = pack.pack_id_of(key)
        homes = self._homes() if raw is not None else None
        home = (homes.home_of(raw) if homes is not None and raw is not None else None) or self.node
        return f"nodes/{home}/{key}"

    def put(self, key: str, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        self.bucket.put(f"nodes/{self.node}/{key}", parts)

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        try:
            return self.bucket.get(self.place_of(key), offset, length)
        except NotFound:
            self._missed()
            raise

    def forget(self, key: str) -> bool:
        return self.bucket.forget(self.place_of(key))

    def size_bytes(self, key: str) -> int:
        return self.bucket.size_bytes(self.place_of(key))

    def keys(self, prefix: str = "") -> Iterator[str]:
        """The packs of every node that has ever published, and this one's."""
        nodes = sorted({*self._peers.segments, self.node})
        return heapq.merge(*(self._keys_of(node, prefix) for node in nodes))

    def _keys_of(self, node: str, prefix: str) -> Iterator[str]:
        for key in self.bucket.keys(f"nodes/{node}/{prefix}"):
            inside = key.removeprefix(f"nodes/{node}/")
            if inside.startswith(pack.PREFIX):
                yield inside

    def delete(self, key: str) -> None:
        self.bucket.delete(self.place_of(key))


class CollectedStore(FleetStore):
    """The store that a collection sees: packs of others that the index does not know are not there, because their node may
    be about to publish them; to delete a pack that the index knows is to write its tombstone."""

    def __init__(self, store: FleetStore, peers: Peers, index: FleetIndex, entomb: Callable[[bytes], object]) -> None:
        super().__init__(store.bucket, store.node, peers, lambda: index)
        self._index, self._entomb = index, entomb

    def _keys_of(self, node: str, prefix: str) -> Iterator[str]:
        for key in super()._keys_of(node, prefix):
            raw = pack.pack_id_of(key)
            if node == self.node or (raw is not None and self._index.knows_pack(raw)):
                yield key

    def delete(self, key: str) -> None:
        raw = pack.pack_id_of(key)
        if raw is not None and self._index.knows_pack(raw):
            self._entomb(raw)
        else:
            super().delete(key)


def put_same(store: Store, key: str, value: bytes) -> bytes:
    """Put a value unless another one is there; returns the one that is there."""
    try:
        store.put(key, [value])
    except Conflict:
        return store.get(key)
    return value
