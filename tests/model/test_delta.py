"""Snapshots of a live upper that is never sealed (layers/delta.py), against the kernel's overlay: after every step the
stack of layers shows exactly what the sandbox sees, to the kernel and to our own reader, and a fresh upper that is filled
from it does too."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from snapshotd.kernel import files, mounts
from snapshotd.kernel.abilities import BY_USER
from snapshotd.kernel.probes import needed
from snapshotd.layers import delta
from snapshotd.layers.capture import Seen
from snapshotd.layers.merge import merge
from snapshotd.layers.store import LayerStore
from snapshotd.layers.view import open_stack
from snapshotd.trees.diff import diff
from snapshotd.types import ImageID, LayerID, Stack
from tests import long
from tests.capabilities import require

IMAGE = ImageID("image")
NAMES = [b"a", b"b", b"c", b"d"]
MOVED = (errno.EXDEV, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST, errno.EINVAL)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LayerStore]:
    require("root")
    root = tmp_path / "layers"
    image = root / "images" / IMAGE / "root"
    (image / "a" / "b").mkdir(parents=True)
    (image / "a" / "b" / "c").write_text("image")
    (image / "b").write_text("file of the image")
    (image / "d" / "a").mkdir(parents=True)
    (image / "d" / "b").symlink_to("a")
    host = replace(needed.probe(tmp_path), redirects=False, marks=BY_USER.prefix.decode())
    store = LayerStore(root, "plain", host)
    yield store
    store.close()


class Live:
    """A live upper over the image, and the stack of what was captured of it."""

    def __init__(self, store: LayerStore, stack: Stack) -> None:
        self.store, self.stack = store, stack
        self.upper = store.create()
        seen = delta.fill(store, self.upper, stack)
        self.seen: Seen | None = seen
        self.root = self._mount()
        delta.note_mount(store, self.upper, seen)

    def close(self) -> None:
        os.close(self.root)

    def _mount(self) -> int:
        return overlay(self.store, (), self.upper)

    def capture(self, *, live: bool) -> None:
        done = delta.capture(self.store, self.upper, self.seen, contextlib.nullcontext(), set, live=live)
        self.seen = done.seen
        if done.layer is not None:
            self.stack = (Stack(IMAGE) if done.whole else self.stack).push(done.layer)

    def check(self) -> None:
        with open_stack(self.store, self.stack) as recorded, open_stack(self.store, Stack(IMAGE, (self.upper,))) as now:
            assert [change for change in diff(recorded, now)] == []
        mounted = overlay(self.store, self.stack.layers, self.store.create())
        try:
            assert listing(mounted) == listing(self.root)
        finally:
            os.close(mounted)


def overlay(store: LayerStore, layers: tuple[LayerID, ...], upper: LayerID) -> int:
    with contextlib.ExitStack() as opened:
        fds = [store.open_upper(layer) for layer in layers]
        fds.append(store.open_image(IMAGE))
        parent = store.open_layer(upper)
        parts = [os.open(name, os.O_PATH | os.O_DIRECTORY, dir_fd=parent) for name in ("upper", "work")]
        for fd in (*fds, parent, *parts):
            opened.callback(os.close, fd)
        return mounts.overlay(fds, *parts, store.host.layer_naming, user_marks=True)


def listing(root: int) -> list[tuple[object, ...]]:
    """Everything that a program sees, an entry that is listed and cannot be opened included."""
    found: list[tuple[object, ...]] = []
    names_of: dict[tuple[int, int], str] = {}
    for path, names, others, fd in os.fwalk(".", dir_fd=root):
        names.sort()
        for name in sorted((*names, *others)):
            st = os.stat(name, dir_fd=fd, follow_symlinks=False)
            content: object = None
            if stat.S_ISREG(st.st_mode):
                with open(os.open(name, os.O_RDONLY, dir_fd=fd), "rb") as file:
                    content = file.read()
            elif stat.S_ISLNK(st.st_mode):
                content = os.readlink(name, dir_fd=fd)
            first = ""
            if stat.S_ISREG(st.st_mode):  # a link cannot have the mark by which the kernel keeps its inode number
                first = names_of.setdefault((st.st_dev, st.st_ino), f"{path}/{name}")
            found.append((path, name, st.st_mode, first, st.st_mtime_ns, content))
    return found


def some_path(rng: random.Random) -> bytes:
    return b"/".join(rng.choice(NAMES) for _ in range(rng.randint(1, 3)))


def act(rng: random.Random, root: int) -> None:
    """One change, as a program makes it. Most fail on some tree, as programs do."""
    path, other = some_path(rng), some_path(rng)
    choice = rng.randrange(11)
    with contextlib.suppress(FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError):
        try:
            if choice == 0:
                os.mkdir(path, dir_fd=root)
            elif choice in (1, 2):
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644, dir_fd=root)
                os.write(fd, rng.randbytes(rng.randint(0, 20)))
                os.close(fd)
            elif choice in (3, 4, 5):
                os.rename(path, other, src_dir_fd=root, dst_dir_fd=root)
            elif choice == 6:
                os.unlink(path, dir_fd=root)
            elif choice == 7:
                parent, _, name = path.rpartition(b"/")
                fd = files.open_deep(root, parent)
                files.remove_tree(fd, name)
                os.close(fd)
            elif choice == 8:
                os.link(path, other, src_dir_fd=root, dst_dir_fd=root, follow_symlinks=False)
            elif choice == 9:
                os.symlink(b"a", path, dir_fd=root)
            else:
                mounts_exchange(root, path, other)
        except OSError as exc:
            if exc.errno not in (*MOVED, errno.EPERM, errno.ELOOP, errno.EBUSY):
                raise


def mounts_exchange(root: int, path: bytes, other: bytes) -> None:
    files.exchange(root, path, root, other)


@pytest.mark.parametrize("seed", range(long.size(16, 60)))
def test_the_stack_shows_what_the_sandbox_sees(store: LayerStore, seed: int) -> None:
    rng = random.Random(seed)
    live = Live(store, Stack(IMAGE))
    try:
        for _ in range(12):
            for _each in range(rng.choice((0, 1, 3, 8))):
                act(rng, live.root)
            live.capture(live=rng.random() < 0.5)
            live.check()
            if rng.random() < 0.2:  # a fork, a restart or a rewind
                live.close()
                live = Live(store, live.stack)
                assert live.seen is not None
                assert delta.is_unchanged(store, live.upper, live.seen)
                live.check()
            elif rng.random() < 0.1:  # a daemon that takes the sandbox over does not know what was captured
                live.seen = None
            if rng.random() < 0.2 and len(live.stack.layers) > 1:
                live.stack = Stack(IMAGE, (merged(store, live.stack.layers),))
                live.check()
    finally:
        live.close()


def merged(store: LayerStore, layers: tuple[LayerID, ...]) -> LayerID:
    target = store.create()
    fds = [store.read_upper(layer) for layer in (*layers, target)]
    try:
        merge(fds[:-1], fds[-1], store.marks)
    finally:
        for fd in fds:
            os.close(fd)
    return target


def test_nothing_changed_takes_no_layer(store: LayerStore) -> None:
    live = Live(store, Stack(IMAGE))
    os.mkdir("new", dir_fd=live.root)
    live.capture(live=True)
    before = live.stack
    live.capture(live=False)
    live.close()
    assert live.stack == before
    assert before.layers


def test_a_layer_holds_no_more_than_what_changed(store: LayerStore) -> None:
    """Neighbours of a changed file are not copied."""
    live = Live(store, Stack(IMAGE))
    os.mkdir("new", dir_fd=live.root)
    for name in ("one", "two"):
        os.close(os.open(f"new/{name}", os.O_CREAT | os.O_WRONLY, dir_fd=live.root))
    live.capture(live=False)
    os.utime("new/one", dir_fd=live.root)
    os.unlink("new/two", dir_fd=live.root)
    live.capture(live=False)
    live.close()
    layer = store.root / live.stack.layers[0] / "upper"
    found = {path.relative_to(layer).as_posix(): path.lstat().st_mode for path in layer.rglob("*")}
    assert {name: stat.S_IFMT(mode) for name, mode in found.items()} == {
        "new": stat.S_IFDIR,
        "new/one": stat.S_IFREG,
        "new/two": stat.S_IFCHR,
    }


@pytest.mark.parametrize("name", ["new", "a"])
def test_another_directory_in_the_place_of_one(store: LayerStore, name: str) -> None:
    """It hides what the stack has there, of an earlier step or of the image."""
    live = Live(store, Stack(IMAGE))
    os.makedirs(f"/proc/self/fd/{live.root}/{name}/old", exist_ok=True)
    live.capture(live=False)
    if name == "a":
        files.remove_tree(live.root, name)
    else:
        os.rename(name, "aside", src_dir_fd=live.root, dst_dir_fd=live.root)
    os.mkdir(name, dir_fd=live.root)
    live.capture(live=False)
    live.check()
    assert os.listdir(f"/proc/self/fd/{live.root}/{name}") == []
    live.close()
