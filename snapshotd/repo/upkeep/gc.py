"""Garbage collection: removing what the roots do not reach, pack by pack.

    plan    mark what must stay, count what lives in each pack; changes nothing (a dry run is this alone)
    run     0. write lists in full that are deltas against dead ones
            1. forget dead objects in the index       first what names others (trees, lists), then chunks; deltas before their bases
            2. delete packs in which nothing lives, and packs that the index does not know (left by a crash;
               no `wanted` record is in one of them)
            3. rewrite packs that are mostly dead, and the many small ones: copy living frames into a new pack
            (durable), then one
               transaction of the index (new places, old packs gone), then delete the old packs

After an interruption at any step, every object in the index is complete: an object never outlives the objects that it
needs, because the writer takes an object that the index knows for granted. Readers that meet a pack just deleted look
the object up again. Only 3. needs space, at most two packs' worth. Packs younger than the grace period are not touched,
nor what their objects reach.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from snapshotd.errors import DataLoss, OutOfSpace
from snapshotd.failpoints import hit
from snapshotd.repo.base import ObjectKind, Reclaimed, Roots
from snapshotd.repo.format import compress, pack
from snapshotd.repo.format.index import Index, IndexEntry, PackRow
from snapshotd.repo.reading.reader import PackReader, matches
from snapshotd.repo.upkeep.reach import mark
from snapshotd.repo.upkeep.survey import records_in
from snapshotd.repo.writing.pending import Building
from snapshotd.store.base import Store
from snapshotd.terms import number_of

LIVE_RATIO = 0.75
"""A pack is rewritten if less than this part of it is alive; so packs take at most a third more space than needed."""
TARGET_BYTES = 16 << 20
"""Packs are filled up to here."""
_MERGE_COUNT = 8
_MERGE_UNIT_BYTES = 16 << 10
"""Packs of similar size (a factor of 4, beginning here) are merged when enough of them exist: so each byte is copied a
few times at most."""
_LIST_LEVEL = 12
_FORGET_OBJECTS = 20_000
_FORGET_FEWER = 200
"""Objects in one transaction; fewer when the disk is full, so that the log of the index needs no more space than it
has."""
_SCAN_OBJECTS = 200_000
"""Objects whose places are kept in memory while packs are rewritten."""
_ORDER = {ObjectKind.RECORD: 0, ObjectKind.TREE: 1, ObjectKind.LIST: 2, ObjectKind.CHUNK: 3}

Progress = Callable[[str], object]


@dataclass(slots=True)
class _Usage:
    """The living objects of one pack."""

    row: PackRow
    live_bytes: int = 0
    live_objects: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a collection. `relist` are lists to be written in full; `dead` is in the order in which it may be
    forgotten; `groups` are packs that become new ones together; `orphans` are packs in the store that the index does
    not know."""

    live: int
    relist: tuple[bytes, ...]
    dead: tuple[tuple[bytes, ...], ...]
    removed: tuple[PackRow, ...]
    groups: tuple[tuple[PackRow, ...], ...]
    orphans: tuple[tuple[bytes, int], ...]
    live_objects: dict[bytes, int] = field(repr=False)
    reclaimed: Reclaimed


def plan(
    reader: PackReader,
    index: Index,
    roots: Roots,
    *,
    grace_s: float,
    now: float,
    progress: Progress,
    wanted: Callable[[bytes], bool],
) -> Plan:
    """The plan of a collection. DataLoss when the index is damaged, or an object that a root needs is missing. `wanted`:
    see `Maintenance.collect`."""
    problems = index.problems()
    if problems:
        raise DataLoss(
            f"the repository's index {index.path} is damaged ({problems[0]}): run `snapshotd repair`; nothing was removed"
        )
    packs = index.packs()
    stored = {raw: key for key in reader.store.keys(pack.PREFIX) if (raw := pack.pack_id_of(key)) is not None}
    young = {row.id for row in packs if pack.made_at_s(row.id) > now - grace_s}
    live, relist = mark(reader, index, roots, young, progress)
    usage = {row.id: _Usage(row) for row in packs}
    dead: dict[tuple[int, int], list[bytes]] = {}
    for entry in index.objects():
        of = usage[entry.pack]
        if entry.id in live:
            if entry.pack not in stored:
                what = f"pack {entry.pack.hex()} is missing, and needed objects are in it"
                raise DataLoss(f"{what}: run `snapshotd check`; nothing was removed")
            if entry.id not in relist:
                of.live_bytes += entry.stored
                of.live_objects += 1
        else:
            dead.setdefault((_ORDER[entry.kind], -entry.depth if entry.kind != ObjectKind.LIST else 0), []).append(
                entry.id
            )
    progress(f"needed: {number_of(len(live), 'object')}, not needed: {sum(map(len, dead.values()))}")
    unknown = stored.keys() - usage.keys()
    orphans = [(raw, reader.store.size_bytes(stored[raw])) for raw in unknown if pack.made_at_s(raw) <= now - grace_s]
    if orphans and any(map(wanted, records_in(reader.store, reader.identity, index, unknown))):
        progress(
            f"left alone: {number_of(len(unknown), 'pack')} that the index does not know, with snapshots that the catalog does not "
            "have; `snapshotd daemon --rebuild-catalog` brings them back, and after `snapshotd repair` a prune removes them"
        )
        orphans = []
    removed = [of for of in usage.values() if not of.live_objects and of.row.id not in young]
    groups = _groups([of for of in usage.values() if of.live_objects and of.row.id not in young])
    return _plan(live, relist, dead, removed, groups, orphans, len(unknown) - len(orphans), usage)


