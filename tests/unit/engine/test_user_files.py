"""A path that a user names is opened with that user's rights, where nothing of the daemon is open, and in bounded time."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.engine.folders import user_files
from snapshotd.engine.folders.user_files import OwnFiles, UserFiles
from snapshotd.kernel.identity import HostUser

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
NOBODY = HostUser(65534, 65534, (12345,))


@pytest.fixture(scope="module")
def all_files() -> Iterator[UserFiles]:
    found = UserFiles()
    yield found
    found.close()
    found.close()


@pytest.fixture
def own(all_files: UserFiles) -> OwnFiles:
    return all_files.of(NOBODY)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory of the user's."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        os.chown(name, NOBODY.uid, NOBODY.gid)
        yield Path(name)


def test_files_are_read_and_made_as_their_user(own: OwnFiles, place: Path) -> None:
    content = os.urandom(3 << 20)
    own.create(str(place / "made"), content)
    st = (place / "made").stat()
    assert (st.st_uid, st.st_gid, st.st_mode & 0o777) == (NOBODY.uid, NOBODY.gid, 0o600)
    assert own.read(str(place / "made"), 0, 4 << 20) == content
    assert own.read(str(place / "made"), 100, 1 << 20) == content[100 : 100 + (1 << 20)]
    assert own.read(str(place / "made"), 4 << 20, 10) == b""
    with pytest.raises(FileExistsError):
        own.create(str(place / "made"), b"")
    odd = str(place / os.fsdecode(b"\xff\n"))
    own.create(odd, b"x")
    assert own.read(odd, 0, 10) == b"x"


def test_what_the_user_may_not_read_is_not_read(own: OwnFiles, place: Path) -> None:
    (place / "secret").write_text("root's")
    (place / "secret").chmod(0o600)
    for path in (place / "secret", "/etc/shadow", "/proc/1/environ", f"/proc/{os.getpid()}/fd/0"):
        with pytest.raises(PermissionError):
            own.read(str(path), 0, 10)
    with pytest.raises(PermissionError):
        own.create("/etc/made-by-a-user", b"")


def test_the_daemons_descriptors_are_not_there(own: OwnFiles, place: Path) -> None:
    closed = place / "closed"
    (closed / "inside").mkdir(parents=True)
    (closed / "inside" / "file").write_text("root's")
    os.chown(closed, 0, 0)
    closed.chmod(0o700)
    fd = os.open(closed / "inside", os.O_RDONLY | os.O_DIRECTORY)
    (place / "link").symlink_to(f"/proc/self/fd/{fd}")
    try:
        for path in (f"/proc/self/fd/{fd}/file", f"/proc/thread-self/fd/{fd}/file", str(place / "link" / "file")):
            with pytest.raises(OSError, match=r"No such file|Not a directory"):
                own.read(path, 0, 10)
    finally:
        os.close(fd)
    status = dict(line.split(":\t", 1) for line in own.read("/proc/self/status", 0, 1 << 16).decode().splitlines())
    assert status["Uid"].split() == status["Gid"].split() == ["65534"] * 4
    assert status["Groups"].split() == ["12345"]
    assert [int(status[name], 16) for name in ("CapPrm", "CapEff", "CapInh", "CapAmb")] == [0] * 4
    with pytest.raises(PermissionError):
        own.read("/proc/self/environ", 0, 10)


def test_what_is_no_file_or_never_answers_holds_nothing(
    own: OwnFiles, all_files: UserFiles, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(place / "fifo", 0o666)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(place / "socket"))
        for path in (str(place / "fifo"), "/dev/zero", str(place), str(place / "socket"), "nul\0", str(place / "none")):
            with pytest.raises(OSError, match=r"."):
                own.read(path, 0, 10)
    with (place / "huge").open("wb") as file:
        file.truncate(1 << 40)
    os.chmod(place / "huge", 0o644)
    assert own.read(str(place / "huge"), 1 << 39, 1 << 20) == bytes(1 << 20)
    monkeypatch.setattr(user_files, "LONGEST_S", 0.2)
    with pytest.raises(
        TimeoutError
    ):  # a child that its user has stopped, for instance: it never gets the whole request
        all_files.ask(NOBODY, {"verb": "create", "path": str(place / "late"), "bytes": 10}, b"short")
    monkeypatch.undo()
    assert own.read("/etc/hostname", 0, 1)


def test_another_process_begins_where_one_was_killed(all_files: UserFiles) -> None:
    own = all_files.of(NOBODY)
    assert own.read("/etc/hostname", 0, 1)
    assert all_files._process is not None
    all_files._process.kill()
    all_files._process.wait()
    assert own.read("/etc/hostname", 0, 1)
