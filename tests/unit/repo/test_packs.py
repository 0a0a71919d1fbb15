"""The bytes of packs, frames, lists and payloads: bounds, damage, crashes and a full disk."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from snapshotd import failpoints
from snapshotd.errors import DataLoss, InternalError, LimitExceeded, VersionMismatch
from snapshotd.repo.base import ObjectKind, Tree, TreeEntry
from snapshotd.repo.format import chunks, compress, dictionary, encode, pack
from snapshotd.repo.format.pack import BadFrame, Frame
from snapshotd.repo.format.record import decode_record, encode_record
from snapshotd.repo.reading.reader import PackReader
from snapshotd.repo.writing import writer
from snapshotd.repo.writing.writer import PackRepository
from snapshotd.store.local import LocalStore
from snapshotd.store.memory import MemoryStore
from snapshotd.types import BlobID, Kind
from tests import long

KEY = bytes(range(32))
ID = bytes(range(32))


def frame(data: bytes, plain: int | None = None, zstd: bool = False, base: bytes | None = None) -> bytes:
    return b"".join(pack.encode_frame(ObjectKind.CHUNK, ID, len(data) if plain is None else plain, data, zstd, base))


def sealed(data: bytes) -> bytes:
    """With the checksum that a frame of these bytes would have: what somebody who knows the format can make."""
    return data + xxhash.xxh3_64_digest(data)[: pack.CHECKSUM_BYTES]


@settings(max_examples=long.size(50, 200), deadline=None)
@given(st.binary(max_size=300), st.sampled_from(list(ObjectKind)), st.sampled_from([None, b"b" * 32]), st.booleans())
def test_frames_come_back(data: bytes, kind: ObjectKind, base: bytes | None, words: bool) -> None:
    zstd = words or base is not None
    whole = b"".join(pack.encode_frame(kind, ID, len(data), data, zstd, base, dictionary=words))
    found = pack.decode_frame(b"junk" + whole + b"more", 4)
    proof = ID[: pack.STORED_ID_BYTES[kind]]
    assert found[:9] == (kind, proof, base and base[: pack.BASE_BYTES], zstd, False, words, len(data), 4, len(whole))
    assert found.payload == data


@settings(max_examples=long.size(75, 300), deadline=None)
@given(st.binary(max_size=100), st.integers(0, 1 << 20), st.integers(1, 255))
def test_any_changed_byte_is_found(data: bytes, where: int, flip: int) -> None:
    whole = frame(data)
    at = where % len(whole)
    with pytest.raises(BadFrame):
        pack.decode_frame(whole[:at] + bytes((whole[at] ^ flip,)) + whole[at + 1 :])
    with pytest.raises(BadFrame):
        pack.decode_frame(whole[:at])


@pytest.mark.parametrize(
    "head",
    [
        b"\x00",
        b"\x05\x00\x00",
        b"\x81\x00\x00",
        b"\x09\x00\x00",  # a delta that is not compressed
        b"\x41\x00\x00",  # the dictionary, and not compressed
        b"\x51" + pack.encode_varint((128 << 10) + 1) + b"\x00",
        b"\x01\x81\x00\x00",  # not the shortest form
        b"\x11" + pack.encode_varint((1 << 20) + 1) + b"\x00",
        b"\x11\x05\x06",  # grew by being compressed
        b"\x01\x05\x04",  # lengths differ and it is not compressed
        b"\x11" + b"\xff" * 20,
    ],
    ids=bytes.hex,
)
def test_impossible_headers_are_refused(head: bytes) -> None:
    with pytest.raises(BadFrame):
        pack.decode_frame(sealed(head + ID + bytes(20)))


def test_a_bomb_is_not_unpacked() -> None:
    """A payload that would be a gigabyte: its header follows from the declared length, and no more is taken than
    that."""
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 30))
    blocks = bomb[zstandard.frame_header_size(bomb) :]
    for plain in (0, 1, 1000, 1 << 20):
        with pytest.raises(BadFrame):
            compress.decompress(blocks, plain)
    good = bytes(compress.compress(b"text " * 1000, 3))
    for plain in (0, 4999, 5001, 70_000):
        with pytest.raises(BadFrame):
            compress.decompress(good, plain)
    for bad in (good + b"x", good[:-1], b""):
        with pytest.raises(BadFrame):
            compress.decompress(bad, 5000)


@settings(max_examples=long.size(50, 200), deadline=None)
@given(
    st.one_of(st.binary(max_size=400), st.integers(0, 1 << 20).map(bytes)),
    st.binary(max_size=400),
    st.sampled_from([1, 3, 9, 19]),
)
def test_payloads_come_back(data: bytes, base: bytes, level: int) -> None:
    data += b"x"
    assert compress.decompress(compress.compress(data, level), len(data)) == data
    small = data[: pack.MAX_DICTIONARY_BYTES]
    assert compress.decompress(compress.compress_small(small), len(small), None, True) == small
    for old in (base, data[: len(data) // 2] + base + data[len(data) // 2 :]):
        for words in (False, True):
            assert compress.decompress(compress.compress_delta(data, old, level, words), len(data), old, words) == data
        if len(old) <= pack.MAX_DICTIONARY_BYTES:
            assert compress.estimate_delta(data, old) > 0


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.one_of(st.binary(min_size=1, max_size=400), st.integers(1, 3 << 20).map(bytes)), min_size=1, max_size=20
    ),
    st.data(),
)
def test_many_payloads_come_back(datas: list[bytes], data: st.DataObject) -> None:
    payloads = compress.compress_many(datas, data.draw(st.sampled_from([-1, 1, 3])))
    assert [compress.decompress(payload, len(plain)) for payload, plain in zip(payloads, datas, strict=True)] == datas


def noisy(rng: random.Random) -> bytes:
    words = [rng.randbytes(6).hex().encode() for _ in range(200)]
    return b" ".join(rng.choice(words) for _ in range(2000)) + rng.randbytes(30_000)


def worded(rng: random.Random) -> bytes:
    """Text whose letters are not equally frequent, as in languages and programs."""
    return bytes(rng.choices(b"etaoinshr dlucm\n.,;()=_X", [24 - place for place in range(24)], k=50_000))


@pytest.mark.parametrize(("make", "faster"), [(noisy, True), (worded, False)])
def test_the_faster_level_is_taken_where_it_costs_no_space(
    make: Callable[[random.Random], bytes], faster: bool
) -> None:
    rng = random.Random(3)
    datas = [make(rng) for _ in range(20)]
    usual = [bytes(compress.compress(one, 1)) for one in datas]
    bulk = [bytes(one) for one in compress.compress_many(datas, 1)]
    assert (bulk != usual) == faster
    assert sum(map(len, bulk)) <= sum(map(len, usual)) * 1.02
    few = [bytes(one) for one in compress.compress_many(datas[:4], 1)]
    assert few == usual[:4], "a sample of few would cost more than it saves"


def test_objects_of_a_large_step_become_the_same_frames_together() -> None:
    """One by one or at once, with deltas, incompressible and empty ones among them."""
    rng = random.Random(4)
    base = worded(rng)
    jobs = [
        encode.Job(ObjectKind.CHUNK, bytes([number]) * 32, one, bytes(32) if old else None, old, 3, True)
        for number, (one, old) in enumerate(
            [
                (worded(rng), None),
                (b"", None),
                (base + b"x", base),
                (rng.randbytes(5000), None),
                (noisy(rng), None),
                (b"x", None),
            ]
        )
    ]
    together = encode.encode_all(jobs)
    assert [one.parts for one in together] == [encode.encode_all([job])[0].parts for job in jobs]
    assert [one.base for one in together] == [job.base_id for job in jobs]
    for job, one in zip(jobs, together, strict=True):
        found = pack.decode_frame(b"".join(one.parts))
        assert compress.decode(found, job.base) == job.data
        assert found.zstd == (len(found.payload) < len(job.data))


def test_a_whole_base_can_be_used() -> None:
    """The window covers base and object: what is far away is still found."""
    rng = random.Random(1)
    for size in (1000, 50_000, 300_000, 1 << 20):
        base = rng.randbytes(size)
        for level in (1, 3, 9):
            assert len(compress.compress_delta(base[:500] + b"x" + base[500:-1], base, level)) < 200


@pytest.mark.parametrize("size", [0, 1, 300_000, 8 << 20, (8 << 20) + 1, 40_000_000])
def test_chunks_are_within_their_bounds(size: int) -> None:
    for data in (random.Random(size).randbytes(size), bytes(size)):
        source = io.BytesIO(data)
        found = list(chunks.cut_chunks(source.read(1000), source.read))
        assert b"".join(found) == data
        assert all(chunks.MIN_CHUNK_BYTES <= len(chunk) <= chunks.MAX_CHUNK_BYTES for chunk in found[:-1])
        assert not found or 0 < len(found[-1]) <= chunks.MAX_CHUNK_BYTES


def test_cuts_do_not_depend_on_the_blocks_that_are_read() -> None:
    data = random.Random(2).randbytes(20 << 20)
    source = io.BytesIO(data)
    whole = list(chunks.cut_chunks(source.read(1), source.read))
    shifted = list(chunks.cut_chunks(b"", io.BytesIO(b"inserted" + data).read))
    assert len(set(whole) & set(shifted)) >= len(whole) - 3


@settings(max_examples=long.size(50, 200), deadline=None)
@given(
    st.lists(
        st.tuples(st.binary(min_size=32, max_size=32), st.integers(1, chunks.MAX_CHUNK_BYTES)), min_size=1, max_size=20
    ),
    st.integers(0, chunks.MAX_LEVEL),
    st.booleans(),
    st.integers(0, 1 << 20),
    st.integers(1, 255),
)
def test_lists_come_back_and_nothing_else(
    parts: list[tuple[bytes, int]], level: int, inner: bool, where: int, flip: int
) -> None:
    data = chunks.encode_list(parts, level, inner)
    assert chunks.decode_list(data) == (level, inner, sum(length for _, length in parts), parts)
    at = where % len(data)
    bad = data[:at] + bytes((data[at] ^ flip,)) + data[at + 1 :]
    for other in (bad, data[:at], data + b"\0"):
        try:
            found = chunks.decode_list(other)
        except BadFrame:
            continue
        assert chunks.encode_list(found.parts, found.level, found.inner) == other


def test_lists_of_lists(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the sizes made small, so that a few MiB need three levels."""
    monkeypatch.setattr(chunks, "MAX_PARTS", 8)
    monkeypatch.setattr(chunks, "_MIN_GROUP", 3)
    repo = PackRepository(MemoryStore(), tmp_path / "index", KEY)
    data = random.Random(3).randbytes(40 << 20)
    content = repo.save_bytes(data)
    later = repo.save_bytes(data[: 20 << 20] + b"inserted" + data[20 << 20 :], content)
    repo.flush()
    assert repo.reader.contents.chunk_list(bytes.fromhex(content)).level >= 2
    assert b"".join(repo.load(content)) == data
    assert b"".join(repo.load(later)) == data[: 20 << 20] + b"inserted" + data[20 << 20 :]
    for offset in (0, 5_000_000, (40 << 20) - 10):
        assert repo.read(content, offset, 3_000_000) == data[offset : offset + 3_000_000]
    assert repo.saved.packed_bytes < 43_000_000
    repo.close()


