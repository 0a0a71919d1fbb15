"""The copy path on plain directories, with a process that changes the upper at the worst moment."""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotd.errors import LimitExceeded
from snapshotd.kernel import files
from snapshotd.kernel.abilities import Marks
from snapshotd.layers import capture as capture_module
from snapshotd.layers.capture import FinishedCapture, capture
from snapshotd.layers.store import LayerStore
from snapshotd.types import LayerID


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LayerStore]:
    store = LayerStore(tmp_path, "plain")
    yield store
    store.close()


def upper(store: LayerStore, layer: LayerID) -> Path:
    return store.root / layer / "upper"


def take(
    store: LayerStore,
    live: LayerID,
    previous: FinishedCapture | None = None,
    at_freeze: Callable[[], object] = int,
    *mapped: bytes,
) -> FinishedCapture:
    @contextlib.contextmanager
    def frozen() -> Iterator[None]:
        at_freeze()
        yield

    return capture(store, live, previous, frozen(), lambda: set(mapped))


def once_before_xattrs(monkeypatch: pytest.MonkeyPatch, act: Callable[[bytes], object]) -> None:
    """Do `act` with its name when the first entry that is no file has been made, before its attributes are read."""
    real = capture_module._copy_xattrs

    def racing(source: int, target: int, name: bytes, marks: Marks) -> None:
        monkeypatch.setattr(capture_module, "_copy_xattrs", real)
        act(name)
        real(source, target, name, marks)

    monkeypatch.setattr(capture_module, "_copy_xattrs", racing)


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("host:1"), os.mkfifo], ids=["link", "fifo"])
def test_an_entry_that_goes_while_it_is_copied_leaves_no_ghost(
    store: LayerStore, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object]
) -> None:
    live = store.create()
    lock = upper(store, live) / "lock"
    make(lock)
    (upper(store, live) / "f").write_text("x")
    once_before_xattrs(monkeypatch, lambda _: lock.unlink())
    assert os.listdir(upper(store, take(store, live).layer)) == ["f"]


