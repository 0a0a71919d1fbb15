"""Looking up users in a sandbox's own files, which say anything and may be anything."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from snapshotd.engine.sandbox.users import User, look_up_below
from snapshotd.errors import UsageError

_PASSWD = b"""root:x:0:0:root:/root:/bin/sh
# a comment
odd:x:+5:5::/:/bin/sh
odd:x:99999999999:5::/:/bin/sh
short:x:6
nul\0:x:7:7::/:/bin/sh
worker:x:1000:1001:A B:/home/worker:
12:x:13:14::relative:
"""
_GROUP = b"root:x:0:\nworker:x:1001:\nextra:x:77:other,worker\nmore:x:78:worker\nmore:x:x:worker\nown:x:1001:worker\n:x:80:\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root/etc").mkdir(parents=True)
    (tmp_path / "root/etc/passwd").write_bytes(_PASSWD)
    (tmp_path / "root/etc/group").write_bytes(_GROUP)
    return tmp_path / "root"


def _look_up(root: Path, wanted: str) -> User:
    fd = os.open(root, os.O_PATH)
    try:
        return look_up_below(fd, wanted)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("worker", User(1000, 1001, (77, 78), "/home/worker")),
        ("1000", User(1000, 1001, (77, 78), "/home/worker")),
        ("worker:extra", User(1000, 77, (), "/home/worker")),
        ("worker:9", User(1000, 9, (), "/home/worker")),
        ("5:more", User(5, 78, (), "/")),
        ("2000", User(2000, 2000, (), "/")),
        ("root", User(0, 0, (), "/root")),
        ("0:0", User(0, 0, (), "/root")),
        ("12", User(13, 14, (), "/")),
    ],
)
def test_names_and_numbers(root: Path, wanted: str, found: User) -> None:
    assert _look_up(root, wanted) == found


def test_root_needs_no_files(root: Path) -> None:
    (root / "etc/passwd").unlink()
    (root / "etc/group").unlink()
    assert _look_up(root, "root") == _look_up(root, "0") == User(0, 0, (), "/root")
    with pytest.raises(UsageError, match="'worker' is not in the sandbox's /etc/passwd"):
        _look_up(root, "worker")


@pytest.mark.parametrize(
    "wanted",
    [
        "nobody",
        "odd",
        "short",
        "nul",
        "nul\0",
        "",
        ":",
        ":worker",
        "worker:",
        "worker:none",
        "worker:a:b",
        "-1",
        "99999999999",
        "\u0661",
        "1_0",
        "+5",
        "w\ud800",
        "x" * 100_000,
    ],
)
def test_what_is_not_there_is_said(root: Path, wanted: str) -> None:
    with pytest.raises(UsageError, match=r"names no user|is not in the sandbox's") as refused:
        _look_up(root, wanted)
    assert len(refused.value.message) < 300


def test_links_stay_below_the_root(root: Path) -> None:
    (root.parent / "passwd").write_bytes(b"outside:x:5:5::/:\n")
    (root / "passwd").write_bytes(b"inside:x:6:6::/:\n")
    for target in ("/passwd", "../../../passwd"):
        (root / "etc/passwd").unlink()
        (root / "etc/passwd").symlink_to(target)
        assert _look_up(root, "inside").user == 6


def _big(path: Path) -> None:
    path.write_bytes(b"worker:x:1:1::/:\n" + b"#" * (1 << 20))


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("passwd"), _big],
    ids=["fifo", "directory", "loop", "big"],
)
def test_what_cannot_be_read_is_said_and_blocks_nothing(root: Path, make: Callable[[Path], object]) -> None:
    (root / "etc/passwd").unlink()
    make(root / "etc/passwd")
    with pytest.raises(UsageError, match="/etc/passwd"):
        _look_up(root, "worker")