def test_large_files_store_what_changed(tmp_path: Path) -> None:
    repo = PackRepository(MemoryStore(), tmp_path / "index", KEY)
    data = random.Random(4).randbytes(64 << 20)
    content = repo.save_bytes(data)
    repo.flush()
    before = repo.saved.packed_bytes
    repo.save_bytes(data[: 32 << 20] + bytes(4096) + data[(32 << 20) + 4096 :], content)
    repo.flush()
    assert repo.saved.packed_bytes - before < 16 << 10
    repo.close()


def written(tmp_path: Path) -> tuple[MemoryStore, str, dict[BlobID, bytes]]:
    """One pack with contents, deltas, a large content and a tree."""
    store = MemoryStore()
    repo = PackRepository(store, tmp_path / "index", KEY)
    rng = random.Random(5)
    saved: dict[BlobID, bytes] = {}
    text, last = b"".join(b"%d\n" % rng.randrange(10**9) for _ in range(200)), None
    for number in range(5):
        text = text[:500] + b"edit %d" % number + text[506:]
        last = repo.save_bytes(text, last)
        saved[last] = text
    for data in (b"", rng.randbytes(5000), rng.randbytes(700_000)):
        saved[repo.save_bytes(data)] = data
    repo.save_tree(
        Tree(
            TreeEntry(b"", Kind.DIRECTORY, 0o755, 0, 0, 0),
            (TreeEntry(b"a", Kind.FILE, 0o644, 0, 0, 0, len(text), last),),
        )
    )
    repo.save_record(b"{}")
    repo.flush()
    repo.close()
    (key,) = store.keys()
    return store, key, saved


