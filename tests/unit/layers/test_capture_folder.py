"""The capture of a plain folder: whatever happens between two captures, the layers together are the folder."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from snapshotd.layers.capture import _CLOCK_REALTIME_COARSE, capture_folder, folder_changed, scan_folder
from snapshotd.layers.store import LayerStore
from snapshotd.trees.stack_view import StackView
from snapshotd.types import Kind, LayerID
from tests import long

ROUNDS = long.size(30, 400)


class World:
    """A live folder and the layers taken of it, newest first."""

    def __init__(self, store: LayerStore) -> None:
        self.store, self.live = store, store.create()
        self.folder = store.root / self.live / "upper"
        self.layers: list[LayerID] = []
        self.seen = scan_folder(store, self.live)

    def capture(self, *mapped: bytes) -> bool:
        """False: nothing had changed."""
        found = capture_folder(self.store, self.live, self.seen, set(mapped))
        if found is not None:
            self.layers.insert(0, found.layer)
            self.seen = found.seen
        return found is not None

    def recorded(self) -> dict[bytes, Any]:
        return _seen_in([self.store.root / layer / "upper" for layer in self.layers])

    def check(self) -> None:
        assert self.recorded() == _seen_in([self.folder])


def _seen_in(directories: list[Path]) -> dict[bytes, Any]:
    """Everything that is kept of each entry of a stack, with the names that are one file."""
    fds = [os.open(directory, os.O_RDONLY | os.O_DIRECTORY) for directory in directories]
    try:
        with StackView(fds) as view:
            found: dict[bytes, Any] = {}
            names: dict[tuple[int, int], list[bytes]] = {}
            for path, entry in view.walk(b""):
                content: bytes = b""
                if entry.kind is Kind.FILE:
                    with open(view.open(path), "rb") as file:
                        content = file.read()
                elif entry.kind is Kind.SYMLINK:
                    content = view.readlink(path)
                if entry.kind is not Kind.DIRECTORY:
                    names.setdefault(entry.inode, []).append(path)
                facts = (entry.kind, entry.mode, entry.uid, entry.gid, entry.mtime_ns, content)
                found[path] = (facts, view.xattrs(path))
            for group in names.values():
                for path in group:
                    found[path] = (*found[path], sorted(group))
            return found
    finally:
        for fd in fds:
            os.close(fd)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    store = LayerStore(tmp_path, "plain")
    yield World(store)
    store.close()


def _change(folder: Path, chance: random.Random) -> None:
    """One of the things that programs do, to a name among a few, so that they meet."""
    names = [folder / one for one in ("a", "b", "d", "d/a", "d/e", "d/e/x", "f")]
    path, other = chance.choice(names), chance.choice(names)
    try:
        match chance.randrange(10):
            case 0 | 1:
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o644)  # or a fifo would wait
                with open(fd, "wb") as file:
                    file.write(chance.randbytes(chance.choice((0, 3, 3, 5000))))
            case 2:
                path.mkdir()
            case 3:
                os.replace(path, other)
            case 4:
                path.unlink()
            case 5:
                path.rmdir()
            case 6:
                os.link(path, other)
            case 7:
                os.symlink(b"a", path)
            case 8:
                os.setxattr(path, "user.note", chance.randbytes(3))
                path.chmod(chance.choice((0o644, 0o600, 0o755)))
            case 9:
                os.mkfifo(path)
    except OSError:
        pass  # not what it may be done to


@pytest.mark.parametrize("number", range(long.size(8, 40)))
def test_the_layers_are_the_folder(world: World, number: int) -> None:
    chance = random.Random(f"{long.SEED}-{number}")
    for _ in range(ROUNDS):
        for _ in range(chance.choice((0, 1, 1, 2, 8))):
            _change(world.folder, chance)
        changed = folder_changed(world.store, world.live, world.seen, set())
        assert world.capture() is changed
        if world.layers:
            world.check()


def test_names_of_one_file_are_captured_together_though_the_clock_ticks(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(world.store), "host", replace(world.store.host, fine_times=False))
    (world.folder / "d").mkdir()
    (world.folder / "f").write_text("x")
    os.link(world.folder / "f", world.folder / "d/e")
    ticks = itertools.count(os.stat(world.folder / "f").st_ctime_ns)
    monkeypatch.setattr("snapshotd.layers.capture._tick_ns", lambda: next(ticks))
    assert world.capture()
    assert world.capture(), "the file's time was the present tick's"
    world.check()


def _await_tick() -> None:
    """Return when a file that was changed before is not of the present tick any more."""
    before = time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)
    while time.clock_gettime_ns(_CLOCK_REALTIME_COARSE) == before:
        pass


def test_what_is_untouched_is_in_no_layer(world: World) -> None:
    (world.folder / "kept").mkdir()
    (world.folder / "kept/file").write_text("x")
    (world.folder / "gone").write_text("x")
    _await_tick()
    world.capture()
    (world.folder / "gone").unlink()
    (world.folder / "new").write_text("x")
    _await_tick()
    assert world.capture()
    top = world.store.root / world.layers[0] / "upper"
    assert sorted(one.name for one in top.iterdir()) == ["gone", "new"]
    assert not world.capture()


def test_two_changes_within_one_tick(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where times are not fine, a file whose time is the present tick's is copied again."""
    monkeypatch.setattr(type(world.store), "host", replace(world.store.host, fine_times=False))
    file = world.folder / "f"
    file.write_text("one")
    monkeypatch.setattr("snapshotd.layers.capture._tick_ns", lambda: os.stat(file).st_ctime_ns)
    world.capture()
    st = os.stat(file)
    monkeypatch.setattr(os, "stat", _with_times_of(file, st))
    file.write_text("two")
    assert world.capture()
    assert world.recorded()[b"f"][0][-1] == b"two"


