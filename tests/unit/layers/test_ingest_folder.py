"""Copying a host folder: exact for what is claimed, a warning for what is left out, a sentence for what fails, and
never a step outside."""

from __future__ import annotations

import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from snapshotd.errors import NotFound, NotPermitted, UsageError
from snapshotd.formats import ingest_folder as module
from snapshotd.formats.ingest import IngestReport, ingest_folder
from snapshotd.kernel import files
from snapshotd.kernel import syscalls as sc

RENAME_EXCHANGE = 2


def copy(source: Path, target: Path) -> IngestReport:
    target.mkdir(exist_ok=True)
    fd = os.open(target, os.O_PATH | os.O_DIRECTORY)
    before = len(os.listdir("/proc/self/fd"))
    try:
        return ingest_folder(source, fd)
    finally:
        assert len(os.listdir("/proc/self/fd")) <= before, "a descriptor leaked"
        os.close(fd)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


def test_everything_a_workspace_has(source: Path, tmp_path: Path) -> None:
    (source / "d/e").mkdir(parents=True)
    (source / "d/e/f").write_bytes(b"content")
    (source / "d/e/f").chmod(0o4750)
    os.link(source / "d/e/f", source / "same")
    (source / "dangling").symlink_to("/nowhere")
    (source / "loop").symlink_to(".")
    os.mkfifo(source / "pipe", 0o640)
    os.setxattr(source / "d/e/f", "user.note", b"\0\xff")
    os.setxattr(source / "d", "user.note", b"1")
    os.mkdir(os.fsencode(source) + b"/caf\xe9\n\x1b[31m")
    for path in ("d/e/f", "d/e", "d", "pipe", "."):
        os.utime(source / path, ns=(1_500_000_000_123_456_789, 1_500_000_000_123_456_789))
    os.utime(source / "dangling", ns=(5, 5), follow_symlinks=False)
    source.chmod(0o711)
    report = copy(source, tmp_path / "t")
    target = tmp_path / "t"
    assert (report.files, report.directories, report.bytes, report.warnings) == (5, 3, 7, ())
    for path in ("d/e/f", "d/e", "d", "pipe", "dangling", "."):
        ours, theirs = (target / path).lstat(), (source / path).lstat()
        assert (ours.st_mode, ours.st_uid, ours.st_gid, ours.st_mtime_ns) == (
            theirs.st_mode,
            theirs.st_uid,
            theirs.st_gid,
            theirs.st_mtime_ns,
        ), path
    assert (target / "same").stat().st_ino == (target / "d/e/f").stat().st_ino
    assert (target / "same").read_bytes() == b"content"
    assert (os.readlink(target / "dangling"), os.readlink(target / "loop")) == ("/nowhere", ".")
    assert os.getxattr(target / "d/e/f", "user.note") == b"\0\xff"
    assert os.getxattr(target / "d", "user.note") == b"1"
    assert b"caf\xe9\n\x1b[31m" in os.listdir(os.fsencode(target))


def test_sockets_are_left_out_by_name(source: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(source / "s"))
        report = copy(source, tmp_path / "t")
    assert os.listdir(tmp_path / "t") == []
    assert report.warnings == ("s is a socket and was left out: it means nothing in a sandbox",)