def test_a_pack_describes_itself(tmp_path: Path) -> None:
    store, key, _ = written(tmp_path)
    data = store.get(key)
    pack_id = pack.pack_id_of(key)
    assert pack_id is not None
    pack.check_head(data, pack_id)
    assert pack.end_problem(data) is None
    found = list(pack.frames(data))
    reader = PackReader(store, tmp_path / "index", KEY)
    index = reader.open_index()
    assert index is not None
    entries = {entry.offset: entry for entry in index.objects()}
    assert len(found) == len(entries)
    for one in found:
        assert isinstance(one, Frame)
        entry = entries[one.offset]
        assert (one.kind, one.plain, one.stored) == (entry.kind, entry.plain, entry.stored)
        assert one.id == entry.id[: pack.STORED_ID_BYTES[entry.kind]]
        assert one.base == (entry.base[: pack.BASE_BYTES] if entry.base else None)
    reader.close()


def test_heads_of_other_packs_and_versions_are_refused(tmp_path: Path) -> None:
    store, key, _ = written(tmp_path)
    data, pack_id = store.get(key), pack.pack_id_of(key)
    assert pack_id is not None
    with pytest.raises(DataLoss):
        pack.check_head(data, pack.new_pack_id())
    with pytest.raises(DataLoss):
        pack.check_head(data[:20], pack_id)
    with pytest.raises(VersionMismatch, match="newer"):
        pack.check_head(data[:8] + b"\x63\0" + data[10:], pack_id)