def _with_times_of(file: Path, old: os.stat_result) -> Any:
    """os.stat of a clock that stands still."""
    real, inode = os.stat, old.st_ino

    def stat(*args: Any, **more: Any) -> Any:
        found = real(*args, **more)
        return old if found.st_ino == inode else found

    return stat


def test_a_mapped_file_is_copied_though_its_time_stands_still(world: World) -> None:
    file = world.folder / "mapped"
    file.write_bytes(b"a" * 4096)
    with open(file, "r+b") as opened, mmap.mmap(opened.fileno(), 4096) as memory:
        memory[0] = ord("b")
        _await_tick()
        world.capture()
        before = file.stat()
        memory[0] = ord("c")
        if file.stat().st_ctime_ns == before.st_ctime_ns:
            assert not world.capture(), "so it is seen that the time tells nothing"
        assert world.capture(b"mapped")
        assert world.recorded()[b"mapped"][0][-1][:1] == b"c"


def test_marks_that_a_program_sets_mean_nothing(world: World) -> None:
    """A program in the folder may have the rights to write overlay's marks: no snapshot loses a file by them."""
    (world.folder / "hidden").touch()
    (world.folder / "d").mkdir()
    os.setxattr(world.folder / "hidden", world.store.marks.whiteout, b"")
    os.setxattr(world.folder / "d", world.store.marks.opaque, b"y")
    world.capture()
    assert set(world.recorded()) == {b"hidden", b"d"}


def test_without_device_nodes_a_whiteout_is_a_marked_file(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an overlay file system, which makes none: in a container's own root."""

    def refused(*_: object, **__: object) -> None:
        raise PermissionError

    (world.folder / "gone").write_text("x")
    (world.folder / "kept").write_text("x")
    world.capture()
    (world.folder / "gone").unlink()
    monkeypatch.setattr(os, "mknod", refused)
    world.capture()
    assert (world.store.root / world.layers[0] / "upper/gone").is_file()
    world.check()
