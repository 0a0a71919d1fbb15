"""The segments of a node in the bucket: publishing its own, merging those of the others."""

from __future__ import annotations

from snapshotd.errors import DataLoss, NotFound
from snapshotd.failpoints import hit
from snapshotd.repo.base import Peers
from snapshotd.repo.fleet.base import segment_key
from snapshotd.repo.fleet.index import FleetIndex, Outgoing
from snapshotd.repo.fleet.store import put_same
from snapshotd.repo.format.segment import Sealer, Segment, seal_of
from snapshotd.store.base import Store


class Segments:
    """For one thread. Every step may be cut off, and is done again by the next call."""

    def __init__(self, bucket: Store, node: str, peers: Peers, key: bytes) -> None:
        self._bucket, self._node, self._peers = bucket, node, peers
        self._sealer = Sealer(key)

    def publish(self, index: FleetIndex, *, collection: bool = False) -> int:
        """Put what the fleet does not know of this index into segments. Returns the number of this node's last one.

        The bytes of a segment are in the local index before they are in the bucket: after a crash the same are put again.
        OSError, OutOfSpace: not all is published; the next call goes on."""
        self._finish(index)
        while made := index.next_segment(self._node, collection=collection):
            segment, objects_upto, packs_upto = made
            index.keep_outgoing(Outgoing(segment.number, self._sealer.encode(segment)), objects_upto, packs_upto)
            hit("repo.fleet.segment_made")
            self._finish(index)
        return index.last_merged(self._node)[0]

    def _finish(self, index: FleetIndex) -> None:
        """Put the outgoing segment. If an earlier life of this node, whose disk was lost, has used its number, merge
        that segment and use the next number."""
        outgoing = index.outgoing()
        if outgoing is None:
            return
        there = put_same(self._bucket, segment_key(self._node, outgoing.number), outgoing.data)
        hit("repo.fleet.segment_put")
        _, before = index.last_merged(self._node)
        segment = self._sealer.decode(there, self._node, outgoing.number, before)
        if there == outgoing.data:
            index.note_published(segment, seal_of(there))
            hit("repo.fleet.segment_noted")
        else:
            index.drop_outgoing()
            index.merge(segment, seal_of(there), self._node)

    def merge(self, index: FleetIndex, *, ahead: bool = False) -> bool:
        """Take over what other nodes have published; with `ahead`, all that is in the bucket. True if some of it takes objects
        away. DataLoss when a segment is missing, damaged or forged: everything before it is merged."""
        self._finish(index)
        upto = dict(self._peers.segments)
        for node in upto if ahead else ():
            while self._is_in_bucket(segment_key(node, upto[node] + 1)):
                upto[node] += 1
        return any([self._merge_upto(index, node, number) for node, number in sorted(upto.items())])

    def _is_in_bucket(self, key: str) -> bool:
        try:
            self._bucket.size_bytes(key)
        except NotFound:
            return False
        return True

    def _merge_upto(self, index: FleetIndex, node: str, upto: int) -> bool:
        """Merge a node's segments up to a number. The segments of other nodes that one builds upon are merged before
        it."""
        takes_away = False
        waiting = [(node, upto)]
        read: dict[tuple[str, int], tuple[Segment, bytes]] = {}
        while waiting:
            node, upto = waiting[-1]
            number, before = index.last_merged(node)
            if number >= upto:
                waiting.pop()
                continue
            place = (node, number + 1)
            segment, seal = read.pop(place) if place in read else self._read(*place, before)
            needed = [(other, least) for other, least in segment.after if index.last_merged(other)[0] < least]
            if needed:
                read[place] = segment, seal
                waiting += needed
                continue
            index.merge(segment, seal, self._node)
            hit("repo.fleet.merged")
            takes_away |= bool(segment.condemned or segment.forgotten or segment.removed or segment.gone)
        return takes_away

    def _read(self, node: str, number: int, before: bytes) -> tuple[Segment, bytes]:
        try:
            data = self._bucket.get(segment_key(node, number))
        except NotFound:
            what = f"index segment {number} of node {node}, which the fleet has published, is missing in the bucket"
            raise DataLoss(f"{what}: restore it from a backup of the bucket") from None
        return self._sealer.decode(data, node, number, before), seal_of(data)
