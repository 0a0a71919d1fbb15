"""Reading a repository of packs: object by object through the index, each verified, recent ones from memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from snapshotd.errors import DataLoss, NotFound
from snapshotd.repo.base import ObjectKind, Repository, Tree
from snapshotd.repo.format import chunks, compress, pack, tree
from snapshotd.repo.format.ids import Identity, raw_id
from snapshotd.repo.format.index import Index, IndexEntry
from snapshotd.repo.format.record import decode_record
from snapshotd.repo.reading import bulk
from snapshotd.repo.reading.cache import Cache
from snapshotd.repo.reading.contents import ContentReader
from snapshotd.repo.reading.finder import Finder, IndexFinder
from snapshotd.store.base import Store
from snapshotd.types import BlobID, RecordID, TreeID

_log = logging.getLogger(__name__)

CACHE_BYTES = 32 << 20
"""Plain chunks, lists, trees and records kept in memory by default; as many again for decoded trees, and half as many
for decoded lists."""
MAX_DEPTH = 250
"""A longer chain of deltas in an index is damage. The writer makes far shorter ones."""
_NAMES = {ObjectKind.CHUNK: "content", ObjectKind.LIST: "content", ObjectKind.TREE: "tree", ObjectKind.RECORD: "record"}


class PackReader(Repository):
    """The repository for reading. Thread-safe; any number of them, in any processes.

    `index_path` need not exist while there are no packs: the repository is empty then, until a writer writes.
    """

    def __init__(
        self,
        store: Store,
        index_path: Path,
        key: bytes,
        cache_bytes: int = CACHE_BYTES,
        finder: Finder | None = None,
        index_kind: type[Index] = Index,
        missed: Callable[[], bool] = lambda: False,
    ) -> None:
        """The store is not closed by `close`. `finder`: a writer's, which knows more than the index. `missed`: called when the
        index lacks an object that is to be read; True: look again. VersionMismatch.
        With a damaged index every read says DataLoss, until it was repaired."""
        self.store, self._missed = store, missed
        self.identity = Identity(key)
        self._plain_cache: Cache[bytes] = Cache(cache_bytes)
        self._tree_cache: Cache[Tree] = Cache(cache_bytes)
        self.contents = ContentReader(self, cache_bytes // 2)
        self._finder = finder or IndexFinder(store, index_path, self.forget, index_kind)
        try:
            self.open_index()
        except DataLoss as exc:
            _log.error(
                "%s", exc.message
            )  # every read raises it again; a daemon that did not start could not be told to repair

    def open_index(self) -> Index | None:
        """See `Finder.index`."""
        return self._finder.index()

    def close(self) -> None:
        self._finder.close()

    def forget(self) -> None:
        """Empty the caches: later reads come from the packs."""
        self._plain_cache.clear()
        self._tree_cache.clear()
        self.contents.forget()

    def contains(self, object_id: BlobID | TreeID | RecordID) -> bool:
        try:
            return self._finder.find(raw_id(object_id, "object")) is not None
        except NotFound:
            return False

    def load_tree(self, tree_id: TreeID) -> Tree:
        raw = raw_id(tree_id, "tree")
        cached = self._tree_cache.get(raw)
        if cached is not None:
            return cached
        data = self.plain(raw, (ObjectKind.TREE,))
        try:
            decoded = tree.decode_tree(data)
        except tree.BadTree as exc:
            raise self.damage_error(raw, str(exc)) from None
        self.keep_tree(raw, decoded, len(data))
        return decoded

    def keep(self, raw: bytes, data: bytes) -> None:
        """Remember an object's plain bytes: it is likely to be read soon."""
        self._plain_cache.put(raw, data, len(data))

    def keep_tree(self, raw: bytes, decoded: Tree, encoded_bytes: int) -> None:
        """Remember a directory, as `keep` does."""
        # A decoded entry takes some 700 bytes (measured with tracemalloc: 15 fields, name and id).
        self._tree_cache.put(raw, decoded, 700 * (len(decoded.entries) + 1) + encoded_bytes)

    def load_record(self, record_id: RecordID) -> bytes:
        return self._record(raw_id(record_id, "record"))

    def _record(self, raw: bytes) -> bytes:
        try:
            return decode_record(self.plain(raw, (ObjectKind.RECORD,)))
        except pack.BadFrame as exc:
            raise self.damage_error(raw, str(exc)) from None

    def records(self) -> Iterator[tuple[RecordID, bytes]]:
        for raw in self._finder.records():
            yield RecordID(raw.hex()), self._record(raw)

    def stored_bytes(self) -> int:
        index = self.open_index()
        return index.stored_bytes() if index is not None else 0

    def size_bytes(self, content: BlobID) -> int:
        return self.contents.size_bytes(raw_id(content, "content"))

    def load(self, content: BlobID) -> Iterator[bytes]:
        return self.contents.load(raw_id(content, "content"))

    def load_many(self, contents: Sequence[BlobID]) -> list[bytes | memoryview | None]:
        raws = [raw_id(content, "content") for content in contents]
        found = bulk.load_many(self, raws)
        return [found.get(raw) for raw in raws]

    def read(self, content: BlobID, offset: int, length: int) -> bytes:
        return self.contents.read(raw_id(content, "content"), offset, length)

    def find(self, raw: bytes) -> IndexEntry | None:
        """See `Finder.find_readable`. Where the index is behind those of other nodes, what it lacks comes first."""
        return self._finder.find_readable(raw) or (self._finder.find_readable(raw) if self._missed() else None)

    def plain(self, raw: bytes, kinds: tuple[ObjectKind, ...] | None = None, keep: bool = True) -> bytes:
        """An object's plain bytes, verified. `kinds`: NotFound for any other. `keep`: remember it and its bases."""
        data = self._finder.plain(raw, kinds)
        if data is None and kinds is None:
            data = self._plain_cache.get(raw)
        if data is not None:
            return data
        entry = self.find(raw)
        if entry is None or (kinds is not None and entry.kind not in kinds):
            raise NotFound(f"there is no {_NAMES[kinds[0]] if kinds else 'object'} {raw.hex()} in the repository")
        return self.plain_at(entry, keep)

    def plain_at(self, entry: IndexEntry, keep: bool = True) -> bytes:
        """The plain bytes of an object that was just looked up, verified."""
        data = self._finder.plain(entry.id)
        if data is None:
            data = self._plain_cache.get(entry.id)
        if data is not None:
            return data
        if not entry.pack:  # it has got a frame since it was looked up
            entry = self.find(entry.id) or entry
        forgot = False
        while True:
            try:
                return self._undelta(entry, keep)
            except (
                DataLoss
            ):  # a garbage collection or a repair may have moved the object, or this machine keeps wrong bytes
                self._finder.refresh()
                again = self.find(entry.id)
                if again is None or (again == entry and (forgot or not self._forget_packs(entry))):
                    raise
                entry, forgot = again, forgot or again == entry

    def chain(self, wanted: IndexEntry, until_cached: bool = False) -> list[IndexEntry]:
        """The object, the base of its delta, and so on, to the first that is no delta (or, if wanted, whose base is in
        memory). DataLoss when a part is missing or the index is wrong."""
        chain = [wanted]
        while (entry := chain[-1]).base is not None:
            if until_cached and entry.base in self._plain_cache:
                break
            below = self.find(entry.base)
            if below is None or below.depth != entry.depth - 1 or len(chain) > MAX_DEPTH:
                raise self.damage_error(
                    wanted.id, f"what its deltas are made against ({entry.base.hex()}) is missing or wrong", wanted
                )
            chain.append(below)
        return chain

    def _forget_packs(self, entry: IndexEntry) -> bool:
        """Drop what is kept of the packs that an object is made of. False if nothing was. DataLoss: as `chain`."""
        packs = {one.pack for one in self.chain(entry)}
        return any([self.store.forget(pack.pack_key(one)) for one in packs])

    def _undelta(self, wanted: IndexEntry, keep: bool) -> bytes:
        """Apply one delta after the other."""
        chain = self.chain(wanted, until_cached=True)
        first = chain[-1].base
        base = self._plain_cache.get(first) if first is not None else None
        if first is not None and base is None:  # just pushed out by another thread
            chain = self.chain(wanted)
        data = self._decode(chain.pop(), base, keep)
        while chain:
            data = self._decode(chain.pop(), data, keep)
        return data

    def _decode(self, entry: IndexEntry, base: bytes | None, keep: bool) -> bytes:
        try:
            frame = pack.decode_frame(self.frame_bytes(entry))
            if not matches(entry, frame):
                raise pack.BadFrame("the frame of another object lies in its place")
            data = compress.decode(frame, base)
        except pack.BadFrame as exc:
            raise self.damage_error(entry.id, str(exc), entry) from None
        if not verify(self.identity, entry.kind, entry.id, data):
            raise self.damage_error(entry.id, "its bytes do not match its id", entry)
        if keep:
            self.keep(entry.id, data)
        return data

    def frame_bytes(self, entry: IndexEntry) -> bytes:
        """Read the bytes of an object's frame. If the pack has vanished, the garbage collection has rewritten it: look
        the object up again, once."""
        frame = self._finder.frame(entry.id)
        if frame is not None:
            return frame
        try:
            return self._get(entry)
        except NotFound:
            again = self.find(entry.id)
            if (
                again is not None
                and again.pack != entry.pack
                and again[5:] == entry[5:]
                and again.stored == entry.stored
            ):
                try:
                    return self._get(again)
                except NotFound:
                    entry = again
            raise self.damage_error(entry.id, "the pack is missing", entry) from None

    def _get(self, entry: IndexEntry) -> bytes:
        return self.store.get(pack.pack_key(entry.pack), entry.offset, entry.stored)

    def damage_error(self, raw: bytes, why: str, entry: IndexEntry | None = None) -> DataLoss:
        """The error for an object that cannot be read."""
        if entry is None:
            entry = self.find(raw)
        what = f"{entry.kind.name.lower()} {raw.hex()} in pack {entry.pack.hex()}" if entry else f"object {raw.hex()}"
        return DataLoss(f"the {what} cannot be read because {why}: {(self.open_index() or Index).remedy}")


