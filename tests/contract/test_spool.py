"""The repository's contract over every implementation, and what only holds for blobs in files."""

from __future__ import annotations

import os
import resource
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapshotd.errors import DataLoss, OutOfSpace, VersionMismatch
from snapshotd.kernel import files
from snapshotd.repo import spool_format as blob_format
from snapshotd.repo.spool import Spool
from snapshotd.types import BlobID
from tests import long
from tests.contracts.spool import CHECKS, load


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Spool]:
    opened = Spool(tmp_path / "repo")
    yield opened
    opened.flush()
    opened.close()
    opened.close()
    assert os.listdir(tmp_path / "repo" / "tmp") == []


def path_of(repository: Spool, blob_id: BlobID) -> Path:
    return repository.directory / "blobs" / blob_id[:2] / blob_id


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Callable[[Spool], None], repository: Spool) -> None:
    before = len(os.listdir("/proc/self/fd"))
    check(repository)
    repository.flush()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_blobs_are_there_after_reopening(tmp_path: Path) -> None:
    first = Spool(tmp_path / "repo")
    blob_id = first.save_blob(b"kept")
    first.close()
    again = Spool(tmp_path / "repo")
    assert load(again, blob_id) == b"kept"
    assert again.save_blob(b"kept") == blob_id
    again.close()


def test_ids_differ_between_repositories(tmp_path: Path) -> None:
    one, two = Spool(tmp_path / "one"), Spool(tmp_path / "two")
    assert one.save_blob(b"same") != two.save_blob(b"same")
    one.close()
    two.close()


def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        repository = Spool(tmp_path / "repo")
        blob_id = repository.save_blob(b"secret")
    finally:
        os.umask(old)
    assert stat.S_IMODE(repository.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((repository.directory / "key").stat().st_mode) == 0o600
    assert stat.S_IMODE(path_of(repository, blob_id).stat().st_mode) == 0o600
    repository.close()


def test_leftovers_of_a_crash_are_removed(tmp_path: Path) -> None:
    repository = Spool(tmp_path / "repo")
    repository.writer().write(os.urandom(1 << 18))  # never saved
    assert len(os.listdir(tmp_path / "repo" / "tmp")) == 1
    repository.close()
    Spool(tmp_path / "repo").close()
    assert os.listdir(tmp_path / "repo" / "tmp") == []


def test_a_closed_repository_touches_nothing(tmp_path: Path) -> None:
    repository = Spool(tmp_path / "repo")
    blob_id = repository.save_blob(b"kept")
    repository.close()
    fd = os.open(tmp_path, os.O_RDONLY)  # likely gets a number that the repository had
    try:
        for call in (
            lambda: repository.save_blob(b"late"),
            lambda: repository.load_blob(blob_id),
            lambda: repository.remove(blob_id),
        ):
            with pytest.raises(OSError, match="Bad file descriptor"):
                call()
    finally:
        os.close(fd)


def test_a_damaged_or_missing_key_is_found_at_open(tmp_path: Path) -> None:
    Spool(tmp_path / "repo").close()
    key = tmp_path / "repo" / "key"
    good = key.read_bytes()
    for position in range(len(good)):
        key.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        with pytest.raises(DataLoss, match="repo/key"):
            Spool(tmp_path / "repo")
    for data in (b"", good[:-1], good + b"\0"):
        key.write_bytes(data)
        with pytest.raises(DataLoss, match="repo/key"):
            Spool(tmp_path / "repo")
    key.unlink()
    with pytest.raises(DataLoss, match="missing"):
        Spool(tmp_path / "repo")
    assert not key.exists()


REGIONS = st.one_of(st.integers(0, 60), st.integers(0, 1 << 30))
"""Every byte of the header, and anywhere."""
DAMAGE = st.one_of(
    st.tuples(st.just("flip"), REGIONS, st.integers(1, 255)),
    st.tuples(st.just("cut"), REGIONS, st.just(0)),
    st.tuples(st.just("remove"), REGIONS, st.integers(1, 100)),
    st.tuples(st.just("insert"), REGIONS, st.integers(1, 100)),
    st.tuples(st.just("zero"), REGIONS, st.integers(1, 5000)),
    st.tuples(st.just("append"), st.just(0), st.integers(1, 100)),
)
CONTENTS = st.one_of(
    st.binary(max_size=300),
    st.integers(0, 3_000_000).map(bytes),
    st.tuples(st.binary(min_size=1, max_size=50), st.integers(1, 50_000)).map(lambda pair: pair[0] * pair[1]),
    st.integers(0, 200_000).map(lambda size: zstandard.ZstdCompressor().compress(os.urandom(size))),
)


def damaged(data: bytes, kind: str, where: int, amount: int) -> bytes:
    at = where % len(data)
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ amount]) + data[at + 1 :]
    if kind == "cut":
        return data[:at]
    if kind == "remove":
        return data[:at] + data[at + amount :]
    if kind == "insert":
        return data[:at] + bytes(range(amount)) + data[at:]
    if kind == "zero":
        return data[:at] + bytes(len(data[at : at + amount])) + data[at + amount :]
    return data + bytes(amount)


