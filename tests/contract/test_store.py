"""The store's contract over every implementation, bare and wrapped, and what only holds for one of them."""

from __future__ import annotations

import errno
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from snapshotd.errors import Conflict, DataLoss, NotFound, OutOfSpace
from snapshotd.kernel import files
from snapshotd.repo.base import Roots
from snapshotd.repo.fleet.blocks import DiskBlocks
from snapshotd.repo.fleet.cached import CachedStore
from snapshotd.repo.upkeep.maintenance import PackMaintenance
from snapshotd.store.base import Store
from snapshotd.store.local import LocalStore
from snapshotd.store.memory import MemoryStore
from snapshotd.store.s3 import S3Store
from tests import s3_service
from tests.contracts.store import CHECKS
from tests.faulty_store import APPLIES, Fault, FaultyStore, Script, Seeded

over_each = pytest.mark.parametrize(
    "bare", ["local", "memory", pytest.param("s3", marks=pytest.mark.long)], indirect=True
)
"""The wrapper of the tests does the same over each store: the long set has it over S3 too, which costs most."""


@pytest.fixture(scope="module")
def other_bucket() -> Iterator[tuple[str, str]]:
    """As `s3_bucket`, in SeaweedFS: a server that keeps its values on a disk."""
    with s3_service.running(service="seaweedfs") as endpoint:
        yield endpoint, s3_service.make_bucket(endpoint)


