"""Reading a tree that its owner changes meanwhile, and who may want more than it."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshotd.formats.tar_writer import write_tree
from snapshotd.trees.base import Child
from snapshotd.trees.live_view import LiveView
from snapshotd.trees.view import View, follow
from snapshotd.types import IdMap, Kind
from tests import root_tree

ODD = b"new\nline\xff"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root/dir/sub").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/f").write_text("secret")
    (tmp_path / "root/dir/f").write_text("mine")
    return tmp_path / "root"


@pytest.fixture
def view(root: Path) -> Iterator[LiveView]:
    with live(root) as view:
        yield view


def live(root: Path, kind: type[LiveView] = LiveView, id_map: IdMap | None = None) -> LiveView:
    fd = os.open(root, os.O_PATH)
    try:
        return kind(fd, id_map)
    finally:
        os.close(fd)


def read(view: View, path: bytes) -> bytes:
    with os.fdopen(view.open(follow(view, path)[0]), "rb") as file:
        return file.read()


@pytest.mark.parametrize(
    ("target", "leads_to"),
    [
        ("dir/f", b"dir/f"),
        ("/dir/f", b"dir/f"),
        ("../../../dir/./sub/../f", b"dir/f"),
        ("dir/sub", b"dir/sub"),
        ("second", b"dir/f"),
        ("/", b""),
        ("../outside/f", errno.ENOENT),
        ("dir/f/x", errno.ENOTDIR),
        ("link", errno.ELOOP),
        ("/".join([*("dir/.." for _ in range(500)), "dir/f"]), b"dir/f"),
    ],
)
def test_links_are_followed_as_inside(root: Path, view: LiveView, target: str, leads_to: bytes | int) -> None:
    (root / "second").symlink_to("dir/f")
    (root / "link").symlink_to(target)
    if isinstance(leads_to, bytes):
        assert follow(view, b"link")[0] == leads_to
    else:
        with pytest.raises(OSError, match=os.strerror(leads_to)) as caught:
            follow(view, b"link")
        assert caught.value.errno == leads_to


def test_many_links_are_too_many(root: Path, view: LiveView) -> None:
    for number in range(60):
        (root / f"l{number}").symlink_to(f"l{number + 1}")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        follow(view, b"l0")


def test_only_regular_files_are_opened(root: Path, view: LiveView) -> None:
    os.mkfifo(root / "fifo")
    (root / "link").symlink_to("dir/f")
    for name in (b"fifo", b"link", b"dir"):
        with pytest.raises(OSError, match="not a regular file"):
            view.open(name)


def test_mounts_are_not_entered() -> None:
    with live(Path("/")) as view:
        assert view.list(b"proc") == []
        for path in (b"proc/self/environ", b"proc/1/root/etc"):
            with pytest.raises(OSError, match="mounted"):
                view.lstat(path)


def test_ids_are_those_of_the_container(root: Path) -> None:
    own = os.getuid()
    with live(root, id_map=IdMap(own, 1000)) as view:
        assert view.lstat(b"dir/f").uid == 0
    with live(root, id_map=IdMap(own + 1, 1000)) as view:
        assert view.lstat(b"dir").uid == 65534, "one that has no number there"


def test_a_swapped_directory_shows_nothing_of_the_outside(root: Path) -> None:
    found = set[bytes]()
    with root_tree.swapped(root):
        for _ in range(1500):
            with live(root) as view, contextlib.suppress(OSError):
                found.add(read(view, b"dir/f"))
    assert found == {b"mine"}


class Churning(LiveView):
    """Something happens to a file just before it is opened: `happens`, by name."""

    happens: dict[bytes, Callable[[], object]]

    def open_child(self, child: Child) -> int:
        self.happens.get(child.name, lambda: None)()
        return super().open_child(child)


def test_a_tar_of_what_changes_is_whole(root: Path) -> None:
    (root / os.fsdecode(ODD)).write_bytes(b"odd")
    for name in ("grows", "shrinks", "goes"):
        (root / "dir" / name).write_bytes(b"x" * 5000)
    os.link(root / "dir/goes", root / "dir/same")
    with (root / "dir/holes").open("wb") as file:
        file.truncate(1 << 30)
        file.seek(1 << 20)
        file.write(b"data")
    os.mkfifo(root / "dir/fifo")
    data = io.BytesIO()
    with live(root, Churning) as view:
        assert isinstance(view, Churning)
        view.happens = {
            b"grows": lambda: (root / "dir/grows").write_bytes(b"y" * 9000),
            b"shrinks": lambda: os.truncate(root / "dir/shrinks", 10),
            b"goes": (root / "dir/goes").unlink,
        }
        write_tree(view, data.write)
    data.seek(0)
    with tarfile.open(fileobj=data, encoding="utf-8", errors="surrogateescape") as tar:
        names = {item.name for item in tar}
        sizes = {item.name.rpartition("/")[2]: item.size for item in tar if item.isreg()}
    assert os.fsdecode(ODD) in {name.removeprefix("./") for name in names}
    assert {name: sizes[name] for name in ("grows", "shrinks", "same", "holes")} == {
        "grows": 9000,
        "shrinks": 10,
        "same": 5000,
        "holes": 1 << 30,
    }
    assert "goes" not in sizes


@pytest.mark.parametrize(("top", "names"), [(b"dir", ["dir", "dir/f", "dir/sub"]), (b"dir/f", ["f"])])
def test_a_tar_of_a_part(view: LiveView, top: bytes, names: list[str]) -> None:
    data = io.BytesIO()
    write_tree(view, data.write, top=top)
    data.seek(0)
    with tarfile.open(fileobj=data) as tar:
        assert tar.getnames() == names
    assert view.lstat(b"dir").kind is Kind.DIRECTORY
