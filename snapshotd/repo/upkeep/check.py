"""Verifying a repository: index, packs, frames, every object, and what the roots need. Changes nothing; damage is a
result, never an error.

    1. the index file, by SQLite's own check
    2. every pack: head, end, each frame's checksum; with `read_data` each object decoded and hashed
    3. every object of the index has an intact frame where the index says, and what it is made of
    4. everything the roots reach, naming the first owner and path that needs what is damaged

A pack that the index does not know is no damage: a crash leaves one, `prune` removes it and `repair` takes it in.
Memory: one pack, and some bytes per object.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable

from snapshotd.errors import DataLoss, NotFound
from snapshotd.repo.base import CheckResult, Fault, ObjectKind, Roots
from snapshotd.repo.format import compress, pack
from snapshotd.repo.format.index import Index, IndexEntry
from snapshotd.repo.reading.reader import PackReader, object_id
from snapshotd.repo.upkeep.needs import name_needs
from snapshotd.repo.upkeep.reach import batches
from snapshotd.repo.upkeep.survey import head_problem
from snapshotd.terms import number_of
from snapshotd.types import BlobID

_MISSING = "its frame is missing or damaged"
_NOT_READ = 1
MAX_FAULTS = 10_000
"""More are counted and not listed."""
_BATCH = 4096

Progress = Callable[[str], object]


class Damages:
    """Faults found so far: at most one per object, and the faults of packs and of the index."""

    def __init__(self) -> None:
        self.objects: dict[bytes, Fault] = {}
        self.others: list[Fault] = []
        self._more = 0

    def add(self, what: str, pack_id: bytes | None = None, raw: bytes | None = None) -> None:
        fault = Fault(what, pack_id.hex() if pack_id is not None else None, raw.hex() if raw is not None else None)
        if raw is not None:
            self.objects.setdefault(raw, fault)
        elif len(self.others) < MAX_FAULTS:
            self.others.append(fault)
        else:
            self._more += 1

    def list_faults(self) -> tuple[Fault, ...]:
        """Faults of needed objects come first."""
        found = sorted(self.objects.values(), key=lambda fault: fault.owner is None)
        more = self._more + max(0, len(found) - MAX_FAULTS)
        rest = (Fault(f"{more} more are not listed"),) if more else ()
        return (*self.others, *found[:MAX_FAULTS], *rest)


def check(reader: PackReader, index: Index, roots: Roots, *, read_data: bool, progress: Progress) -> CheckResult:
    """See the module's text. VersionMismatch when a newer version wrote a pack; OSError when the store cannot be
    reached."""
    reader.forget()  # otherwise damaged bytes on the disk would be answered from memory
    damages = Damages()
    for problem in index.problems():
        damages.add(f"the index is damaged: {problem}")
    if not damages.others:
        try:
            return _check(reader, index, roots, damages, read_data=read_data, progress=progress)
        except DataLoss as exc:  # nothing below raises it but for values in the index that cannot be
            damages.add(exc.message)
    owners = {*roots.trees.values(), *roots.contents.values(), *roots.records.values()} - {""}
    return CheckResult(0, 0, 0, damages.list_faults(), tuple(sorted(owners)))


def _check(
    reader: PackReader, index: Index, roots: Roots, damages: Damages, *, read_data: bool, progress: Progress
) -> CheckResult:
    scan = _Scan(reader, index, damages, read_data=read_data)
    intact = scan.packs(progress)
    objects = _check_index(index, intact, damages)
    del intact
    _check_records(index, damages)
    progress(f"checked {number_of(objects, 'object')} of the index, damaged: {len(damages.objects)}")
    if read_data:
        scan.deltas(progress)
    _spread_damage(reader, index, damages)
    if read_data:
        _check_contents(reader, index, damages, progress)
    owners = name_needs(reader, index, roots, damages.objects, progress)
    return CheckResult(objects, len(index.packs()), scan.bytes_read, damages.list_faults(), owners)


class _Scan:
    """Reading the packs."""

    def __init__(self, reader: PackReader, index: Index, damages: Damages, *, read_data: bool) -> None:
        self._reader, self._index, self._damages, self._read_data = reader, index, damages, read_data
        self.bytes_read = 0

    def packs(self, progress: Progress) -> dict[bytes, _Intact]:
        """Every pack of the index; returns the intact frames in each."""
        known = {row.id: row for row in self._index.packs()}
        found: dict[bytes, _Intact] = {}
        for key in self._reader.store.keys(pack.PREFIX):
            raw = pack.pack_id_of(key)
            if raw is None:
                progress(f"{key} in the store is no pack's name and was not looked at")
                continue
            if raw not in known:
                progress(
                    f"pack {raw.hex()} is not in the index: a crash leaves such packs, which a prune removes unless snapshots are in "
                    "them that the catalog does not have; `snapshotd daemon --rebuild-catalog` brings these back"
                )
                continue
            try:
                found[raw] = self._pack(raw, key, known[raw].bytes)
            except DataLoss as exc:
                self._damages.add(exc.message, raw)
            except NotFound:
                continue  # deleted since the list was made: it is missing
            progress(f"checked {len(found)} of {len(known)} packs")
        for raw in known.keys() - found.keys():
            if not any(fault.pack == raw.hex() for fault in self._damages.others):
                self._damages.add("the pack is missing", raw)
        return found

    def _pack(self, raw: bytes, key: str, size: int) -> _Intact:
        data = self._reader.store.get(key)
        self.bytes_read += len(data)
        if len(data) != size:
            self._damages.add(f"the pack has {len(data)} bytes and not {size}", raw)
        head = head_problem(data, raw)
        if head is not None:
            self._damages.add(head, raw)
        frames = _Intact()
        problems = 0
        for frame in pack.frames(data):
            if isinstance(frame, pack.Frame):
                frames.add(frame, self._proof(frame))
            else:
                problems += 1
                self._damages.add(f"a part of the pack is damaged: {frame}", raw)
        problem = pack.end_problem(data)
        if problem is not None and not problems:
            self._damages.add(f"the pack is damaged: {problem}", raw)
        return frames

    def _proof(self, frame: pack.Frame) -> bytes | None:
        """The id that the object of a frame really has; None for a delta, or when the data is not to be read; b"" if it
        has none."""
        if not self._read_data or frame.base is not None:
            return None
        try:
            plain = compress.decode(frame)
        except pack.BadFrame:
            return b""
        return object_id(self._reader.identity, frame, plain) or b""

    def deltas(self, progress: Progress) -> None:
        """Decode and hash every delta."""
        done = 0
        for entry in self._index.objects():
            if entry.base is None or entry.id in self._damages.objects:
                continue
            try:
                self._reader.plain(entry.id)
            except (DataLoss, NotFound) as exc:
                self._damages.add(exc.message, entry.pack, entry.id)
            done += 1
            if done % 10_000 == 0:
                progress(f"read {done} deltas")


class _Intact:
    """The intact frames of one pack: their headers and, if they were decoded, their content, as 64 bits each."""

    def __init__(self) -> None:
        self._offsets, self._headers, self._proofs = array("Q"), array("q"), array("Q")

    def add(self, frame: pack.Frame, proof: bytes | None) -> None:
        """Add a frame, in ascending order of offsets."""
        self._offsets.append(frame.offset)
        self._headers.append(hash((int(frame.kind), frame.stored, frame.plain, frame.base, frame.id)))
        self._proofs.append(_NOT_READ if proof is None else _number(proof))

    def problem(self, entry: IndexEntry) -> str | None:
        """The fault of an object that the index has in this pack; None if there is none."""
        place = bisect_left(self._offsets, entry.offset)
        if place == len(self._offsets) or self._offsets[place] != entry.offset:
            return _MISSING
        base = entry.base[: pack.BASE_BYTES] if entry.base is not None else None
        expected = hash(
            (int(entry.kind), entry.stored, entry.plain, base, entry.id[: pack.STORED_ID_BYTES[entry.kind]])
        )
        if self._headers[place] != expected:
            return "its frame is not where the index says"
        if self._proofs[place] not in (_NOT_READ, _number(entry.id)):
            return "its bytes cannot be decoded, or do not match its id"
        return None


def _number(raw: bytes) -> int:
    return int.from_bytes(raw[:8], "big")


def _check_index(index: Index, intact: dict[bytes, _Intact], damages: Damages) -> int:
    """Every object of the index: its frame is there, and so is its base. Returns the number of objects."""
    count = 0
    deltas: list[IndexEntry] = []
    for entry in index.objects():
        count += 1
        problem = intact[entry.pack].problem(entry) if entry.pack in intact else _MISSING
        if problem is not None:
            damages.add(problem, entry.pack, entry.id)
        if entry.base is not None:
            deltas.append(entry)
            if len(deltas) == _BATCH:
                _check_bases(index, deltas, damages)
                deltas = []
        elif entry.depth:
            damages.add("the index says it is a delta and not against what", entry.pack, entry.id)
    _check_bases(index, deltas, damages)
    return count


def _check_bases(index: Index, deltas: list[IndexEntry], damages: Damages) -> None:
    bases = index.find_many([entry.base for entry in deltas if entry.base is not None])
    for entry in deltas:
        base = bases.get(entry.base or b"")
        if base is None:
            damages.add("what it is a delta against is missing", entry.pack, entry.id)
        elif base.depth != entry.depth - 1 or base.kind != entry.kind:
            damages.add("the index is wrong about what it is a delta against", entry.pack, entry.id)


def _check_records(index: Index, damages: Damages) -> None:
    """The list of records and the objects that are records are the same."""
    listed = set(index.records())
    for entry in index.objects(ObjectKind.RECORD):
        if entry.id not in listed:
            damages.add("the record is not in the list of records", entry.pack, entry.id)
        listed.discard(entry.id)
    for raw in listed:
        damages.add("the list of records has one that does not exist", None, raw)


def _spread_damage(reader: PackReader, index: Index, damages: Damages) -> None:
    """Deltas and lists that depend on a damaged object are damaged as well. Also finds lists of missing objects."""
    if damages.objects:
        _spread_deltas(index, damages)
    waiting = [entry.id for entry in index.objects(ObjectKind.LIST) if entry.id not in damages.objects]
    known_missing = True
    while known_missing:  # a damaged inner list makes the lists above it damaged: one round for each level
        known_missing = False
        for raw in waiting:
            problem = _list_problem(reader, index, raw, damages) if raw not in damages.objects else None
            if problem is not None:
                entry = index.find(raw)
                damages.add(problem, entry.pack if entry else None, raw)
                known_missing = True
    if damages.objects:
        _spread_deltas(index, damages)


def _spread_deltas(index: Index, damages: Damages) -> None:
    more = True
    while more:
        more = False
        for entry in index.objects():
            if entry.base in damages.objects and entry.id not in damages.objects:
                damages.add(
                    f"what it is a delta against ({entry.base.hex() if entry.base else ''}) is damaged",
                    entry.pack,
                    entry.id,
                )
                more = True


def _list_problem(reader: PackReader, index: Index, raw: bytes, damages: Damages) -> str | None:
    try:
        parts = [part for part, _ in reader.contents.chunk_list(raw).parts]
    except (DataLoss, NotFound) as exc:
        return exc.message if isinstance(exc, DataLoss) else "it is missing"
    for part in parts:
        if part in damages.objects:
            return f"its part {part.hex()} is damaged"
    for batch in batches(parts, _BATCH):
        found = index.find_many(batch)
        for part in batch:
            if part not in found:
                return f"its part {part.hex()} is missing"
    return None


def _check_contents(reader: PackReader, index: Index, damages: Damages, progress: Progress) -> None:
    """Large contents as wholes: that the right chunks are in the right order."""
    done = 0
    for entry in index.objects(ObjectKind.LIST):
        if entry.id in damages.objects:
            continue
        try:
            if reader.contents.chunk_list(entry.id).inner:
                continue
            for _piece in reader.load(BlobID(entry.id.hex())):
                pass
        except (DataLoss, NotFound) as exc:
            damages.add(exc.message, entry.pack, entry.id)
        done += 1
        if done % 100 == 0:
            progress(f"read {done} large contents")
