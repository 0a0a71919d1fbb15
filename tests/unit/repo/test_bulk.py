"""Many contents at once: what is there, in how few reads, and that nothing damaged comes out."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from snapshotd.errors import DataLoss, NotFound
from snapshotd.repo.base import ObjectKind
from snapshotd.repo.format import compress, pack
from snapshotd.repo.format.ids import raw_id
from snapshotd.repo.format.pack import Frame
from snapshotd.repo.reading import bulk
from snapshotd.repo.reading.reader import PackReader
from snapshotd.repo.writing.writer import PackRepository
from snapshotd.store.local import LocalStore
from snapshotd.types import BlobID

KEY = bytes(range(32))


class Counting(LocalStore):
    """Counts the reads of packs."""

    reads = 0

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        self.reads += 1
        return super().get(key, offset, length)


class Rig:
    """A repository of 200 small contents, every second one compressible, and a reader of it."""

    def __init__(self, directory: Path) -> None:
        rng = random.Random(5)
        self.store = Counting(directory / "store")
        self.writer = PackRepository(self.store, directory / "index.db", KEY)
        self.saved: dict[BlobID, bytes] = {}
        for number in range(200):
            data = rng.randbytes(3000) if number % 2 else b"line %d of a text\n" % number * rng.randrange(1, 500)
            self.saved[self.writer.save_bytes(data)] = data
        self.writer.flush()
        self.reader = PackReader(self.store, directory / "index.db", KEY)
        (self.pack,) = [path for path in (directory / "store/packs").rglob("*") if path.is_file()]

    def close(self) -> None:
        self.reader.close()
        self.writer.close()
        self.store.close()

    def missing(self, contents: Sequence[BlobID]) -> list[BlobID]:
        """Those without an answer; the others' is right."""
        found = self.reader.load_many(contents)
        assert all(data is None or data == self.saved[content] for content, data in zip(contents, found, strict=True))
        return [content for content, data in zip(contents, found, strict=True) if data is None]

    def place(self, content: BlobID) -> tuple[int, int]:
        entry = self.reader.find(raw_id(content, "content"))
        assert entry is not None
        return entry.offset, entry.stored


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def test_one_read_gives_neighbours(rig: Rig) -> None:
    contents = list(rig.saved)
    random.Random(1).shuffle(contents)
    rig.store.reads = 0
    assert rig.missing([*contents, contents[0]]) == []
    assert rig.store.reads == 1


def test_what_lies_far_apart_is_not_read_in_one(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = sorted(rig.saved, key=rig.place)
    monkeypatch.setattr(bulk, "_MAX_GAP_BYTES", 100)
    rig.store.reads = 0
    assert rig.missing([ends[0], ends[-1]]) == []
    assert rig.store.reads == 2
    monkeypatch.setattr(bulk, "_MAX_RUN_BYTES", 10_000)
    rig.store.reads = 0
    assert rig.missing(ends) == []
    assert rig.store.reads >= sum(rig.place(content)[1] for content in ends) // 10_000


def test_a_damaged_one_has_no_answer_and_the_others_have(rig: Rig) -> None:
    content = list(rig.saved)[77]
    offset, stored = rig.place(content)
    data = bytearray(rig.pack.read_bytes())
    data[offset + stored // 2] ^= 1
    rig.pack.chmod(0o600)
    rig.pack.write_bytes(data)
    assert rig.missing(list(rig.saved)) == [content]
    with pytest.raises(DataLoss):
        b"".join(rig.reader.load(content))


def test_another_objects_bytes_are_not_believed(rig: Rig) -> None:
    """Two intact frames of one length change places."""
    one, two = [content for content, data in rig.saved.items() if len(data) == 3000][:2]
    data = bytearray(rig.pack.read_bytes())
    (at, size), (other, other_size) = rig.place(one), rig.place(two)
    assert size == other_size
    data[at : at + size], data[other : other + size] = data[other : other + size], data[at : at + size]
    rig.pack.chmod(0o600)
    rig.pack.write_bytes(data)
    assert rig.missing(list(rig.saved)) == [one, two]


def test_a_pack_that_is_gone_has_no_answers(rig: Rig) -> None:
    rig.pack.unlink()
    assert rig.missing(list(rig.saved)) == list(rig.saved)


def test_memory_is_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "MAX_BYTES", 20_000)
    found = [data for data in rig.reader.load_many(list(rig.saved)) if data is not None]
    assert 0 < sum(map(len, found)) <= 20_000


def test_what_is_no_small_content(rig: Rig) -> None:
    large = rig.writer.save_bytes(random.Random(2).randbytes(600_000))
    record = rig.writer.save_record(b'{"version": 1}')
    rig.writer.flush()
    assert rig.reader.load_many([large, BlobID(record), BlobID("00" * 32)]) == [None] * 3
    assert rig.reader.load_many([]) == []
    with pytest.raises(NotFound):
        rig.reader.load_many([BlobID("../x")])


def test_one_bad_payload_spoils_no_bytes() -> None:
    """zstd does not say which of them it was, so none of the compressed ones is believed."""
    good = compress.compress(b"a text, a text, a text, a text" * 20, 3)

    def made(payload: bytes, plain: int, zstd: bool, words: bool = False) -> Frame:
        return pack.decode_frame(
            b"".join(pack.encode_frame(ObjectKind.CHUNK, bytes(32), plain, payload, zstd, dictionary=words))
        )

    fine, raw, bad = made(good, 600, True), made(b"raw", 3, False), made(b"nonsense", 9, True)
    assert compress.decode_many([fine, raw, bad]) == [None, b"raw", None]
    assert compress.decode_many([fine, raw]) == [b"a text, a text, a text, a text" * 20, b"raw"]
    assert compress.decode_many([made(b"", 0, False), made(good, 599, True)]) == [b"", None]
    small = made(compress.compress_small(b"import json\nimport os\n"), 22, True, True)
    assert compress.decode_many([small, fine, raw]) == [
        b"import json\nimport os\n",
        b"a text, a text, a text, a text" * 20,
        b"raw",
    ]
    assert compress.decode_many([small, bad]) == [b"import json\nimport os\n", None]
    assert compress.decode_many([fine, made(b"nonsense", 9, True, True)]) == [
        b"a text, a text, a text, a text" * 20,
        None,
    ]