@pytest.fixture
def bare(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An empty store. Those in S3 have one bucket, and each a prefix of its own."""
    store: Store
    if request.param == "local":
        store = LocalStore(tmp_path / "store")
    elif request.param == "memory":
        store = MemoryStore()
    elif request.param == "cached":
        store = CachedStore(MemoryStore(), DiskBlocks(tmp_path / "cache", bytes(32), 1 << 30))
    else:
        endpoint, bucket = request.getfixturevalue("s3_bucket" if request.param == "s3" else "other_bucket")
        store = S3Store(bucket, f"some/Prefix{os.urandom(6).hex()}", endpoint=endpoint, page_keys=7)
    yield store
    store.close()
    store.close()


@pytest.mark.parametrize(
    ("bare", "wrapped"),
    [
        pytest.param(
            store,
            wrapped,
            id=f"{store}-{'wrapped' if wrapped else 'bare'}",
            marks=[pytest.mark.long] if wrapped and store == "s3" else [],
        )
        for store in ("local", "memory", "cached", "s3")
        for wrapped in (False, True)
    ],
    indirect=["bare"],
)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Callable[[Store], None], bare: Store, wrapped: bool) -> None:
    before = len(os.listdir("/proc/self/fd"))
    check(FaultyStore(bare) if wrapped else bare)
    if isinstance(bare, LocalStore):
        assert os.listdir(bare.directory / "@tmp") == []
        assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.long  # over moto: above
@pytest.mark.parametrize("bare", ["seaweedfs"], indirect=True)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract_of_a_second_service(check: Callable[[Store], None], bare: Store) -> None:
    """It lists folder by folder, so `b/c` before `b-`, where S3 goes by all bytes. That is told, and nothing left out."""
    if check.__name__ == "keys_are_listed_in_order":
        with pytest.raises(OSError, match="out of order"):
            check(bare)
        return
    check(bare)


# --- the wrapper ---


@over_each
@pytest.mark.parametrize("operation", APPLIES)
def test_each_fault_does_what_it_says(operation: str, bare: Store) -> None:
    value = random.Random(1).randbytes(1000)
    for fault in APPLIES[operation]:
        store = FaultyStore(bare)
        prefix = fault.value
        for key in ("one", "two", "three"):
            store.put(f"{prefix}/{key}", [value])
        store.schedule = Script([(operation, 2, fault)])
        calls: dict[str, Callable[[str], object]] = {
            "put": lambda key, store=store, prefix=prefix: store.put(f"{prefix}/new/{key}", [value]),  # type: ignore[misc]
            "get": lambda key, store=store, prefix=prefix: store.get(f"{prefix}/{key}"),  # type: ignore[misc]
            "size_bytes": lambda key, store=store, prefix=prefix: store.size_bytes(f"{prefix}/{key}"),  # type: ignore[misc]
            "keys": lambda _key, store=store, prefix=prefix: list(store.keys(f"{prefix}/")),  # type: ignore[misc]
            "delete": lambda key, store=store, prefix=prefix: store.delete(f"{prefix}/{key}"),  # type: ignore[misc]
        }
        call = calls[operation]
        call("one")
        if fault in (Fault.ERROR_BEFORE, Fault.ERROR_AFTER, Fault.LIST_FAILS):
            with pytest.raises(OSError, match="injected"):
                call("two")
        elif fault is Fault.FULL:
            with pytest.raises(OutOfSpace, match="injected"):
                call("two")
        else:
            got = call("two")
            assert got != (value if operation == "get" else call("three"))
        there = set(bare.keys())
        assert (f"{prefix}/new/two" in there) is (operation == "put" and fault is Fault.ERROR_AFTER)
        assert (f"{prefix}/two" not in there) is (operation == "delete" and fault is Fault.ERROR_AFTER)
        assert [(one, what) for one, _, what in store.injected] == [(operation, fault)]
        call("two")
        call("three")
        assert len(store.injected) == 1
        for key in list(bare.keys()):
            bare.delete(key)


def test_a_stale_list_is_from_before_the_last_change() -> None:
    store = FaultyStore(MemoryStore(), Script([("keys", 0, Fault.LIST_STALE)]))
    for key in ("a", "b", "c"):
        store.put(key, [b"x"])
    store.delete("a")
    assert list(store.keys()) == ["a", "b"]
    assert list(store.keys("b")) == ["b"]


@over_each
def test_the_same_seed_gives_the_same_faults(bare: Store) -> None:
    def play(seed: int) -> list[tuple[str, str, Fault]]:
        store = FaultyStore(bare, Seeded(seed, dict.fromkeys(Fault, 0.1)))
        for number in range(30):
            for call in (
                lambda n=number: store.put(f"{n}", [b"x" * 100]),
                lambda n=number: store.get(f"{n}"),
                lambda: list(store.keys()),
            ):
                try:
                    call()
                except (OSError, OutOfSpace, NotFound):
                    continue
        for key in list(bare.keys()):
            bare.delete(key)
        return store.injected

    first = play(1)
    assert first == play(1) != play(2)
    assert {fault for _, _, fault in first} > {Fault.ERROR_BEFORE, Fault.FLIPPED}


def test_a_script_refuses_what_cannot_happen() -> None:
    with pytest.raises(ValueError, match="cannot happen"):
        Script([("size_bytes", 1, Fault.FLIPPED)])


@over_each
def test_a_lost_answer_is_made_good_by_trying_again(bare: Store) -> None:
    store = FaultyStore(bare, Script([("put", 1, Fault.ERROR_AFTER)]))
    with pytest.raises(OSError, match="lost"):
        store.put("key", [b"value"])
    store.put("key", [b"value"])
    with pytest.raises(Conflict):
        store.put("key", [b"other"])
    assert store.get("key") == b"value"


# --- a directory ---


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalStore]:
    store = LocalStore(tmp_path / "deep" / "er" / "store")
    yield store
    store.close()


def test_values_are_there_after_reopening(local: LocalStore) -> None:
    local.put("a/b", [b"kept"])
    local.close()
    again = LocalStore(local.directory)
    assert again.get("a/b") == b"kept"
    again.close()


def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        store = LocalStore(tmp_path / "store")
        store.put("a/b/c", [b"secret"])
    finally:
        os.umask(old)
    for path in (tmp_path / "store", *(tmp_path / "store").rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    store.close()


def test_a_closed_store_touches_nothing(local: LocalStore) -> None:
    local.put("a", [b"kept"])
    local.close()
    fd = os.open("/", os.O_RDONLY)  # likely gets a number that the store had
    try:
        for call in (
            lambda: local.put("b", [b"x"]),
            lambda: local.get("a"),
            lambda: local.delete("a"),
            lambda: list(local.keys()),
        ):
            with pytest.raises(OSError, match="Bad file descriptor"):
                call()
    finally:
        os.close(fd)


def test_a_key_and_a_folder_cannot_have_one_name(local: LocalStore) -> None:
    """Nothing in the contract: the repository never asks for it. It must still be an error, and harm nothing."""
    local.put("a/b", [b"x"])
    local.put("c", [b"y"])
    for key in ("a", "c/d", "a/b/c/d"):
        with pytest.raises(Conflict, match=key):
            local.put(key, [b"z"])
    local.delete("a")
    assert list(local.keys()) == ["a/b", "c"]


def test_what_others_put_there_is_neither_followed_nor_listed(local: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "value").write_bytes(b"not ours")
    (local.directory / "link").symlink_to(tmp_path / "outside")
    (local.directory / "value").symlink_to(tmp_path / "outside" / "value")
    os.mkfifo(local.directory / "fifo")
    (local.directory / "UPPER").write_bytes(b"no key")
    local.put("good", [b"good"])
    assert list(local.keys()) == ["good"]
    assert list(local.keys("link/")) == []
    for key in ("value", "fifo"):
        with pytest.raises(DataLoss, match="not a regular file"):
            local.get(key)
        with pytest.raises(DataLoss, match="not a regular file"):
            local.put(key, [b"x"])
    for call in (lambda: local.get("link/value"), lambda: local.put("link/new", [b"x"])):
        with pytest.raises((OSError, DataLoss, Conflict)):
            call()
    assert os.listdir(tmp_path / "outside") == ["value"]
    assert (tmp_path / "outside" / "value").read_bytes() == b"not ours"


PUT_FOR_EVER = """
import os, sys
from pathlib import Path
from snapshotd.store.local import LocalStore
store = LocalStore(Path(sys.argv[1]))
print("ready", flush=True)
number = 0
while True:
    store.put(f"{number % 7}/{number}", [b"%d " % number * 100_000] * 3)
    number += 1
"""


@contextmanager
def writer(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", PUT_FOR_EVER, str(directory)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_killed_put_leaves_nothing_or_the_whole_value(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    (directory / "@tmp").mkdir(parents=True)
    seen_half = 0
    for _ in range(8):
        with writer(directory) as process:
            eventually(lambda: os.listdir(directory / "@tmp"))
            process.send_signal(signal.SIGKILL)
            process.wait(60)
        seen_half += len(os.listdir(directory / "@tmp"))
        store = LocalStore(directory)
        assert os.listdir(directory / "@tmp") == []
        for key in list(store.keys()):
            assert store.get(key) == b"%d " % int(key.split("/")[1]) * 300_000
        store.close()
    assert seen_half  # else no put was ever cut off, and nothing was tested


def test_opening_leaves_the_files_of_live_writers_alone(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    LocalStore(directory).close()
    (directory / "@tmp" / "no-name-of-ours").touch()
    (directory / "@tmp" / f"{os.getpid()}.1.0123").touch()  # an earlier process of this pid
    with writer(directory) as process:
        opened, put = 0, set[str]()
        while opened <= 20 or len(put) <= 20:  # both go on side by side
            store = LocalStore(directory)
            put.update(store.keys())
            store.close()
            opened += 1
            assert process.poll() is None  # a missing temporary file would have ended it
        assert len(list((directory / "@tmp").iterdir())) <= 1


def test_a_prune_removes_what_a_process_left_that_ended_after_the_store_was_opened(tmp_path: Path) -> None:
    """A killed process that its parent has not waited for still has an entry in /proc."""
    directory = tmp_path / "store"
    with writer(directory) as process:
        eventually(lambda: (directory / "@tmp").exists() and os.listdir(directory / "@tmp"))
        started = Path(f"/proc/{process.pid}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
        left = directory / "@tmp" / f"{process.pid}.{started}.0123"
        left.touch()
        maintenance = PackMaintenance(LocalStore(directory), tmp_path / "index.db", bytes(32))
        nothing = Roots({}, {}, {})
        maintenance.writer()
        assert left.exists()
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        maintenance.collect(nothing, grace_s=0, now=time.time(), dry_run=False, progress=lambda _: None)
        assert os.listdir(directory / "@tmp") == []
        maintenance.writer().close()


def test_a_full_disk_leaves_nothing_and_works_again(small_disk: Path) -> None:
    store = LocalStore(small_disk / "store")
    store.put("kept", [os.urandom(100_000)])
    (small_disk / "filler").write_bytes(bytes(1 << 20))
    free = os.statvfs(small_disk).f_bfree
    for _ in range(3):
        with pytest.raises(OutOfSpace, match="free some space"):
            store.put("big", [os.urandom(500_000)] * 4)
        assert os.listdir(store.directory / "@tmp") == []
        assert os.statvfs(small_disk).f_bfree == free
    assert list(store.keys()) == ["kept"]
    (small_disk / "filler").unlink()
    store.put("big", [os.urandom(1_000_000)])
    store.close()


def test_deleting_and_listing_work_on_a_full_disk(small_disk: Path) -> None:
    store = LocalStore(small_disk / "store")
    store.put("a/one", [os.urandom(500_000)])
    with pytest.raises(OSError, match="No space"), (small_disk / "filler").open("wb", buffering=0) as filler:  # noqa: PT012
        while True:
            filler.write(b"\0" * 4096)
    with pytest.raises(OutOfSpace):
        store.put("a/two", [b"x" * 4096])
    store.close()
    store = LocalStore(small_disk / "store")
    assert list(store.keys()) == ["a/one"]
    store.delete("a/one")
    store.put("a/two", [b"x" * 4096])
    store.close()


@pytest.mark.parametrize("failing", [1, 2, 3])
@pytest.mark.parametrize(
    ("number", "error"), [(errno.EIO, OSError), (errno.ENOSPC, OutOfSpace), (errno.EDQUOT, OutOfSpace)]
)
def test_a_failed_fsync_leaves_nothing(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch, failing: int, number: int, error: type[Exception]
) -> None:
    """Of the file, of the entry of its new folder, of its own entry: each is tried once, and the value is not there."""
    synced: list[str] = []
    real = os.fsync

    def fail(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        if len(synced) == failing:
            raise OSError(number, os.strerror(number))
        real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(error):
            local.put("new/value", [b"x"])
    assert len(synced) == failing
    assert list(local.keys()) == []
    assert os.listdir(local.directory / "@tmp") == []
    local.put("new/value", [b"x"])
    assert local.get("new/value") == b"x"


def test_everything_on_the_way_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fsync

    def sync(fd: int) -> None:
        synced.append(os.fstat(fd).st_ino)
        real(fd)

    monkeypatch.setattr(os, "fsync", sync)
    store = LocalStore(tmp_path / "x" / "y")
    assert synced == [tmp_path.stat().st_ino, (tmp_path / "x").stat().st_ino]
    synced.clear()
    store.put("a/b/c", [b"1"])
    root, a, b = (path.stat().st_ino for path in (store.directory, store.directory / "a", store.directory / "a" / "b"))
    assert synced == [(store.directory / "a" / "b" / "c").stat().st_ino, root, a, b]
    synced.clear()
    store.put("a/b/d", [b"2"])
    assert synced == [(store.directory / "a" / "b" / "d").stat().st_ino, b]
    synced.clear()
    store.delete("a/b/d")
    assert synced == [b]
    store.close()


def test_short_writes_are_gone_on_with(local: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.writev
    rng = random.Random(1)

    def some(fd: int, views: Sequence[memoryview]) -> int:
        joined = b"".join(views)
        return real(fd, [joined[: rng.randint(0, min(len(joined), 3000))]])

    monkeypatch.setattr(os, "writev", some)
    parts = [rng.randbytes(rng.randint(0, 900)) for _ in range(200)]
    local.put("a", parts)
    assert local.get("a") == b"".join(parts)


@pytest.mark.parametrize("refused", [None, errno.EOPNOTSUPP, errno.EINVAL])
def test_large_values_pass_by_the_cache_where_that_can_be_had(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch, refused: int | None
) -> None:
    asked: list[int] = []

    def seen(fd: int, views: Sequence[memoryview], offset: int, flags: int) -> int:
        asked.append(flags)
        if refused is not None:
            raise OSError(refused, os.strerror(refused))
        return os.writev(fd, views)  # whatever this kernel can

    monkeypatch.setattr(os, "pwritev", seen)
    parts = [random.Random(1).randbytes(1 << 20)] * 4
    local.put("small", parts[:3])
    assert asked == []
    local.put("large", parts)
    assert asked == [0x80]
    assert local.get("large") == b"".join(parts)


def test_a_large_value_that_cannot_be_written_is_none(local: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OutOfSpace):
        local.put("large", [bytes(5 << 20)])
    assert list(local.keys()) == []


def test_a_medium_that_cannot_be_read_is_data_loss(local: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    local.put("a", [b"x" * 100])

    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(DataLoss, match="cannot read"):
        local.get("a")


def test_a_list_that_fails_is_an_error(local: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("a/1", "b/2", "c/3"):
        local.put(key, [b"x"])
    real = files.open_beneath

    def fail(dir_fd: int, path: bytes, flags: int) -> int:
        if path == b"b":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(dir_fd, path, flags)

    monkeypatch.setattr(files, "open_beneath", fail)
    listed = local.keys()
    assert next(listed) == "a/1"
    with pytest.raises(OSError, match="Input/output"):
        list(listed)