def _plan(
    live: set[bytes],
    relist: set[bytes],
    dead: dict[tuple[int, int], list[bytes]],
    removed: list[_Usage],
    groups: list[list[_Usage]],
    orphans: list[tuple[bytes, int]],
    left: int,
    usage: dict[bytes, _Usage],
) -> Plan:
    rewritten = [of for group in groups for of in group]
    before = sum(of.row.bytes for of in usage.values()) + sum(size for _, size in orphans)
    gone = sum(of.row.bytes for of in (*removed, *rewritten)) + sum(size for _, size in orphans)
    back = sum(of.live_bytes for of in rewritten) + (pack.HEAD_BYTES + pack.END_BYTES) * len(groups)
    return Plan(
        live=len(live),
        relist=tuple(sorted(relist)),
        dead=tuple(tuple(dead[place]) for place in sorted(dead)),
        removed=tuple(of.row for of in removed),
        groups=tuple(tuple(of.row for of in group) for group in groups),
        orphans=tuple(orphans),
        live_objects={of.row.id: of.live_objects for of in rewritten},
        reclaimed=Reclaimed(gone - back, before - gone + back, len(removed) + len(orphans), len(rewritten), left),
    )


def _groups(candidates: list[_Usage]) -> list[list[_Usage]]:
    """The groups of packs to rewrite together: the most dead first, filled up to the target."""
    sparse = [of for of in candidates if of.live_bytes < LIVE_RATIO * (of.row.bytes - pack.HEAD_BYTES - pack.END_BYTES)]
    chosen = {of.row.id for of in sparse}
    by_size: dict[int, list[_Usage]] = {}
    for of in candidates:
        if of.row.bytes < TARGET_BYTES // 2 and of.row.id not in chosen:
            by_size.setdefault((of.row.bytes // _MERGE_UNIT_BYTES).bit_length() // 2, []).append(of)
    small = [of for same in by_size.values() if len(same) >= _MERGE_COUNT for of in same]
    groups: list[list[_Usage]] = []
    size = TARGET_BYTES
    for of in (*sorted(sparse, key=lambda of: of.live_bytes / of.row.bytes), *small):
        if size + of.live_bytes > TARGET_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(of)
        size += of.live_bytes
    return groups


def run(reader: PackReader, index: Index, planned: Plan, progress: Progress) -> Reclaimed:
    """Carry out the plan, with no write in between. OutOfSpace only when not a single byte could be freed."""
    reader.store.remove_leftovers()
    before = sum(row.bytes for row in index.packs()) + sum(size for _, size in planned.orphans)
    if planned.relist:
        _relist(reader, index, planned.relist)
        hit("repo.gc.relisted")
    _forget(index, planned, progress)
    removed = 0
    with index.transaction():
        index.remove_empty_packs([row.id for row in planned.removed])
    hit("repo.gc.forgotten")
    for raw in (*(row.id for row in planned.removed), *(raw for raw, _ in planned.orphans)):
        reader.store.delete(pack.pack_key(raw))
        hit("repo.gc.deleted")
        removed += 1
    if removed:
        progress(f"removed {number_of(removed, 'pack')}")
    rewritten = 0
    entries: dict[bytes, list[IndexEntry]] = {}
    for number, group in enumerate(planned.groups):
        if group[0].id not in entries:
            entries = _entries_of(index, planned, number)
        try:
            rewritten += _rewrite(reader.store, index, group, entries, progress)
        except OutOfSpace:
            if not removed and not rewritten:
                raise
            progress(
                f"the disk is too full to rewrite the other {len(planned.groups) - number} groups of packs: run it again"
            )
            break
    reader.forget()  # removed objects must not be answered from memory
    after = sum(row.bytes for row in index.packs())
    return Reclaimed(before - after, after, removed, rewritten, planned.reclaimed.packs_unknown)


def _relist(reader: PackReader, index: Index, lists: tuple[bytes, ...]) -> None:
    """Write lists in full; lists that are deltas against them are less deep then."""
    known = {entry.id: entry for entry in index.objects(ObjectKind.LIST)}
    copies = [Building(max(pack.made_at_s(known[raw].pack) for raw in lists))]
    for raw in lists:
        data = reader.plain(raw, keep=False)
        packed = compress.compress(data, _LIST_LEVEL)
        zstd = len(packed) < len(data)
        parts = pack.encode_frame(ObjectKind.LIST, raw, len(data), packed if zstd else data, zstd)
        copies[-1].append(known[raw]._replace(base=None, depth=0), parts)
        if copies[-1].bytes > TARGET_BYTES:
            copies.append(Building(pack.made_at_s(copies[-1].id)))
    rows = [put_copy(reader.store, copy) for copy in copies if copy.entries]
    with index.transaction():
        for row in rows:
            index.add_pack(row)
        new = {entry.id: entry for copy in copies for entry in copy.entries}
        index.add_objects([*new.values(), *_less_deep(known, new)])


def _less_deep(known: dict[bytes, IndexEntry], new: dict[bytes, IndexEntry]) -> list[IndexEntry]:
    """The deltas against `new` lists, and the deltas against these, with their new depths."""
    above: dict[bytes, list[bytes]] = {}
    for entry in known.values():
        if entry.base is not None and entry.id not in new:
            above.setdefault(entry.base, []).append(entry.id)
    changed: list[IndexEntry] = []
    waiting = list(new.values())
    while waiting:
        base = waiting.pop()
        for raw in above.get(base.id, ()):
            entry = known[raw]._replace(depth=base.depth + 1)
            changed.append(entry)
            waiting.append(entry)
    return changed


def _forget(index: Index, planned: Plan, progress: Progress) -> None:
    """Take dead objects out of the index, in their order. Lists at once: one may name another of the same kind."""
    for same in planned.dead:
        start = 0
        entry = index.find(same[0])
        whole = entry is not None and entry.kind == ObjectKind.LIST
        size = len(same) if whole else _FORGET_OBJECTS
        while start < len(same):
            try:
                with index.transaction():
                    index.remove_objects(same[start : start + size])
            except OutOfSpace:
                if size <= _FORGET_FEWER or whole:
                    raise
                size = _FORGET_FEWER
                continue
            start += size
            progress(f"forgot {min(start, len(same))} of {len(same)} objects")


def _entries_of(index: Index, planned: Plan, number: int) -> dict[bytes, list[IndexEntry]]:
    """The index's entries for the packs of a group, and for as many of the following groups as are worth one reading of
    the index."""
    entries: dict[bytes, list[IndexEntry]] = {}
    objects = 0
    for group in planned.groups[number:]:
        if objects and objects + sum(planned.live_objects[row.id] for row in group) > _SCAN_OBJECTS:
            break
        entries |= {row.id: [] for row in group}
        objects += sum(planned.live_objects[row.id] for row in group)
    for entry in index.objects(packs=entries.keys()):
        entries[entry.pack].append(entry)
    return entries


def _rewrite(
    store: Store, index: Index, group: tuple[PackRow, ...], entries: dict[bytes, list[IndexEntry]], progress: Progress
) -> int:
    """Copy the living objects of a group of packs into a new one; returns the number of removed packs. A damaged pack
    stays as it is, for `repair`."""
    copy = Building(max(pack.made_at_s(row.id) for row in group))
    sources: list[PackRow] = []
    for row in group:
        found = _living(store, row, entries[row.id])
        if found is None:
            progress(f"pack {row.id.hex()} is damaged and was left as it is: run `snapshotd check`")
            continue
        for entry, frame in found:
            copy.append(entry, [frame])
        sources.append(row)
    if not sources:
        return 0
    new = put_copy(store, copy)
    hit("repo.gc.copied")
    with index.transaction():
        index.add_pack(new)
        index.add_objects(copy.entries)
        index.remove_empty_packs([row.id for row in sources])
    hit("repo.gc.indexed")
    for row in sources:
        store.delete(pack.pack_key(row.id))
        hit("repo.gc.deleted")
    progress(
        f"rewrote {number_of(len(sources), 'pack')} with {sum(row.bytes for row in sources)} bytes as one with {new.bytes}"
    )
    return len(sources)


def _living(store: Store, row: PackRow, entries: list[IndexEntry]) -> list[tuple[IndexEntry, bytes]] | None:
    """The frames of a pack that the index refers to (copies, so that the rest of it is not kept). None when they are
    not all there and intact."""
    data = memoryview(store.get(pack.pack_key(row.id)))
    try:
        pack.check_head(data, row.id)
    except DataLoss:
        return None
    frames = {frame.offset: frame for frame in pack.frames(data) if isinstance(frame, pack.Frame)}
    found = [
        (entry, bytes(data[frame.offset : frame.offset + frame.stored]))
        for entry in sorted(entries, key=lambda entry: entry.offset)
        if (frame := frames.get(entry.offset)) is not None and matches(entry, frame)
    ]
    return found if len(found) == len(entries) else None


def put_copy(store: Store, copy: Building) -> PackRow:
    """Make a pack of frames that exist already durable."""
    store.put(pack.pack_key(copy.id), copy.finish())
    return copy.row()
