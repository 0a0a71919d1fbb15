"""Repairing a repository: an index that agrees with the packs, and packs without damaged frames. Adds and moves;
destroys nothing.

    1. check everything; a repository without damage is left alone, byte for byte
    2. read every pack and choose a frame for each object that can be read
    3. copy the intact frames of damaged packs into new packs (durable)
    4. bring the index up to date in one transaction; one that cannot be used is made anew beside the old, which is kept
    as
       `<index>.damaged-<number>`
    5. move damaged packs to `damaged/` in the store
    6. forget what cannot be read: large contents that lack chunks. Saving the same again then brings it back

Cut off anywhere, it can be run again: what is copied already is found in step 2. The order of records in a new index is
that of the packs' ages. It needs space for the intact frames of the damaged packs, and for a second index.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Set
from pathlib import Path

from snapshotd import sqlite
from snapshotd.errors import Conflict, DataLoss, NotFound, VersionMismatch
from snapshotd.failpoints import hit
from snapshotd.kernel import files
from snapshotd.repo.base import ObjectKind, RepairResult, Roots
from snapshotd.repo.format import pack
from snapshotd.repo.format.ids import Identity
from snapshotd.repo.format.index import Index, IndexEntry, PackRow, create_index
from snapshotd.repo.reading.reader import PackReader
from snapshotd.repo.upkeep.check import check
from snapshotd.repo.upkeep.gc import TARGET_BYTES, put_copy
from snapshotd.repo.upkeep.reach import tree_children, tree_contents
from snapshotd.repo.upkeep.survey import Decoder, Survey, choose, read_what_is_left, survey
from snapshotd.repo.writing.pending import Building, lock
from snapshotd.store.base import Store
from snapshotd.terms import number_of
from snapshotd.types import BlobID, TreeID

DAMAGED = "damaged/"
"""Prefix of damaged packs in the store."""

Progress = Callable[[str], object]


def repair(store: Store, index_path: Path, key: bytes, progress: Progress) -> RepairResult:
    """See the module's text. No other process may have the repository open for writing. Open readers notice the new
    index. Conflict (another process writes), VersionMismatch (nothing is touched), OutOfSpace, OSError."""
    with files.closing_fd(lock(index_path)):
        return _repair(store, index_path, key, progress)


def _repair(store: Store, index_path: Path, key: bytes, progress: Progress) -> RepairResult:
    _sweep(index_path)
    index = _open(index_path)
    try:
        if index is not None:
            suspicious = _find_suspicious(store, index, index_path, key, progress)
            if suspicious is None:
                return RepairResult((), ())
            return _Repair(store, index_path, key, progress).run(index, suspicious)
        if not index_path.exists() and next(iter(store.keys(pack.PREFIX)), None) is None:
            return RepairResult((), ())  # a repository without any write yet
        return _Repair(store, index_path, key, progress).run(None, set())
    finally:
        if index is not None:
            index.close()


def _open(index_path: Path) -> Index | None:
    """The index if it can be used."""
    if not index_path.exists() or index_path.stat().st_size == 0:
        return None
    try:
        index = Index(index_path, write=True)
    except (
        DataLoss,
        VersionMismatch,
    ):  # it holds nothing that the packs do not; those of a newer version are refused later
        return None
    try:
        if not index.problems():
            return index
    except DataLoss:
        pass
    except BaseException:
        index.close()
        raise
    index.close()
    return None


def _find_suspicious(store: Store, index: Index, index_path: Path, key: bytes, progress: Progress) -> set[bytes] | None:
    """The objects that a check finds damaged; None if nothing at all is wrong."""
    reader = PackReader(store, index_path, key)
    try:
        result = check(reader, index, Roots({}, {}, {}), read_data=True, progress=progress)
    except DataLoss:
        return set()  # the index has values that cannot be
    finally:
        reader.close()
    known = {row.id for row in index.packs()}
    unknown = [raw for one in store.keys(pack.PREFIX) if (raw := pack.pack_id_of(one)) is not None and raw not in known]
    if not result.faults and not unknown:
        return None
    return {bytes.fromhex(fault.object_id) for fault in result.faults if fault.object_id is not None}


class _Repair:
    def __init__(self, store: Store, index_path: Path, key: bytes, progress: Progress) -> None:
        self._store, self._path, self._key, self._progress = store, index_path, key, progress
        self._actions: list[str] = []
        self._gone: set[bytes] = set()

    def run(self, index: Index | None, suspicious: set[bytes]) -> RepairResult:
        old = _entries(index)
        identity = Identity(self._key)
        found = survey(self._store, identity, self._progress)
        current = {raw: (entry.pack, entry.offset) for raw, entry in old.items()}
        chosen = choose(found, current, Decoder(self._store, identity))
        suspicious |= {
            raw for raw, entry in chosen.items() if entry.kind == ObjectKind.LIST and entry.pack in found.damaged
        }
        new = self._copy_intact(found, chosen)
        packs = {**found.packs, **{row.id: row for row in new}}
        if index is not None:
            self._update(index, packs, old, chosen)
        else:
            self._rebuild(packs, chosen)
        hit("repo.repair.indexed")
        self._gone |= old.keys() - chosen.keys()
        self._set_aside(found)
        self._forget_unreadable(suspicious, None if index is None else old.keys())
        return RepairResult(tuple(self._actions), tuple(sorted(raw.hex() for raw in self._gone)))

    def _copy_intact(self, found: Survey, chosen: dict[bytes, IndexEntry]) -> list[PackRow]:
        """New packs with the objects chosen from damaged ones; `chosen` then has the new places."""
        wanted: dict[bytes, list[IndexEntry]] = {}
        for entry in chosen.values():
            if entry.pack in found.damaged:
                wanted.setdefault(entry.pack, []).append(entry)
        new: list[PackRow] = []
        for raw, entries in wanted.items():
            data, _ = read_what_is_left(self._store, pack.pack_key(raw))
            copy = Building(pack.made_at_s(raw))
            for entry in sorted(entries, key=lambda entry: entry.offset):
                if copy.bytes + entry.stored > 2 * TARGET_BYTES and copy.entries:
                    new.append(self._put(copy, chosen))
                    copy = Building(pack.made_at_s(raw))
                copy.append(entry, [data[entry.offset : entry.offset + entry.stored]])
            new.append(self._put(copy, chosen))
            self._actions.append(f"saved {number_of(len(entries), 'object')} out of the damaged pack {raw.hex()}")
        return new

    def _put(self, copy: Building, chosen: dict[bytes, IndexEntry]) -> PackRow:
        row = put_copy(self._store, copy)
        hit("repo.repair.saved")
        chosen.update((entry.id, entry) for entry in copy.entries)
        return row

    def _update(
        self, index: Index, packs: dict[bytes, PackRow], old: dict[bytes, IndexEntry], chosen: dict[bytes, IndexEntry]
    ) -> None:
        changed = [entry for raw, entry in chosen.items() if old.get(raw) != entry]
        vanished = list(old.keys() - chosen.keys())
        rows = {row.id: row for row in index.packs()}
        listed = set(index.records())
        unlisted = [entry for raw, entry in chosen.items() if entry.kind == ObjectKind.RECORD and raw not in listed]
        stray = [raw for raw in listed if raw not in chosen or chosen[raw].kind != ObjectKind.RECORD]
        stale = [raw for raw, row in rows.items() if packs.get(raw) != row]
        with index.transaction():
            index.remove_objects([*vanished, *stray])
            again = {entry.id for entry in (*changed, *unlisted)} | set(stray)
            for raw in stale:
                again |= {one.id for one in chosen.values() if one.pack == raw} if raw in packs else set()
            index.remove_empty_packs(stale)
            for row in packs.values():
                index.add_pack(row)
            index.add_objects([chosen[raw] for raw in again if raw in chosen])
        for raw in stale:
            if raw not in packs:
                self._actions.append(f"took the pack {raw.hex()} out of the index")
        for raw in packs.keys() - rows.keys():
            self._actions.append(f"took the pack {raw.hex()} into the index")
        if again or vanished:
            self._actions.append(f"corrected {len(again)} places of objects in the index and removed {len(vanished)}")

    def _rebuild(self, packs: dict[bytes, PackRow], chosen: dict[bytes, IndexEntry]) -> None:
        new = Path(f"{self._path}.rebuilt")
        create_index(new)
        index = Index(new, write=True)
        try:
            with index.transaction():
                for row in packs.values():
                    index.add_pack(row)
                ages = {raw: number for number, raw in enumerate(sorted(packs, key=lambda raw: (raw[1:], raw)))}
                index.add_objects(sorted(chosen.values(), key=lambda entry: (ages[entry.pack], entry.offset)))
            # a close on a full disk fails silently, and the renaming would lose the data in the WAL
            index.fold()
        except BaseException:
            index.close()
            _sweep(self._path)  # it may be the cause of the full disk
            raise
        index.close()
        if self._path.exists():
            number = 1
            while (kept := Path(f"{self._path}.damaged-{number}")).exists():
                number += 1
            sqlite.set_aside(self._path, kept)
            self._actions.append(f"kept the damaged index as {kept.name}")
            hit("repo.repair.kept")
        sqlite.remove(self._path)  # a log that is there all the same must not be taken for the new one's
        os.rename(new, self._path)
        files.sync_dir(self._path.parent)
        self._actions.append(
            f"made the index anew from {number_of(len(packs), 'pack')} with {number_of(len(chosen), 'object')}"
        )

    def _set_aside(self, found: Survey) -> None:
        for raw, why in found.damaged.items():
            key = pack.pack_key(raw)
            data, _ = read_what_is_left(self._store, key)
            self._keep(raw, data)
            hit("repo.repair.aside")
            self._store.delete(key)
            hit("repo.repair.moved")
            self._actions.append(f"moved the damaged pack {raw.hex()} to {DAMAGED} ({why})")

    def _keep(self, raw: bytes, data: bytes) -> None:
        number = 0
        while True:
            try:
                self._store.put(f"{DAMAGED}{raw.hex()}" + (f"-{number}" if number else ""), [data])
                return
            except Conflict:  # another damaged pack of this name was kept by an earlier repair
                number += 1

    def _forget_unreadable(self, suspicious: set[bytes], known: Set[bytes] | None) -> None:
        """Take unreadable objects out of the index: lists that lack parts, and deltas that do not decode. `known`: the
        objects of the former index; None if there was none (then only the objects that name others tell which ones
        existed)."""
        reader, index = PackReader(self._store, self._path, self._key), Index(self._path, write=True)
        try:
            bad = _find_unreadable(reader, index, suspicious)
            if bad:
                with index.transaction():
                    index.remove_objects(sorted(bad))
                self._gone |= bad if known is None else bad & known
                self._actions.append(f"removed {number_of(len(bad), 'unreadable object')} from the index")
            if known is None:
                self._gone |= _find_missing(reader, index)
        finally:
            reader.close()
            index.close()


def _sweep(index_path: Path) -> None:
    """Remove the half-made index of an interrupted repair."""
    sqlite.remove(Path(f"{index_path}.rebuilt"))


def _entries(index: Index | None) -> dict[bytes, IndexEntry]:
    """All entries of an index; {} if there is none, and the valid ones if some have impossible values."""
    entries: dict[bytes, IndexEntry] = {}
    try:
        for entry in index.objects() if index is not None else ():
            entries[entry.id] = entry
    except DataLoss:
        return entries
    return entries


def _find_unreadable(reader: PackReader, index: Index, suspicious: set[bytes]) -> set[bytes]:
    """Lists that lack parts (at any depth), unreadable members of `suspicious`, and deltas against either."""
    bad: set[bytes] = set()
    for raw in suspicious:
        try:
            _read(reader, index, raw)
        except (DataLoss, NotFound):
            bad.add(raw)
    lists = [entry.id for entry in index.objects(ObjectKind.LIST)]
    more = True
    while more:
        before = len(bad)
        for raw in lists:
            if raw not in bad and not _is_whole(reader, index, raw, bad):
                bad.add(raw)
        if bad:
            bad |= {entry.id for entry in index.objects() if entry.base in bad}
        more = len(bad) > before
    return bad


def _read(reader: PackReader, index: Index, raw: bytes) -> None:
    """Read an object if the index has it, and all of a large content: only its bytes as a whole prove its list.
    DataLoss."""
    entry = index.find(raw)
    if entry is None:
        return
    reader.plain(raw, keep=False)
    if entry.kind == ObjectKind.LIST and not reader.contents.chunk_list(raw).inner:
        for _piece in reader.load(BlobID(raw.hex())):
            pass


def _is_whole(reader: PackReader, index: Index, raw: bytes, bad: set[bytes]) -> bool:
    try:
        parts = [part for part, _ in reader.contents.chunk_list(raw).parts]
    except (DataLoss, NotFound):
        return False
    return bad.isdisjoint(parts) and len(index.find_many(list(set(parts)))) == len(set(parts))


def _find_missing(reader: PackReader, index: Index) -> set[bytes]:
    """Objects that directories name and the index does not have. Directories that are bases of deltas are left out:
    they may exist for that alone."""
    bases = {entry.base for entry in index.objects(ObjectKind.TREE)}
    missing: set[bytes] = set()
    for entry in index.objects(ObjectKind.TREE):
        if entry.id in bases:
            continue
        try:
            tree = reader.load_tree(TreeID(entry.id.hex()))
        except (DataLoss, NotFound):
            continue
        named = [raw for _, raw in (*tree_contents(tree), *tree_children(tree))]
        missing |= set(named) - index.find_many(named).keys()
    return missing