def test_a_link_that_is_made_again_while_it_is_copied(store: LayerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    live = store.create()
    lock = upper(store, live) / "lock"
    lock.symlink_to("host:1")
    once_before_xattrs(monkeypatch, lambda _: lock.unlink())
    mirror = take(store, live, None, lambda: lock.symlink_to("host:2"))
    assert os.readlink(upper(store, mirror.layer) / "lock") == "host:2"


def test_a_file_whose_attribute_goes_while_it_is_copied(store: LayerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    live = store.create()
    (upper(store, live) / "f").write_text("x")
    real = files.read_xattrs

    def racing(fd: int) -> dict[bytes, bytes]:
        monkeypatch.setattr(files, "read_xattrs", real)
        raise OSError(errno.ENODATA, "No data available")

    monkeypatch.setattr(files, "read_xattrs", racing)
    assert (upper(store, take(store, live).layer) / "f").read_text() == "x"


def test_a_name_that_a_listing_shows_twice_is_kept(store: LayerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    live = store.create()
    (upper(store, live) / "d").mkdir()
    (upper(store, live) / "d" / "in").write_text("y")
    (upper(store, live) / "f").write_text("x")
    real = capture_module.Copier.walk

    def twice(copier: capture_module.Copier, *, tolerant: bool) -> Iterator[tuple[bytes, os.stat_result, bool]]:
        for found in real(copier, tolerant=tolerant):
            yield found
            if tolerant and found[0]:
                yield found

    monkeypatch.setattr(capture_module.Copier, "walk", twice)
    copy = upper(store, take(store, live).layer)
    assert ((copy / "f").read_text(), (copy / "d" / "in").read_text()) == ("x", "y")


@pytest.mark.parametrize("name", ["a", "b", "d/c"])
def test_a_mapped_file_is_copied_under_all_its_names(store: LayerStore, name: str) -> None:
    live = store.create()
    root = upper(store, live)
    (root / "d").mkdir()
    (root / "a").write_bytes(b"0000" * 1024)
    for other in ("b", "d/c"):
        (root / other).hardlink_to(root / "a")
    (root / "plain").write_text("x")
    with open(root / name, "r+b") as file, mmap.mmap(file.fileno(), 4096) as mapped:
        mapped[:4] = b"1111"  # the page is dirty: from now on a write gives no new time
        first = take(store, live, None, int, name.encode())
        mapped[:4] = b"2222"
        second = take(store, live, first, lambda: mapped.__setitem__(slice(0, 4), b"3333"), name.encode())
    copy = upper(store, second.layer)
    assert {other: (copy / other).read_bytes()[:4] for other in ("a", "b", "d/c")} == {
        "a": b"3333",
        "b": b"3333",
        "d/c": b"3333",
    }
    assert len({(copy / other).stat().st_ino for other in ("a", "b", "d/c")}) == 1
    assert (upper(store, first.layer) / "a").read_bytes()[:4] == b"1111"
    assert (copy / "plain").stat().st_ino == (upper(store, first.layer) / "plain").stat().st_ino


def test_mapped_names_that_the_upper_does_not_have(store: LayerStore) -> None:
    live = store.create()
    root = upper(store, live)
    (root / "f").write_text("x")
    (root / "link").symlink_to("f")
    first = take(store, live)
    second = take(
        store, live, first, int, b"gone", b"gone/below", b"f/below", b"link/below", b"f (deleted)", b"n" * 300, b"link"
    )
    copies = [upper(store, mirror.layer) for mirror in (first, second)]
    assert (copies[0] / "f").stat().st_ino == (copies[1] / "f").stat().st_ino
    assert os.readlink(copies[1] / "link") == "f"


def test_a_tree_whose_paths_take_too_much_is_refused(store: LayerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each entry is remembered with its whole path."""
    monkeypatch.setattr(capture_module, "MAX_PATHS_BYTES", 10_000)
    live = store.create()
    upper(store, live).joinpath(*["d" * 50] * 30).mkdir(parents=True)
    with pytest.raises(LimitExceeded, match="less deep"):
        take(store, live)
    assert store.layers() == [live]
    monkeypatch.setattr(capture_module, "MAX_PATHS_BYTES", 30_000)
    assert len(take(store, live).seen) == 31


def test_changes_within_one_tick_of_the_clock_are_captured(store: LayerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux 6.13 a file's times stand still between two ticks. Here a file changes at the beginning of a tick,
    right before it is looked at, and again when its content has been copied. A slow machine needs more than a tick for
    that most of the time: the rounds end when some were fast enough."""
    live = store.create()
    file = upper(store, live) / "file"
    file.write_bytes(bytes(8))
    list_directory, copy_data = os.scandir, files.copy_data
    numbers, times = itertools.count(), list[int]()

    def change() -> None:
        os.pwrite(fd, b"%08d" % next(numbers), 0)
        times.append(os.fstat(fd).st_ctime_ns)

    def listed(directory: int) -> Any:
        monkeypatch.setattr(os, "scandir", list_directory)
        tick = capture_module._tick_ns()
        while capture_module._tick_ns() == tick:
            pass
        change()
        return list_directory(directory)

    def copied(source: int, target: int, size: int) -> int:
        monkeypatch.setattr(files, "copy_data", copy_data)
        size = copy_data(source, target, size)
        change()
        return size

    captured, alike, rounds = None, 0, 0
    with open(file, "r+b", buffering=0) as opened:
        fd = opened.fileno()
        while alike < 3 and rounds < (40 if store.host.fine_times else 1000):
            monkeypatch.setattr(os, "scandir", listed)
            monkeypatch.setattr(files, "copy_data", copied)
            captured = take(store, live, captured)
            assert (upper(store, captured.layer) / "file").read_bytes() == file.read_bytes()
            alike += times[-1] == times[-2]
            rounds += 1
    assert store.host.fine_times == (alike == 0)
