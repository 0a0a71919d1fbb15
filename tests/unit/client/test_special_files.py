"""A path that the user names for output and that is no regular file: written to as it is, or refused, never replaced."""

from __future__ import annotations

import io
import os
import socket
import stat
import subprocess
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from snapshotd.client.client import Snapshotd
from snapshotd.client.local.hook_settings import settings_of
from snapshotd.client.local.part_file import part_file
from snapshotd.client.local.tree import TarUnpacker, pack
from snapshotd.errors import NotPermitted, UsageError
from snapshotd.kernel import syscalls
from tests.capabilities import require

Write = Callable[[Path, bytes], object]


def tar_of(name: str, data: bytes, kind: bytes = tarfile.REGTYPE, target: str = "") -> bytes:
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w") as tar:
        item = tarfile.TarInfo(name)
        item.type, item.size, item.linkname = kind, len(data), target
        tar.addfile(item, io.BytesIO(data))
    return found.getvalue()


def export(to: Path, data: bytes) -> None:
    with part_file(to) as write:
        write(data)


def copy_out(to: Path, data: bytes) -> None:
    TarUnpacker(to).unpack(iter([tar_of("file", data)]))


@pytest.fixture(params=[export, copy_out], ids=["export -o", "cp"])
def write(request: pytest.FixtureRequest) -> Write:
    made: Write = request.param
    return made


def test_a_device_is_written_to(write: Write, tmp_path: Path) -> None:
    require("root")
    null = tmp_path / "null"
    os.mknod(null, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    write(null, b"data")
    assert stat.S_ISCHR(null.lstat().st_mode)
    assert null.lstat().st_mode & 0o777 == 0o644
    assert os.listdir(tmp_path) == ["null"]


def test_a_fifo_is_written_to(write: Write, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "fifo").read_bytes()), daemon=True)
    reader.start()
    try:
        write(tmp_path / "fifo", b"x" * 100_000)
    finally:
        if reader.is_alive() and not stat.S_ISFIFO((tmp_path / "fifo").lstat().st_mode):
            pytest.fail("the fifo was replaced")
        reader.join()
    assert got == [b"x" * 100_000]


def test_a_socket_is_refused(write: Write, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        with pytest.raises(UsageError, match=r"is a socket; name"):
            write(tmp_path / "socket", b"data")
        assert stat.S_ISSOCK((tmp_path / "socket").lstat().st_mode)


@pytest.mark.parametrize("target", ["there", "missing", "/dev/null"])
def test_a_link_is_refused(write: Write, tmp_path: Path, target: str) -> None:
    (tmp_path / "there").write_bytes(b"old")
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(UsageError, match="is a symbolic link; name the file"):
        write(tmp_path / "link", b"data")
    assert os.readlink(tmp_path / "link") == target
    assert (tmp_path / "there").read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["link", "there"]


OWN_DEV = "mount -t tmpfs none /dev && ln -s /proc/self/fd /dev/fd && ln -s /proc/self/fd/1 /dev/stdout"
"""A /dev of its own, in a mount namespace of its own: a mistake must not replace the machine's."""


def write_there(write: Write, path: str, stdout: int) -> None:
    """In a process with this standard output, and with `OWN_DEV`."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.dup2(stdout, 1)
            syscalls.call("unshare", syscalls.CLONE_NEWNS)
            syscalls.call("mount", "none", "/", None, syscalls.MS_REC | syscalls.MS_SLAVE, None)
            subprocess.run(["sh", "-c", OWN_DEV], check=True)
            write(Path(path), b"data")
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("path", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_standard_output_has_a_name(write: Write, tmp_path: Path, path: str) -> None:
    """Whatever it is: a file that is being appended to is not replaced, and not written from its beginning."""
    require("root")
    out = tmp_path / "out"
    out.write_bytes(b"before ")
    with out.open("ab") as file:
        write_there(write, path, file.fileno())
    assert out.read_bytes() == b"before data"
    reads, writes = os.pipe()
    write_there(write, path, writes)
    os.close(writes)
    with open(reads, "rb") as pipe:
        assert pipe.read() == b"data"


def test_a_descriptor_that_is_not_open_is_refused(write: Write) -> None:
    with pytest.raises(UsageError, match="/dev/fd/999"):
        write(Path("/dev/fd/999"), b"data")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("there")], ids=["fifo", "link"])
def test_a_folder_that_is_copied_over_another_replaces_files_only(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    make(tmp_path / "odd")
    (tmp_path / "there").write_bytes(b"old")
    before = (tmp_path / "odd").lstat()
    data = tar_of("top", b"", tarfile.DIRTYPE)[:512] + tar_of("top/odd", b"new")
    with pytest.raises(UsageError, match=r"odd.* is no regular file there"):
        TarUnpacker(tmp_path).unpack(iter([data]))
    assert (tmp_path / "odd").lstat() == before
    assert (tmp_path / "there").read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["odd", "there"]


def test_a_link_that_is_copied_over_a_link_replaces_it(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("old")
    data = tar_of("top", b"", tarfile.DIRTYPE)[:512] + tar_of("top/link", b"", tarfile.SYMTYPE, "new")
    TarUnpacker(tmp_path).unpack(iter([data]))
    assert os.readlink(tmp_path / "link") == "new"


def test_a_fifo_is_not_read(tmp_path: Path) -> None:
    """It would wait for a writer for ever."""
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UsageError, match=r"fifo is a fifo; .*/dev/stdin"):
        Snapshotd(socket=tmp_path / "no daemon", autostart=False).upload("box", tmp_path / "fifo", "there")
    with pytest.raises(UsageError, match="fifo is a fifo"):
        list(pack(tmp_path / "fifo", []))


def test_settings_that_are_a_device_stay_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those have them who want none."""
    require("root")
    monkeypatch.setenv("CLAUDE_CONFIG_DIR", str(tmp_path))
    os.mknod(tmp_path / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    (tmp_path / "settings.json").symlink_to("null")
    with pytest.raises(NotPermitted, match="null cannot be written: it is no regular file"):
        settings_of("claude", tmp_path / "socket", None).install()
    assert stat.S_ISCHR((tmp_path / "null").lstat().st_mode)