def matches(entry: IndexEntry, frame: pack.Frame) -> bool:
    """True if a frame is the one in the index, going by its header. (Its place is not checked.)"""
    base = entry.base[: pack.BASE_BYTES] if entry.base is not None else None
    same = (entry.kind, entry.stored, entry.plain, base) == (frame.kind, frame.stored, frame.plain, frame.base)
    return same and entry.id.startswith(frame.id)


def verify(identity: Identity, kind: ObjectKind, raw: bytes, data: bytes) -> bool:
    """True if the plain bytes are the object's. A content's list has the id of the content that it lists: only its form
    is checked."""
    return _object_id(identity, kind, raw, data) == raw


def object_id(identity: Identity, frame: pack.Frame, data: bytes) -> bytes | None:
    """The id of the object whose plain bytes were in a frame; None if the bytes contradict the frame. A content's list
    is believed (its form is checked): it has the id of the content that it lists."""
    raw = _object_id(identity, frame.kind, frame.id, data)
    return raw if raw is not None and raw.startswith(frame.id) else None


def _object_id(identity: Identity, kind: ObjectKind, claimed: bytes, data: bytes) -> bytes | None:
    if kind == ObjectKind.CHUNK:
        return identity.content(data)
    if kind == ObjectKind.TREE:
        return identity.tree(data)
    if kind == ObjectKind.RECORD:
        return identity.record(data)
    try:
        return identity.inner_list(data) if chunks.decode_list(data).inner else claimed
    except pack.BadFrame:
        return None