@settings(
    max_examples=long.size(100, 400),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(content=CONTENTS, damage=DAMAGE)
def test_damage_never_passes(repository: Spool, content: bytes, damage: tuple[str, int, int]) -> None:
    blob_id = repository.save_blob(content)
    path = path_of(repository, blob_id)
    good = path.read_bytes()
    bad = damaged(good, *damage)
    path.write_bytes(bad)
    if bad == good:
        assert load(repository, blob_id) == content
    else:
        with pytest.raises(DataLoss) as caught:
            load(repository, blob_id)
        assert blob_id in caught.value.message
        assert str(path) in caught.value.message
        try:
            assert repository.size_bytes(blob_id) == len(content)
        except DataLoss:
            pass
    assert repository.save_blob(content) == blob_id  # heals it
    assert load(repository, blob_id) == content
    repository.remove(blob_id)


def test_a_blob_under_anothers_name_is_found(repository: Spool) -> None:
    one, two = repository.save_blob(b"one"), repository.save_blob(b"two")
    path_of(repository, one).write_bytes(path_of(repository, two).read_bytes())
    with pytest.raises(DataLoss, match="another"):
        load(repository, one)


def forge(repository: Spool, frame: bytes, plain_bytes: int, *, version: int = 1) -> BlobID:
    """A blob file with valid checksums around any frame."""
    blob_id = repository.save_blob(b"to be replaced")
    fields = struct.pack(
        "<8sHHIQQ16s", b"snapblob", version, 1, 0, plain_bytes, len(frame), xxhash.xxh3_128_digest(frame)
    )
    path_of(repository, blob_id).write_bytes(fields + xxhash.xxh3_64_digest(fields) + frame)
    return blob_id


def test_the_frame_has_its_own_checksum(repository: Spool) -> None:
    """Right content in other bytes than were written is damage too: the two checks do not rest on each other."""
    content = b"some text " * 1000
    blob_id = repository.save_blob(content)
    path = path_of(repository, blob_id)
    frame = zstandard.ZstdCompressor(level=19, write_checksum=True).compress(content)
    fields = struct.pack("<8sHHIQQ", b"snapblob", 1, 1, 0, len(content), len(frame)) + path.read_bytes()[32:48]
    path.write_bytes(fields + xxhash.xxh3_64_digest(fields) + frame)
    with pytest.raises(DataLoss, match="does not match its checksum"):
        load(repository, blob_id)


def test_a_newer_format_is_refused(repository: Spool) -> None:
    blob_id = forge(repository, b"whatever", 8, version=2)
    with pytest.raises(VersionMismatch, match="newer snapshotd"):
        load(repository, blob_id)


def test_a_bomb_is_not_unpacked(repository: Spool) -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 30))
    blob_id = forge(repository, bomb, 5)
    got = 0
    with pytest.raises(DataLoss):  # noqa: PT012 - pieces are counted on the way
        for piece in repository.load_blob(blob_id):
            got += len(piece)
    assert got == 0


def test_a_frame_that_needs_much_memory_is_refused(repository: Spool) -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27)
    frame = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = frame.compress(b"x" * 1000) + frame.flush()
    with pytest.raises(DataLoss, match="does not decompress"):
        load(repository, forge(repository, data, 1000))


