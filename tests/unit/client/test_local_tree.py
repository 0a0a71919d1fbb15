"""Folders of this machine to and from a tar; one that comes out of a sandbox is hostile."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
from pathlib import Path

import pytest

from snapshotd.client.local.tree import TarUnpacker, pack, pack_bytes
from snapshotd.client.results import RestoreInfo
from snapshotd.errors import SnapshotdError, UsageError

ODD = "new\nline\udcff"


def tar_of(*items: tuple[str, bytes, bytes, str]) -> bytes:
    """Name, type, content, target."""
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w") as tar:
        for name, kind, data, target in items:
            item = tarfile.TarInfo(name)
            item.type, item.size, item.linkname, item.mode = kind, len(data), target, 0o6777
            tar.addfile(item, io.BytesIO(data))
    return found.getvalue()


def unpack(data: bytes, to: Path) -> RestoreInfo:
    return TarUnpacker(to).unpack(iter([data]))


def test_a_folder_there_and_back(tmp_path: Path) -> None:
    here, warnings = tmp_path / "here", list[str]()
    (here / "sub/empty").mkdir(parents=True)
    (here / "sub" / ODD).write_bytes(b"odd")
    (here / "run").write_bytes(b"x" * 3_000_000)
    (here / "run").chmod(0o751)
    (here / "link").symlink_to("nowhere/" + "n" * 200)
    os.mkfifo(here / "fifo")
    pieces = b"".join(pack(here, warnings))
    assert [warning.split()[0] for warning in warnings] == [str(here / "fifo")]
    done = unpack(tar_of(("top", tarfile.DIRTYPE, b"", ""))[:512] + prefixed(pieces), tmp_path / "there")
    assert (done.file_count, done.directories, done.bytes, done.warnings) == (3, 2, 3_000_003, ())
    there = tmp_path / "there"
    assert {path.relative_to(there) for path in there.rglob("*")} == {
        path.relative_to(here) for path in here.rglob("*") if path.name != "fifo"
    }
    assert (there / "sub" / ODD).read_bytes() == b"odd"
    assert (there / "run").stat().st_mode & 0o7777 == 0o751
    assert os.readlink(there / "link") == os.readlink(here / "link")


def prefixed(data: bytes) -> bytes:
    """The same members below `top`."""
    found = io.BytesIO()
    encoding = {"encoding": "utf-8", "errors": "surrogateescape"}
    with (
        tarfile.open(fileobj=io.BytesIO(data), **encoding) as old,
        tarfile.open(  # type: ignore[call-overload]
            fileobj=found, mode="w", **encoding
        ) as new,
    ):
        for item in old:
            item.name, item.pax_headers = f"top/{item.name}", {}
            new.addfile(item, old.extractfile(item) if item.isreg() else None)
    return found.getvalue()


def test_contents_by_path() -> None:
    data = b"".join(pack_bytes(iter([(b"a/\xff", b"1"), (b"b", b"")])))
    with tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8", errors="surrogateescape") as tar:
        assert [(item.name, item.size) for item in tar] == [("a/\udcff", 1), ("b", 0)]


FILE, LINK, HARD, DEVICE = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE
TOP = ("top", tarfile.DIRTYPE, b"", "")


@pytest.mark.parametrize(
    "items",
    [
        [TOP, ("top/../../outside/f", FILE, b"x", "")],
        [TOP, ("/etc/../outside/f", FILE, b"x", "")],
        [TOP, ("top/l", LINK, b"", "{out}"), ("top/l/f", FILE, b"x", "")],
        [TOP, ("top/l", LINK, b"", "{out}/secret"), ("top/l", FILE, b"x", "")],
        [TOP, ("top/l", LINK, b"", "{out}"), ("top/l", tarfile.DIRTYPE, b"", ""), ("top/l/f", FILE, b"x", "")],
        [TOP, ("top/l", LINK, b"", "{out}"), ("top/h", HARD, b"", "top/l/secret")],
        [TOP, ("top/h", HARD, b"", "top/../../outside/secret")],
        [TOP, ("top/there", FILE, b"x", "")],
        [TOP, ("top/folder/f", FILE, b"x", "")],
        [("f", FILE, b"x", ""), ("f/../../outside/f", FILE, b"x", "")],
    ],
)
def test_nothing_is_written_elsewhere(tmp_path: Path, items: list[tuple[str, bytes, bytes, str]]) -> None:
    """Neither by the tar's links nor by those that the folder had."""
    out, to = tmp_path / "outside", tmp_path / "to"
    out.mkdir()
    (out / "secret").write_text("secret")
    to.mkdir()
    (to / "there").symlink_to(out / "secret")
    (to / "folder").symlink_to(out)
    data = tar_of(*((name, kind, content, target.format(out=out)) for name, kind, content, target in items))
    with contextlib.suppress(SnapshotdError):
        unpack(data, to)
    assert os.listdir(out) == ["secret"]
    assert (out / "secret").read_text() == "secret"
    assert (out / "secret").stat().st_nlink == 1


def test_rights_and_devices_stay_behind(tmp_path: Path) -> None:
    done = unpack(tar_of(TOP, ("top/f", FILE, b"x", ""), ("top/null", DEVICE, b"", "")), tmp_path / "to")
    assert (tmp_path / "to/f").stat().st_mode & 0o7777 == 0o777
    assert "null" in done.warnings[0]
    assert os.listdir(tmp_path / "to") == ["f"]


def test_one_file_replaces_another_whole(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("old")
    with (tmp_path / "f").open() as old:
        unpack(tar_of(("name", FILE, b"new", "")), tmp_path / "f")
        assert old.read() == "old"
    assert (tmp_path / "f").read_text() == "new"
    with pytest.raises(UsageError, match=r"missing"):
        unpack(tar_of(("name", FILE, b"new", "")), tmp_path / "missing/f")
    assert os.listdir(tmp_path) == ["f"]