@settings(max_examples=long.size(10, 400), deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from(["flip", "cut", "drop", "zero"]), st.integers(1, 200))
def test_damage_is_named_and_spares_the_rest(
    tmp_path_factory: pytest.TempPathFactory, where: int, how: str, amount: int
) -> None:
    tmp_path = tmp_path_factory.mktemp("damage")
    store, key, saved = written(tmp_path)
    good = store.get(key)
    at = where % len(good)
    bad = {
        "flip": good[:at] + bytes((good[at] ^ amount,)) + good[at + 1 :],
        "cut": good[:at],
        "drop": good[:at] + good[at + amount :],
        "zero": good[:at] + bytes(len(good[at : at + amount])) + good[at + amount :],
    }[how]
    if bad == good:
        return
    assert pack.end_problem(bad) is not None
    intact = {(one.kind, one.base, bytes(one.payload)) for one in pack.frames(good) if isinstance(one, Frame)}
    spared = {(one.kind, one.base, bytes(one.payload)) for one in pack.frames(bad) if isinstance(one, Frame)}
    assert spared <= intact
    store.delete(key)
    store.put(key, [bad])
    reader = PackReader(store, tmp_path / "index", KEY)
    found: list[str] = []
    for content, data in saved.items():
        try:
            assert b"".join(reader.load(content)) == data
        except DataLoss as exc:
            found.append(exc.message)
    assert all(key.rpartition("/")[2] in message for message in found)
    # Four versions lie above the first, and one large content above its chunks; small frames may lie side by side in
    # what is hit.
    end = at + (1 if how == "flip" else amount)
    hit = sum(one.offset < end and at < one.offset + one.stored for one in pack.frames(good) if isinstance(one, Frame))
    assert how in ("cut", "drop") or len(found) <= hit + 5
    reader.close()