@pytest.mark.skipif(os.geteuid() != 0, reason="makes device nodes and forged marks")
def test_devices_and_overlay_marks_are_left_out(source: Path, tmp_path: Path) -> None:
    os.mknod(source / "whiteout", stat.S_IFCHR, 0)
    os.mknod(source / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    (source / "d").mkdir()
    os.setxattr(source / "d", "trusted.overlay.opaque", b"y")
    os.setxattr(source / "d", "trusted.overlay.redirect", b"/etc")
    os.setxattr(source / "d", "user.overlay.opaque", b"y")
    report = copy(source, tmp_path / "t")
    assert os.listdir(tmp_path / "t") == ["d"]
    assert os.listxattr(tmp_path / "t/d") == []
    assert len(report.warnings) == 5


def test_a_sparse_file_stays_sparse(source: Path, tmp_path: Path) -> None:
    with open(source / "big", "wb") as f:
        f.truncate(1 << 40)
        f.seek(1 << 39)
        f.write(b"x")
    copy(source, tmp_path / "t")
    st = (tmp_path / "t/big").stat()
    assert st.st_size == 1 << 40
    assert st.st_blocks * 512 < 1 << 20


def test_a_tree_deeper_than_any_path(source: Path, tmp_path: Path) -> None:
    fd = os.open(source, files.DIR_FLAGS)
    for _ in range(3000):
        os.mkdir(b"d", dir_fd=fd)
        deeper = files.open_dir(fd, b"d")
        os.close(fd)
        fd = deeper
    os.close(os.open(b"bottom", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    os.link(b"bottom", b"also", src_dir_fd=fd, dst_dir_fd=fd)
    os.close(fd)
    report = copy(source, tmp_path / "t")
    assert (report.files, report.directories) == (2, 3000)
    root = os.open(tmp_path / "t", files.DIR_FLAGS)
    bottom = files.open_deep(root, b"/".join([b"d"] * 3000))
    assert sorted(os.listdir(bottom)) == ["also", "bottom"]
    os.close(bottom)
    os.close(root)
    parent = os.open(tmp_path, files.DIR_FLAGS)
    files.remove_tree(parent, b"source")  # pytest's own removal recurses
    files.remove_tree(parent, b"t")
    os.close(parent)


def test_a_link_to_the_folder_is_followed(source: Path, tmp_path: Path) -> None:
    (source / "f").write_text("1")
    (tmp_path / "link").symlink_to(source)
    copy(tmp_path / "link", tmp_path / "t")
    assert (tmp_path / "t/f").read_text() == "1"


def test_missing_and_wrong_sources(source: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no folder"):
        copy(tmp_path / "missing", tmp_path / "t")
    (source / "f").touch()
    with pytest.raises(UsageError, match="not a folder"):
        copy(source / "f", tmp_path / "t")
    with pytest.raises(UsageError):
        copy(Path("a\0b"), tmp_path / "t")


@pytest.mark.parametrize("where", [".", "a", "a/b"])
def test_a_folder_that_holds_the_target_is_refused(source: Path, where: str) -> None:
    target = source / where / "t"
    target.mkdir(parents=True)
    with pytest.raises(UsageError, match="state directory"):
        copy(source, target)
    assert list(target.iterdir()) == []


def test_what_cannot_be_read_is_named(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source / "d").mkdir()
    (source / "d/secret").write_text("1")
    if os.geteuid() != 0:
        (source / "d/secret").chmod(0)
    else:  # root reads everything here; a network file system refuses with the same error
        real_open = os.open

        def refuse(path: str, flags: int, *args: int, **kwargs: int) -> int:
            if isinstance(path, str) and path.startswith("/proc/self/fd/") and os.readlink(path).endswith("secret"):
                raise PermissionError(13, "Permission denied")
            return real_open(path, flags, *args, **kwargs)

        monkeypatch.setattr(module.os, "open", refuse)
    with pytest.raises(NotPermitted, match="d/secret"):
        copy(source, tmp_path / "t")


def test_a_file_that_keeps_changing_is_reported(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source / "log").write_text("0")
    real_copy = files.copy_data

    def growing(source_fd: int, target_fd: int, size: int) -> int:
        done = real_copy(source_fd, target_fd, size)
        with open(source / "log", "a") as f:
            f.write("more")
        return done

    monkeypatch.setattr(module.files, "copy_data", growing)
    report = copy(source, tmp_path / "t")
    assert len(report.warnings) == 1
    assert "log kept changing" in report.warnings[0]
    assert (tmp_path / "t/log").read_text().startswith("0more")


def test_what_vanishes_is_reported(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (source / name).write_text(name)
        (source / f"{name}d").mkdir()
    real_scandir = os.scandir

    def scan(fd: int):
        entries = list(real_scandir(fd))
        for name in ("a", "ad"):
            path = source / name
            if path.is_dir():
                path.rmdir()
            elif path.exists():
                path.unlink()
        return _Listed(entries)

    monkeypatch.setattr(module.os, "scandir", scan)
    report = copy(source, tmp_path / "t")
    assert sorted(os.listdir(tmp_path / "t")) == ["b", "bd"]
    assert sorted(w.split()[0] for w in report.warnings) == ["a", "ad"]


class _Listed:
    def __init__(self, entries: list[os.DirEntry[str]]) -> None:
        self._entries = entries

    def __enter__(self) -> list[os.DirEntry[str]]:
        return self._entries

    def __exit__(self, *_: object) -> None:
        pass


def test_a_folder_that_flips_to_a_link_never_leads_outside(source: Path, tmp_path: Path) -> None:
    """A directory and a link to secrets change places as fast as they can while the folder is copied, again and
    again."""
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "x").write_text("SECRET")
    (source / "d").mkdir()
    (source / "d/x").write_text("public")
    (source / "e").symlink_to(secrets)
    (source / "x").write_text("public")
    (source / "y").symlink_to(secrets / "x")
    stop = threading.Event()
    flips = 0

    def flip() -> None:
        nonlocal flips
        while not stop.is_set():
            for one, other in (("d", "e"), ("x", "y")):
                sc.call("renameat2", sc.AT_FDCWD, str(source / one), sc.AT_FDCWD, str(source / other), RENAME_EXCHANGE)
            flips += 1

    thread = threading.Thread(target=flip)
    thread.start()
    try:
        for number in range(150):
            target = tmp_path / f"t{number}"
            try:
                copy(source, target)
            except (NotFound, UsageError):
                pass  # a clear refusal is as good as a consistent copy
            for base, _, names in os.walk(target):
                for name in names:
                    path = Path(base, name)
                    assert path.is_symlink() or path.read_text() == "public"
    finally:
        stop.set()
        thread.join()
    assert flips > 100