def test_memory_does_not_grow_with_the_blob(tmp_path: Path) -> None:
    """600 MiB in and out, zeros in one piece and noise in small ones, with 150 MiB more address space than at the
    start."""
    code = """
import os, resource, sys
from pathlib import Path
from snapshotd.repo.spool import Spool
repository = Spool(Path(sys.argv[1]))
big = bytes(100 << 20)
noise = os.urandom(1 << 20)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (150 << 20),) * 2)
with repository.writer() as writer:
    for _ in range(5):
        writer.write(big)
    for n in range(100):
        writer.write(noise)
    blob_id = writer.save()
assert sum(len(piece) for piece in repository.load_blob(blob_id)) == 600 << 20
repository.close()
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "repo")], check=True, timeout=120)
    assert resource.getrlimit(resource.RLIMIT_AS)  # the limit was the child's


def test_a_full_disk_leaves_nothing(small_disk: Path) -> None:
    repository = Spool(small_disk / "repo")
    kept = repository.save_blob(os.urandom(100_000))
    used = os.statvfs(small_disk).f_bfree
    for _ in range(3):
        with pytest.raises(OutOfSpace, match="free some space"), repository.writer() as writer:  # noqa: PT012 - until it is full
            while True:
                writer.write(os.urandom(50_000))
        assert os.listdir(repository.directory / "tmp") == []
        assert os.statvfs(small_disk).f_bfree == used
    assert list(repository.blobs()) == [kept]
    assert load(repository, repository.save_blob(b"after")) == b"after"
    repository.flush()
    repository.close()


def test_a_disk_that_fills_at_the_very_end_leaves_nothing(small_disk: Path) -> None:
    """The frame of a small blob is written by `save`, where the disk is full already."""
    repository = Spool(small_disk / "repo")
    writer = repository.writer()
    writer.write(os.urandom(60_000))
    with pytest.raises(OSError, match="No space"), (small_disk / "filler").open("wb", buffering=0) as filler:  # noqa: PT012
        while True:
            filler.write(b"\0" * 4096)
    with pytest.raises(OutOfSpace):
        writer.save()
    assert os.listdir(repository.directory / "tmp") == []
    assert list(repository.blobs()) == []
    repository.close()


@pytest.mark.parametrize("count", [1, 5, 40])
def test_a_failed_flush_is_never_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    repository = Spool(tmp_path / "repo")
    repository.flush()
    ids = [repository.save_blob(b"%d" % number) for number in range(count)]

    def fail(_fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        patch.setattr(files, "sync_filesystem", fail)
        with pytest.raises(OSError, match="Input/output"):
            repository.flush()
    with pytest.raises(OSError, match="not made durable"):
        repository.flush()
    assert load(repository, ids[0]) == b"0"
    repository.close()


def test_a_flush_syncs_each_new_file_once_and_its_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    whole: list[int] = []
    real, real_whole = os.fsync, files.sync_filesystem

    def sync(fd: int) -> None:
        synced.append(os.fstat(fd).st_ino)
        real(fd)

    def sync_all(fd: int) -> None:
        whole.append(fd)
        real_whole(fd)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(files, "sync_filesystem", sync_all)
    repository = Spool(tmp_path / "repo")
    repository.flush()
    assert len(whole) == 1  # what an earlier process may have left
    synced.clear()
    blob_id = repository.save_blob(b"new")
    repository.save_blob(b"new")
    repository.flush()
    path = path_of(repository, blob_id)
    assert sorted(synced) == sorted(one.stat().st_ino for one in (path, path.parent, path.parent.parent))
    synced.clear()
    repository.flush()
    assert synced == []
    for number in range(40):
        repository.save_blob(b"%d" % number)
    repository.flush()
    assert (len(whole), synced) == (2, [])
    repository.close()


def test_header_is_as_documented(repository: Spool) -> None:
    blob_id = repository.save_blob(b"x" * 1000)
    data = path_of(repository, blob_id).read_bytes()
    assert data[:16] == b"snapblob\x01\x00\x01\x00\x00\x00\x00\x00"
    assert struct.unpack_from("<QQ", data, 16) == (1000, len(data) - 56)
    assert zstandard.ZstdDecompressor().decompressobj().decompress(data[56:]) == b"x" * 1000
    assert blob_format.HEADER_BYTES == 56


_KEEPS = """
import os, sys
from pathlib import Path
from snapshotd.repo.spool import Spool

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

spool = Spool(Path(sys.argv[1]))
def saved(number):
    writer = spool.writer()
    writer.write(os.urandom(500) * (int(sys.argv[2]) // 500) + b"%d" % number)
    writer.save()
    return writer
first = [saved(number) for number in range(4)]
before = resident()
kept = [saved(number) for number in range(4, 104)]
print((resident() - before) >> 20)
"""


@pytest.mark.parametrize("size", [1000, 1 << 20])
def test_a_writer_that_has_saved_keeps_no_memory(tmp_path: Path, size: int) -> None:
    """An object that refers to one may wait long for the collector."""
    argv = [sys.executable, "-c", _KEEPS, str(tmp_path), str(size)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 40