@settings(max_examples=long.size(75, 300), deadline=None)
@given(
    st.lists(
        st.one_of(st.binary(max_size=40), st.binary(min_size=16, max_size=33).map(lambda raw: raw.hex().encode())),
        max_size=5,
    )
)
def test_records_come_back_and_nothing_else(parts: list[bytes]) -> None:
    document = b"".join(parts)
    data = encode_record(document)
    assert decode_record(data) == document
    assert len(data) <= len(document) + 1
    for other in (data[:-1], data + b"a", b"\x01" + document, b"\x00" + document, b"\x02" + document, b""):
        try:
            assert encode_record(decode_record(other)) == other
        except BadFrame:
            continue


def test_new_files_are_deltas_against_others_of_their_sort(tmp_path: Path) -> None:
    rng = random.Random(7)
    lines = [
        b"def function_%d(argument): return argument * %d\n" % (number, rng.randrange(10**9)) for number in range(200)
    ]
    repo = PackRepository(MemoryStore(), tmp_path / "index", KEY)
    saved = {}
    for number in range(30):
        data = b"".join(rng.sample(lines, 100))
        saved[repo.save_bytes(data, None, b"file%d.py" % number)] = data
        if number % 7 == 0:
            repo.flush()
    other = repo.save_bytes(b"".join(lines[:100]), None, b"other.c")
    repo.flush()
    index = repo.index
    entries = {entry.id: entry for entry in index.objects()}
    deltas = [entry for entry in entries.values() if entry.base is not None]
    assert len(deltas) > 20
    assert max(entry.depth for entry in deltas) <= encode.MAX_SIMILAR_DEPTH
    assert entries[bytes.fromhex(other)].base is None
    repo.reader.forget()
    assert all(b"".join(repo.load(content)) == data for content, data in saved.items())
    repo.close()


def test_too_much_for_one_object_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pack.MAX_PLAIN_BYTES, ObjectKind.RECORD, 1000)
    repo = PackRepository(MemoryStore(), tmp_path / "index", KEY)
    with pytest.raises(LimitExceeded, match="1001 bytes"):
        repo.save_record(bytes(1000))
    assert repo.load_record(repo.save_record(bytes(999))) == bytes(999)
    monkeypatch.setattr(writer, "MAX_ENTRIES", 2)
    entries = tuple(TreeEntry(b"%d" % number, Kind.FILE, 0o644, 0, 0, 0) for number in range(3))
    own = TreeEntry(b"", Kind.DIRECTORY, 0o755, 0, 0, 0)
    with pytest.raises(LimitExceeded, match="3 entries"):
        repo.save_tree(Tree(own, entries))
    assert repo.load_tree(repo.save_tree(Tree(own, entries[:2]))).entries == entries[:2]
    repo.close()


