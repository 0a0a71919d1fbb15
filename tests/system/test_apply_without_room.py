"""A folder with no room left, or that nobody may write to, is as before when something was to be applied to it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.errors import OutOfSpace, UsageError
from tests.capabilities import require
from tests.unit.client.folders import Rig, make

BEFORE: dict[str, object] = {"a": b"a", "b": b"b", "gone": b"g"}


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """The folder is a file system of its own with 64 KiB."""
    require("root")
    rig = Rig(tmp_path)
    make(tmp_path / "base", BEFORE)
    make(tmp_path / "snapshot", {"a": b"A", "b": b"x" * (100 << 10), "new/c": b"c"})
    rig.here.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=755", "apply-test", str(rig.here)], check=True)
    try:
        for name, content in BEFORE.items():
            assert isinstance(content, bytes)
            (rig.here / name).write_bytes(content)
        yield rig
    finally:
        subprocess.run(["umount", str(rig.here)], check=True)


def test_a_full_disk(rig: Rig) -> None:
    with pytest.raises(OutOfSpace, match="no room"):
        rig.apply()
    assert rig.result() == BEFORE


def test_no_inodes(rig: Rig) -> None:
    subprocess.run(["mount", "-o", "remount,size=1m,nr_inodes=6", str(rig.here)], check=True)
    with pytest.raises(OutOfSpace, match="no room"):
        rig.apply()
    assert rig.result() == BEFORE


def test_a_read_only_folder(rig: Rig) -> None:
    subprocess.run(["mount", "-o", "remount,size=1m,ro", str(rig.here)], check=True)
    with pytest.raises(UsageError, match="Read-only file system; it is as it was"):
        rig.apply()
    assert rig.result() == BEFORE


def test_another_file_system_below(rig: Rig) -> None:
    """Nothing can be renamed to there."""
    subprocess.run(["mount", "-o", "remount,size=1m", str(rig.here)], check=True)
    (rig.here / "new").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=755", "apply-test", str(rig.here / "new")], check=True)
    try:
        with pytest.raises(UsageError, match="it is as it was"):
            rig.apply()
        assert rig.result() == {**BEFORE, "new": None}
    finally:
        subprocess.run(["umount", str(rig.here / "new")], check=True)
