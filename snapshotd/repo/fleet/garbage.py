"""The garbage collection of a fleet: see `fleet/base.py` for the steps of an object, and `upkeep/gc.py` for the plan."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from snapshotd.errors import DataLoss
from snapshotd.failpoints import hit
from snapshotd.repo.base import Peers, Reclaimed, Roots
from snapshotd.repo.fleet.base import tombstone_key
from snapshotd.repo.fleet.index import FleetIndex
from snapshotd.repo.fleet.store import CollectedStore, FleetStore, put_same
from snapshotd.repo.format import pack
from snapshotd.repo.format.index import Index, IndexEntry
from snapshotd.repo.format.segment import SEAL_BYTES, Sealer
from snapshotd.repo.reading.finder import Finder
from snapshotd.repo.reading.reader import PackReader
from snapshotd.repo.upkeep import gc
from snapshotd.terms import number_of

_TOMBSTONE = struct.Struct("<8sH16sQ")
"""Magic "snaptomb", version 1, the pack, and the time of its removal in milliseconds; the seal follows."""
_MAGIC, _VERSION = b"snaptomb", 1


class _HeldFinder(Finder):
    """Finds objects in an index that someone else opens and closes."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def index(self) -> Index:
        return self._index

    def find(self, raw: bytes) -> IndexEntry | None:
        return self._index.find(raw)

    def refresh(self) -> None:
        """Nothing to do: the index stays the same."""

    def close(self) -> None:
        """Nothing to close: the index belongs to another."""


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """`taken_back`: condemned objects that a root needs again."""

    planned: gc.Plan
    reader: PackReader
    taken_back: tuple[bytes, ...]


class Garbage:
    """For one thread, beside the writer of the same index, with no write in between."""

    def __init__(self, store: FleetStore, peers: Peers, key: bytes) -> None:
        self._store, self._peers, self._key = store, peers, key
        self._sealer = Sealer(key)

    def plan(
        self,
        index: FleetIndex,
        roots: Roots,
        *,
        grace_s: float,
        now: float,
        progress: Callable[[str], object],
        wanted: Callable[[bytes], bool],
    ) -> FleetPlan:
        """Plan a collection over all objects that the index knows, condemned ones included. Changes nothing.
        DataLoss."""
        index.set_time(now)
        store = CollectedStore(self._store, self._peers, index, lambda raw: self._entomb(index, raw, now))
        reader = PackReader(store, index.path, self._key, finder=_HeldFinder(index))
        with index.seeing_condemned():
            planned = gc.plan(reader, index, roots, grace_s=grace_s, now=now, progress=progress, wanted=wanted)
        dead = {raw for same in planned.dead for raw in same}
        return FleetPlan(planned, reader, tuple(raw for raw in index.condemned_objects() if raw not in dead))

    def run(self, index: FleetIndex, plan: FleetPlan, progress: Callable[[str], object]) -> Reclaimed:
        """Condemn and remove what the plan says. The caller publishes the index afterwards, as a collection's."""
        self.take_back(index, plan.taken_back)
        return gc.run(plan.reader, index, plan.planned, progress)

    def take_back(self, index: FleetIndex, objects: Sequence[bytes]) -> None:
        """Let condemned objects live again, and their packs stay. Tombstones that a crash leaves count for nothing."""
        if not objects:
            return
        packs = index.take_back(objects)
        hit("repo.fleet.taken_back")
        for raw in packs:
            self._store.bucket.delete(tombstone_key(self._home(index, raw), raw))

    def expire(self, index: FleetIndex, *, grace_s: float, now: float, progress: Callable[[str], object]) -> list[str]:
        """Forget objects and delete packs that were condemned for the grace and that no pin protects. Call after `run`, whose
        roots did not reach them. Returns the tombstones, to be removed when the fleet knows."""
        limit_ms = self._limit_ms(grace_s, now)
        forgotten = index.forget_condemned(limit_ms)
        hit("repo.fleet.objects_forgotten")
        buried: list[str] = []
        for raw in index.removed_packs(limit_ms):
            if self._entomb(index, raw, now) > limit_ms:
                continue
            home = self._home(index, raw)
            self._store.bucket.delete(f"nodes/{home}/{pack.pack_key(raw)}")
            hit("repo.fleet.pack_deleted")
            index.forget_pack(raw)
            hit("repo.fleet.pack_forgotten")
            buried.append(tombstone_key(home, raw))
        if forgotten or buried:
            progress(f"forgot {number_of(forgotten, 'object')} and deleted {number_of(len(buried), 'pack')}")
        return buried

    def remove_tombstones(self, index: FleetIndex, buried: Sequence[str], *, grace_s: float, now: float) -> None:
        """Remove tombstones of deleted packs, and those that a crash left of packs that no index knows."""
        for key in buried:
            self._store.bucket.delete(key)
        limit_ms = self._limit_ms(grace_s, now)
        for node in self._peers.segments:
            for key in self._store.bucket.keys(f"nodes/{node}/tombstones/"):
                raw = bytes.fromhex(key.rpartition("/")[2])
                if not index.knows_pack(raw) and self._decode(key, raw, self._store.bucket.get(key)) <= limit_ms:
                    self._store.bucket.delete(f"nodes/{node}/{pack.pack_key(raw)}")
                    self._store.bucket.delete(key)

    def _limit_ms(self, grace_s: float, now: float) -> int:
        pinned = self._peers.oldest_pin_s
        limit_s = now - grace_s
        return int((limit_s if pinned is None else min(limit_s, pinned)) * 1000)

    def _home(self, index: FleetIndex, raw: bytes) -> str:
        return index.home_of(raw) or self._store.node

    def _entomb(self, index: FleetIndex, raw: bytes, now: float) -> int:
        """Write a pack's tombstone, unless it has one; returns its time in milliseconds."""
        key = tombstone_key(self._home(index, raw), raw)
        body = _TOMBSTONE.pack(_MAGIC, _VERSION, raw, int(now * 1000))
        there = put_same(self._store.bucket, key, body + self._sealer.seal(body))
        hit("repo.fleet.tombstone_put")
        return self._decode(key, raw, there)

    def _decode(self, key: str, raw: bytes, data: bytes) -> int:
        body, seal = data[:-SEAL_BYTES], data[-SEAL_BYTES:]
        if len(body) == _TOMBSTONE.size and self._sealer.seal(body) == seal:
            magic, version, of, at_ms = _TOMBSTONE.unpack(body)
            if (magic, version, of) == (_MAGIC, _VERSION, raw):
                return int(at_ms)
        raise DataLoss(
            f"the tombstone {key} is damaged or forged, and nothing is deleted: look who writes to the bucket"
        )
