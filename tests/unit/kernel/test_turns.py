"""Who gives way waits for who goes first, but never for long; and every long walk gives way."""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from snapshotd.api.snapshots import TaggedInfo
from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.daemon.http.streams import Channel, answer_list
from snapshotd.engine.storage.look import pieces
from snapshotd.formats.ingest import ingest_folder, ingest_tar
from snapshotd.formats.tar_writer import write_tree
from snapshotd.kernel import turns
from snapshotd.kernel.files import DIR_FLAGS
from snapshotd.trees.diff import diff
from snapshotd.trees.hunks import hunks
from snapshotd.trees.materialise import materialise
from snapshotd.trees.patch import write_patch
from snapshotd.trees.stack_view import StackView
from snapshotd.trees.stored_view import StoredView
from tests.memory_repository import MemoryRepository
from tests.stored_trees import save

COUNT = 20


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gives way waits for a minute."""
    monkeypatch.setattr(turns, "_LONGEST_S", 60.0)


def in_a_thread(work: Callable[[], object]) -> threading.Event:
    done = threading.Event()

    def run() -> None:
        work()
        done.set()

    threading.Thread(target=run, daemon=True).start()
    return done


@pytest.mark.usefixtures("patient")
def test_waits_until_nobody_goes_first() -> None:
    with turns.first():
        with turns.first():
            pass
        done = in_a_thread(turns.give_way)
        assert not done.wait(0.1)
    assert done.wait(30)


@pytest.mark.usefixtures("patient")
def test_an_error_ends_going_first() -> None:
    with pytest.raises(KeyError), turns.first():
        raise KeyError
    turns.give_way()


@pytest.mark.usefixtures("patient")
def test_who_goes_first_does_not_wait_for_itself() -> None:
    with turns.first(), turns.first():
        turns.give_way()


def test_does_not_wait_for_long() -> None:
    with turns.first():
        assert in_a_thread(turns.give_way).wait(30)


def test_who_waited_goes_on_for_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(now[0])
        now[0] += seconds

    monkeypatch.setattr(turns, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(turns._changed, "wait_for", lambda _, seconds: wait(seconds))

    def walk() -> None:
        for _ in range(100):
            turns.give_way()
            now[0] += 0.005

    with turns.first():
        assert in_a_thread(walk).wait(30)
    gaps = [after - before for before, after in itertools.pairwise(waits)]
    assert len(waits) > 10
    assert all(gap >= 2 * turns._LONGEST_S - 1e-9 for gap in gaps)


@pytest.mark.usefixtures("patient")
def test_an_answer_waits_for_no_step() -> None:
    """What a command prints goes through it, too."""

    async def send() -> None:
        channel = Channel()
        assert all(channel.send(b"piece") for _ in range(COUNT))

    with turns.first():
        assert in_a_thread(lambda: asyncio.run(send())).wait(30)


def folder(root: Path) -> Path:
    root.mkdir()
    for number in range(COUNT):
        (root / f"f{number}").write_text(f"{number} in {root.name}\n")
    return root


@contextmanager
def opened(root: Path) -> Iterator[int]:
    fd = os.open(root, DIR_FLAGS)
    try:
        yield fd
    finally:
        os.close(fd)


def list_layers(tmp_path: Path) -> None:
    with opened(folder(tmp_path / "a")) as fd, StackView([fd]) as view:
        view.children(view.directory())


def compare_stored_trees(_: Path) -> None:
    repository = MemoryRepository()
    before, after = (
        {b"f%d" % number: b"%s %d" % (name, number) for number in range(COUNT)} for name in (b"old", b"new")
    )
    with StoredView(repository, save(repository, before)) as a, StoredView(repository, save(repository, after)) as b:
        assert len(list(diff(a, b))) == COUNT


def stored(work: Callable[[StoredView, Path], object]) -> Callable[[Path], None]:
    def run(tmp_path: Path) -> None:
        repository = MemoryRepository()
        with StoredView(
            repository, save(repository, {b"f%d" % number: b"%d" % number for number in range(COUNT)})
        ) as view:
            work(view, tmp_path)

    return run


def restore(view: StoredView, to: Path) -> None:
    with opened(to) as fd:
        assert materialise(view, b"", fd).files == COUNT


def copy_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    with opened(tmp_path / "to") as fd:
        ingest_folder(folder(tmp_path / "from"), fd)


def copy_in_a_tar(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for number in range(COUNT):
            archive.addfile(tarfile.TarInfo(f"f{number}"))
    packed.seek(0)
    with opened(tmp_path) as fd:
        ingest_tar(packed, fd, oci_whiteouts=False)


def compare_lines(_: Path) -> None:
    list(hunks([b"a%d" % number for number in range(COUNT)], [b"b%d" % number for number in range(COUNT)], 3))


def write_a_binary_patch(_: Path) -> None:
    repository = MemoryRepository()
    empty, binary = save(repository, {}), save(repository, {b"f": b"\0" + os.urandom(100_000)})
    with StoredView(repository, empty) as a, StoredView(repository, binary) as b:
        write_patch(a, b, b"", lambda _: None)


def large_file(path: Path) -> Path:
    path.mkdir()
    (path / "f").write_bytes(bytes(COUNT << 20))
    return path


def read_a_large_file(tmp_path: Path) -> None:
    with opened(large_file(tmp_path / "a")) as fd, StackView([fd]) as view:
        assert sum(map(len, pieces(view.open(b"f")))) == COUNT << 20


def pack_a_large_file(tmp_path: Path) -> None:
    with opened(large_file(tmp_path / "a")) as fd, StackView([fd]) as view:
        write_tree(view, lambda _: None)


def answer_with_a_list(_: Path) -> None:
    answer_list([TaggedInfo("0" * 32, str(number)) for number in range(COUNT)])


def read_pages(_: Path) -> None:
    with closing(SqliteCatalog(":memory:")) as catalog:
        for number in range(COUNT):
            assert catalog._db.read_page("SELECT ?", (number,), rows=1, size=1) == [(number,)]


@pytest.mark.parametrize(
    "walk",
    [
        list_layers,
        compare_stored_trees,
        stored(lambda view, _: write_tree(view, lambda _: None)),
        stored(restore),
        copy_in_a_folder,
        copy_in_a_tar,
        compare_lines,
        write_a_binary_patch,
        read_a_large_file,
        pack_a_large_file,
        answer_with_a_list,
        read_pages,
    ],
    ids=["layers", "diff", "tar", "restore", "folder", "import", "lines", "binary", "cat", "large", "list", "pages"],
)
def test_a_walk_gives_way_at_every_entry(
    walk: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = 0

    def count() -> None:
        nonlocal given
        given += 1

    monkeypatch.setattr(turns, "give_way", count)
    walk(tmp_path)
    assert given >= COUNT
