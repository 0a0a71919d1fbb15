"""Tars from outside, into a root that must stay what it is where the tar has no business."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshotd.engine.sandbox.placing import Owner
from snapshotd.engine.sandbox.unpacking import Unpacked, Unpacker
from snapshotd.errors import OutOfSpace, SnapshotdError, UsageError

Take = Callable[[int, int], None]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root/old").mkdir(parents=True)
    (tmp_path / "root/old").chmod(0o700)
    (tmp_path / "root/old/f").write_text("old")
    (tmp_path / "outside").mkdir()
    return tmp_path / "root"


def item(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, **more: object) -> tuple[tarfile.TarInfo, bytes]:
    made = tarfile.TarInfo(name)
    made.size, made.type, made.mode, made.mtime = len(data), kind, 0o755, 1_000_000_000
    for key, value in more.items():
        setattr(made, key, value)
    return made, data


def tar_of(*items: tuple[tarfile.TarInfo, bytes]) -> bytes:
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w", encoding="utf-8", errors="surrogateescape") as tar:
        for made, data in items:
            tar.addfile(made, io.BytesIO(data))
    return found.getvalue()


def unpack(
    root: Path, data: bytes, *, top: bytes = b"", attributes: bool = True, take: Take = lambda *_: None
) -> Unpacked:
    @contextlib.contextmanager
    def opened() -> Iterator[int]:
        fd = os.open(root, os.O_PATH)
        try:
            yield fd
        finally:
            os.close(fd)

    done = Unpacked()
    Unpacker(opened, Owner(os.getuid(), os.getgid()), attributes, 2, take, done).unpack(top, io.BytesIO(data).read)
    return done


def test_everything_that_a_folder_holds(root: Path) -> None:
    name = "odd\n\udcff"
    done = unpack(
        root,
        tar_of(
            item("./", kind=tarfile.DIRTYPE),
            item("old/", kind=tarfile.DIRTYPE),
            item("old/f", b"new"),
            item("made/deep/" + name, b"x"),
            item("link", kind=tarfile.SYMTYPE, linkname="/old/f"),
            item("same", kind=tarfile.LNKTYPE, linkname="old/f"),
            item("null", kind=tarfile.CHRTYPE, devmajor=1, devminor=3),
        ),
        top=b"top",
    )
    top = root / "top"
    assert (done.files, done.directories, done.bytes) == (4, 2, 4)
    assert done.paths == [b"top/old/f", b"top/made/deep/odd\n\xff"], "as many as were asked for"
    assert "character device" in done.warnings[0]
    assert (top / "old/f").stat().st_ino == (top / "same").stat().st_ino
    assert (stat.S_IMODE((top / "old/f").stat().st_mode), (top / "old/f").stat().st_mtime) == (0o755, 1_000_000_000)
    assert (top / "made/deep" / name).read_text() == "x"
    assert os.readlink(top / "link") == "/old/f"
    assert not os.path.lexists(top / "null")


def test_what_is_there_keeps_its_own(root: Path) -> None:
    unpack(root, tar_of(item("old/", kind=tarfile.DIRTYPE), item("old/f", b"new"), item("old/g")), attributes=False)
    assert stat.S_IMODE((root / "old").stat().st_mode) == 0o700
    assert stat.S_IMODE((root / "old/g").stat().st_mode) == 0o644
    assert (root / "old/g").stat().st_mtime > 1_000_000_000
    unpack(root, tar_of(item("old/f", b"newer")))
    assert ((root / "old/f").read_text(), stat.S_IMODE((root / "old").stat().st_mode)) == ("newer", 0o700)


def test_a_sparse_file(root: Path, tmp_path: Path) -> None:
    with (tmp_path / "holes").open("wb") as file:
        file.truncate(1 << 33)
        file.seek(1 << 32)
        file.write(b"middle")
    words = ["tar", "-C", str(tmp_path), "--format=pax", "--sparse", "-cf", "-", "holes"]
    data = subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout
    taken: list[int] = []
    unpack(root, data, take=lambda size, _: taken.append(size))
    assert (root / "holes").stat().st_size == 1 << 33
    assert (root / "holes").stat().st_blocks < 1000
    assert sum(taken) < 1 << 20, "holes take nothing"
    with (root / "holes").open("rb") as file:
        file.seek(1 << 32)
        assert file.read(6) == b"middle"


@pytest.mark.parametrize(
    "items",
    [
        [item("../outside/f", b"x")],
        [item("a/../../outside/f", b"x")],
        [item("l", kind=tarfile.SYMTYPE, linkname="../outside"), item("l/f", b"x")],
        [item("l", kind=tarfile.SYMTYPE, linkname="../outside/f"), item("l", b"x")],
        [item("h", kind=tarfile.LNKTYPE, linkname="../outside/f")],
        [item("old", b"a file where a directory is")],
        [item("old/f/x", b"a directory where a file is")],
    ],
)
def test_nothing_leads_out(root: Path, items: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    with contextlib.suppress(SnapshotdError):
        unpack(root, tar_of(*items))
    assert os.listdir(root.parent / "outside") == []
    assert (root / "old/f").read_text() == "old"


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([item("l", kind=tarfile.SYMTYPE, linkname="/old"), item("l/f", b"x")], "behind a symbolic link"),
        ([item("l", kind=tarfile.SYMTYPE, linkname="../old"), item("l/d/g", b"x")], "behind a symbolic link"),
        ([item("there/d", kind=tarfile.DIRTYPE)], "behind a symbolic link"),
        ([item("there/l", kind=tarfile.SYMTYPE, linkname="x")], "behind a symbolic link"),
        ([item("h", kind=tarfile.LNKTYPE, linkname="there/f")], "behind a symbolic link"),
        ([item("h", kind=tarfile.LNKTYPE, linkname="/old/f")], r"hard link to '/top/old/f', and there is no such file"),
    ],
)
def test_members_stay_below_the_target(root: Path, items: list[tuple[tarfile.TarInfo, bytes]], said: str) -> None:
    (root / "top").mkdir()
    (root / "top/there").symlink_to("/old")
    with pytest.raises(UsageError, match=said):
        unpack(root, tar_of(*items), top=b"top")
    assert os.listdir(root / "old") == ["f"]
    assert (root / "old/f").read_text() == "old"


def test_a_member_takes_the_place_of_a_link(root: Path) -> None:
    items = [item("l", kind=tarfile.SYMTYPE, linkname="/old/f"), item("l", b"x")]
    unpack(root, tar_of(*items), top=b"top")
    assert ((root / "old/f").read_text(), (root / "top/l").read_text()) == ("old", "x")
    assert not (root / "top/l").is_symlink()


@pytest.mark.parametrize("length", [0, 100, 512, 600, 1024, 1536])
def test_what_is_cut_off_leaves_the_old_file(root: Path, length: int) -> None:
    data = tar_of(item("old/f", b"n" * 1000))[:length]
    with pytest.raises(UsageError, match="cut off"):
        unpack(root, data)
    assert (root / "old/f").read_text() == ("old" if length < 1536 else "n" * 1000)
    assert os.listdir(root / "old") == ["f"]


def test_whoever_counts_can_end_it(root: Path) -> None:
    def take(size: int, _: int) -> None:
        if size:
            raise OutOfSpace("no more")

    with pytest.raises(OutOfSpace):
        unpack(root, tar_of(item("old/f", b"new")), take=take)
    assert (root / "old/f").read_text() == "old"