WRITE = """
import sys
import time
from pathlib import Path
from snapshotd.repo.writing.writer import PackRepository
from snapshotd.store.local import LocalStore
repo = PackRepository(LocalStore(Path(sys.argv[1]) / "store"), Path(sys.argv[1]) / "index", bytes(range(32)))
for number in range(6):
    data = (b"version %d of a text " % number) * 5000 * (1 + number % 3)
    print(repo.save_bytes(data), repo.save_record(b"record %d" % number), number % 3 + 1, flush=True)
    repo.flush()
    print("flushed", flush=True)
"""


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("name", [name for name in failpoints.NAMES if name.startswith(("repo.pack.", "repo.index."))])
def test_a_crash_loses_only_what_was_not_flushed(tmp_path: Path, name: str, count: int) -> None:
    environment = os.environ | {"SNAPSHOTD_FAILPOINT": f"{name}:{count}"}
    done = subprocess.run(
        [sys.executable, "-c", WRITE, tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == failpoints.EXIT_CODE, done.stderr
    lines = done.stdout.split("\n")[:-1]
    assert lines.count("flushed") == count - 1
    saved = [line.split() for line in lines if line != "flushed"]
    assert len(saved) == count
    store = LocalStore(tmp_path / "store")
    repo = PackRepository(store, tmp_path / "index", KEY)
    sure = saved if name == "repo.index.committed" else saved[:-1]
    assert [record for record, _ in repo.records()] == [record for _, record, _ in sure]
    for number, (content, record, factor) in enumerate(sure):
        assert b"".join(repo.load(BlobID(content))) == (b"version %d of a text " % number) * 5000 * int(factor)
        assert repo.contains(BlobID(record))
    if sure != saved:
        assert not repo.contains(BlobID(saved[-1][0]))
        again = repo.save_bytes((b"version %d of a text " % (count - 1)) * 5000 * int(saved[-1][2]))
        assert again == saved[-1][0]
        repo.flush()
        assert repo.size_bytes(again)
    repo.close()
    store.close()


FULL = """
import random, subprocess, sys
from pathlib import Path
from snapshotd.errors import OutOfSpace
from snapshotd.repo.writing.writer import PackRepository
from snapshotd.store.local import LocalStore
root, disk = Path(sys.argv[1]), int(sys.argv[2])
subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={disk}", "none", root], check=True)
store = LocalStore(root / "store")
repo = PackRepository(store, root / "index", bytes(range(32)))
rng = random.Random(1)
saved = {}
def fill(size, piece):
    done = {}
    for _ in range(size // piece):
        data = rng.randbytes(piece)
        done[repo.save_bytes(data)] = data
    repo.flush()
    saved.update(done)
fill(disk // 3, 1 << 20)
full = 0
for piece in (1 << 20, 100_000, 3000):
    for _ in range(3):
        try:
            fill(disk * 5 // 4, piece)
        except OutOfSpace as exc:
            assert "disk is full" in str(exc), exc
            full += 1
assert full == 9, full
for _ in range(2000):  # small flushes, so that the index hits the end as well
    try:
        fill(20_000, 10_000)
    except OutOfSpace:
        full += 1
        if full == 30:
            break
assert full == 30, full
indexed = {entry.pack for entry in repo.index.objects()}
for content, data in saved.items():
    assert b"".join(repo.load(content)) == data
subprocess.run(["mount", "-o", f"remount,size={disk * 3}", root], check=True)
fill(disk - (4 << 20), 1 << 20)
repo.close()
repo = PackRepository(store, root / "index", bytes(range(32)))
for content, data in saved.items():
    assert b"".join(repo.load(content)) == data
print("done")
"""


def can_mount() -> bool:
    return (
        subprocess.run(
            ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False
        ).returncode
        == 0
    )


def test_a_full_disk_loses_nothing_that_was_flushed(tmp_path: Path) -> None:
    if not can_mount():
        pytest.skip("mounts a small tmpfs in a mount namespace of its own, which needs root")
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", FULL, tmp_path, str(long.size(9 << 20, 24 << 20))],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "done\n", done.stderr


def test_what_lies_behind_several_bad_blocks_is_found() -> None:
    """Incompressible bytes, in which the heads of long frames are there by chance, do not end the search."""
    rng = random.Random(1)
    contents = [rng.randbytes(1 << 20) for _ in range(long.size(4, 8))]
    data = bytearray(pack.encode_head(pack.new_pack_id()))
    for number, content in enumerate(contents):
        if number % 2 == 0:
            data += bytes(64)  # instead of the head and what follows
            data += frame(content)[64:]
        else:
            data += frame(content)
    found = [one.payload.tobytes() for one in pack.frames(bytes(data)) if isinstance(one, Frame)]
    assert found == contents[1::2]


def test_all_that_is_hashed_in_a_search_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A content of short intact frames, each with one behind it that says it ends before another long one."""
    size = 1 << 17
    planted = bytearray()
    while len(planted) < size - 40:
        left = size - len(planted) - 40
        planted += frame(b"x") + b"\x01" + pack.encode_varint(left) * 2
    hashed = 0

    def digest(data: memoryview) -> bytes:
        nonlocal hashed
        hashed += len(data)
        return xxhash.xxh3_64(data).digest()

    data = pack.encode_head(pack.new_pack_id()) + b"\xff" + planted + bytes(size)
    monkeypatch.setattr(pack, "xxhash", SimpleNamespace(xxh3_64_digest=digest))
    found = list(pack.frames(data))
    assert len(found) > 100
    assert hashed <= 1024 * len(data) + size


def test_a_search_in_a_damaged_pack_is_bounded() -> None:
    """A content in which every third byte begins what looks like a long frame, behind a damaged head."""
    long = b"\x01" + pack.encode_varint(1 << 18) * 2
    pack_id = pack.new_pack_id()
    planted = (long * (1 << 17))[: 1 << 19]
    data = pack.encode_head(pack_id) + b"\xff" + planted + frame(b"intact")
    started = time.process_time()
    found = list(pack.frames(data))
    assert time.process_time() - started < 10
    assert all(isinstance(one, BadFrame) for one in found)
    data = pack.encode_head(pack_id) + b"\xff" + bytes(1 << 19) + frame(b"intact") + frame(b"too")
    assert [one.payload.tobytes() for one in pack.frames(data) if isinstance(one, Frame)] == [b"intact", b"too"]


SOURCE = b"""\
def load(path: str) -> dict[str, Any]:
    \"\"\"Return the configuration in a file.\"\"\"
    with open(path, encoding="utf-8") as f:
        return json.load(f)
"""


def test_the_dictionary_makes_short_texts_shorter() -> None:
    for text in (
        SOURCE,
        b'{"role": "user", "content": "Please fix the failing test in tests/test_main.py"}',
        b"import os\nimport sys\n",
    ):
        assert len(compress.compress_small(text)) * 3 < len(compress.compress(text, 19)) * 2, text
    old = b"x = 1\n" * 30
    assert (
        len(compress.compress_delta(old + SOURCE, old, 9, True)) * 3
        < len(compress.compress_delta(old + SOURCE, old, 9)) * 2
    )


def test_a_dictionary_that_was_changed_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by an installation that converts the ends of lines."""
    file = tmp_path / "dictionary.txt"
    file.write_bytes(dictionary._FILE.read_bytes().replace(b"\n", b"\r\n"))
    monkeypatch.setattr(dictionary, "_FILE", file)
    with pytest.raises(InternalError, match="install snapshotd again"):
        dictionary.load.__wrapped__()


def test_what_needs_the_dictionary_is_not_read_without() -> None:
    payload = bytes(compress.compress_small(SOURCE))
    with pytest.raises(BadFrame):
        compress.decompress(payload, len(SOURCE))
    assert compress.decompress(payload, len(SOURCE), None, True) == SOURCE
