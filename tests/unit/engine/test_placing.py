"""Changing files below a root whose owner is hostile: nothing outside is read or written, and nothing blocks."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshotd.engine.sandbox import placing
from snapshotd.engine.sandbox.placing import Owner
from snapshotd.errors import Conflict, NotFound, SnapshotdError, UsageError
from snapshotd.kernel import files
from snapshotd.trees.live_view import LiveView
from tests import root_tree

ODD = b"new\nline\xff \\ *"
OWN = Owner(os.getuid(), os.getgid())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """With a folder beside it that must stay as it is."""
    (tmp_path / "root/dir").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_text("secret")
    return tmp_path / "root"


@pytest.fixture
def root_fd(root: Path) -> Iterator[int]:
    fd = os.open(root, os.O_PATH)
    yield fd
    os.close(fd)
    assert (root.parent / "outside/secret").read_text() == "secret"
    assert os.listdir(root.parent / "outside") == ["secret"]


def put(root_fd: int, path: bytes, data: bytes, mode: int | None = None) -> None:
    fd = placing.open_unnamed(root_fd)
    try:
        files.write_all(fd, data)
        placing.put(root_fd, path, fd, OWN, mode)
    finally:
        os.close(fd)


def test_a_file_is_put_in_place_with_what_it_had(root: Path, root_fd: int) -> None:
    put(root_fd, b"dir/deep/er/" + ODD, b"one")
    there = Path(os.fsdecode(os.path.join(os.fsencode(root), b"dir/deep/er", ODD)))
    assert (there.read_bytes(), stat.S_IMODE(there.stat().st_mode)) == (b"one", 0o644)
    assert stat.S_IMODE((root / "dir/deep").stat().st_mode) == 0o755
    there.chmod(0o750)
    if os.getuid() == 0:
        os.chown(there, 12, 34)
    with there.open("rb") as old:
        put(root_fd, b"dir/deep/er/" + ODD, b"two")
        assert old.read() == b"one", "whoever has the old one open keeps it"
    assert (there.read_bytes(), stat.S_IMODE(there.stat().st_mode)) == (b"two", 0o750)
    if os.getuid() == 0:
        assert (there.stat().st_uid, there.stat().st_gid) == (12, 34)
    put(root_fd, b"dir/deep/er/" + ODD, b"", 0o600)
    assert stat.S_IMODE(there.stat().st_mode) == 0o600
    assert os.listdir(there.parent) == [there.name], "nothing else is left"


def test_what_is_given_up_leaves_the_old_file(root: Path, root_fd: int) -> None:
    (root / "dir/f").write_text("old")
    fd = placing.open_unnamed(root_fd)
    files.write_all(fd, b"half of the new")
    assert os.listdir(root) == ["dir"], "it has no name yet"
    os.close(fd)
    assert (root / "dir/f").read_text() == "old"


@pytest.mark.parametrize("target", ["{out}/secret", "../../outside/secret", "/../../outside/secret", "loop"])
def test_links_lead_nowhere_outside(root: Path, root_fd: int, target: str) -> None:
    (root / "loop").symlink_to("loop")
    (root / "dir/link").symlink_to(target.format(out=root.parent / "outside"))
    (root / "above").symlink_to(target.format(out=root.parent / "outside").removesuffix("/secret"))
    for path in (b"dir/link", b"above/secret"):
        with contextlib.suppress(SnapshotdError), placing.explain_errors("write", path):
            put(root_fd, path, b"mine")


def test_a_link_inside_is_followed_as_in_the_sandbox(root: Path, root_fd: int) -> None:
    (root / "dir/link").symlink_to("/dir/../new")
    put(root_fd, b"dir/link", b"x")
    assert (root / "new").read_bytes() == b"x"
    assert (root / "dir/link").is_symlink()


def test_only_regular_files_are_written(root: Path, root_fd: int) -> None:
    os.mkfifo(root / "fifo")
    for path in (b"fifo", b"dir", b"", b"dir/..", b"fifo/x", b"n" * 300):
        with pytest.raises(UsageError), placing.explain_errors("write", path):
            put(root_fd, path, b"x")
    assert stat.S_ISFIFO((root / "fifo").stat().st_mode)
    assert sorted(os.listdir(root)) == ["dir", "fifo"]


def test_nothing_is_reached_through_a_mount() -> None:
    """The machine's own root, in which /proc is mounted: as hostile as a root can be."""
    root_fd = os.open("/", os.O_PATH)
    try:
        for work in (
            lambda: placing.remove(root_fd, b"proc"),
            lambda: placing.make_dir(root_fd, b"proc/x", OWN),
            lambda: placing.rename(root_fd, b"proc", b"elsewhere"),
            lambda: placing.put_symlink(root_fd, b"proc/self/link", b"x", OWN),
        ):
            with pytest.raises((UsageError, Conflict)), placing.explain_errors("change", b"proc"):
                work()
    finally:
        os.close(root_fd)


def swapped(root: Path, work: Callable[[], object]) -> int:
    """Do it again and again while a directory of the root becomes a link to the outside and a directory again. Returns
    how often it went well."""
    went_well = 0
    with root_tree.swapped(root):
        for _ in range(2000):
            try:
                work()
                went_well += 1
            except OSError:
                continue
    return went_well


def test_a_swapped_directory_leads_nowhere(root: Path, root_fd: int) -> None:
    """The other side of the race is where it leads: below the root there is no such place, so nothing is made there."""

    def work() -> None:
        put(root_fd, b"dir/secret", b"mine")
        placing.rename(root_fd, b"dir/secret", b"dir/other")
        placing.put_symlink(root_fd, b"dir/secret", b"x", OWN)
        placing.remove(root_fd, b"dir/secret")
        placing.remove(root_fd, b"dir/other")

    assert swapped(root, work) > 0


def test_directories(root: Path, root_fd: int) -> None:
    assert placing.make_dir(root_fd, b"a/b/" + ODD, OWN)
    assert not placing.make_dir(root_fd, b"a/b", OWN)
    (root / "dangling").symlink_to("nowhere")
    (root / "file").touch()
    for path in (b"dangling", b"dangling/x", b"file", b"file/x"):
        with pytest.raises(SnapshotdError), placing.explain_errors("make", path):
            placing.make_dir(root_fd, path, OWN)
    assert not (root / "nowhere").exists()


def test_removing_and_renaming(root: Path, root_fd: int) -> None:
    (root / "tree/x").mkdir(parents=True)
    (root / "tree/out").symlink_to(root.parent / "outside")
    (root / "full/x").mkdir(parents=True)
    with pytest.raises(Conflict), placing.explain_errors("rename", b"tree"):
        placing.rename(root_fd, b"tree", b"full")
    with pytest.raises(UsageError), placing.explain_errors("rename", b"tree"):
        placing.rename(root_fd, b"tree", b"tree/x/y")
    placing.rename(root_fd, b"tree", b"dir/" + ODD)
    assert os.listdir(root / "dir") == [os.fsdecode(ODD)]
    placing.remove(root_fd, b"dir/" + ODD)
    assert os.listdir(root / "dir") == []
    for work in (placing.remove, lambda fd, path: placing.rename(fd, path, b"y")):
        with pytest.raises(NotFound), placing.explain_errors("change", b"nothing"):
            work(root_fd, b"nothing")
    with pytest.raises(UsageError), placing.explain_errors("remove", b""):
        placing.remove(root_fd, b"")


def test_hard_links(root: Path, root_fd: int) -> None:
    put(root_fd, b"dir/one", b"x")
    placing.put_link(root_fd, b"dir/two", b"dir/one", OWN)
    placing.put_link(root_fd, b"dir/two", b"dir/one", OWN)
    assert (root / "dir/one").stat().st_nlink == 2
    assert sorted(os.listdir(root / "dir")) == ["one", "two"]


def test_a_lease_keeps_nobody_waiting(root: Path) -> None:
    """Who holds one makes others wait for up to 45 s in open(2)."""
    (root / "dir/f").write_text("x")
    fd, root_fd = os.open(root / "dir/f", os.O_RDWR), os.open(root, os.O_PATH)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # how the kernel asks for the lease
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        with (
            LiveView(root_fd) as view,
            pytest.raises(Conflict, match="lease"),
            placing.explain_errors("read", b"dir/f"),
        ):
            view.open(b"dir/f")
    finally:
        signal.signal(signal.SIGIO, before)
        os.close(fd)
        os.close(root_fd)
