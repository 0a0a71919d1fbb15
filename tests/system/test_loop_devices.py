"""The layer image where /dev lacks the loop devices' nodes, as in a container that started before they were made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from snapshotd.kernel import loop
from snapshotd.layers import filesystem
from tests.capabilities import require
from tests.storage_rig import in_own_mount_namespace

_BARE_DEV = """
set -e
mount -t tmpfs none /dev
mknod /dev/null c 1 3
mknod /dev/urandom c 1 9
mknod /dev/loop-control c 10 237
exec "$@"
"""
_PREPARE = """
import glob, json, os, sys
from pathlib import Path
from snapshotd.kernel import loop
from snapshotd.layers import filesystem
state = Path(sys.argv[1])
(state / "layers.img").exists() or filesystem._make_image(state / "layers.img")
before = glob.glob("/dev/loop[0-9]*")
first = filesystem.prepare(state)
kind, device = first.kind, loop.device_of(state / "layers.img")
if sys.argv[2] == "twice":
    # Another mount namespace that holds the image, so that the device stays; then the node vanishes.
    os.mkdir(state / "elsewhere")
    os.system(f"mount --bind {state}/layers {state}/elsewhere")
    filesystem.release(first)
    os.unlink(device)
    first = filesystem.prepare(state)
again = loop.device_of(state / "layers.img")
filesystem.release(first)
os.system(f"umount {state}/elsewhere 2>/dev/null")
print(json.dumps({"before": before, "kind": kind, "device": device, "again": again, "after": loop.device_of(state / "layers.img")}))
"""


@pytest.fixture
def state(tmp_path: Path) -> Path:
    require("root", "xfs")
    return tmp_path


def prepare_in_bare_dev(state: Path, how: str) -> Any:
    """Prepare a layer store in a mount namespace of its own; returns what was seen there."""
    result = subprocess.run(
        ["unshare", "--mount", "--", "sh", "-c", _BARE_DEV, "sh", sys.executable, "-c", _PREPARE, str(state), how],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_the_node_of_the_free_device_is_made(state: Path) -> None:
    seen = prepare_in_bare_dev(state, "once")
    assert seen["before"] == []
    assert seen["kind"] == "loop-xfs"
    assert seen["device"].startswith("/dev/loop")
    assert seen["after"] is None


def test_a_device_that_still_holds_the_image_is_used_again(state: Path) -> None:
    seen = prepare_in_bare_dev(state, "twice")
    assert seen["again"] == seen["device"]
    assert seen["after"] is None


@in_own_mount_namespace
def test_nobody_else_reads_the_image(state: Path) -> None:
    """It has all files of all sandboxes, and a state directory that its owner made may be open to others."""
    image = state / "layers.img"
    for _ in range(2):
        prepare_in_bare_dev(state, "once")
        assert image.stat().st_mode & 0o777 == 0o600
        image.chmod(0o644)


def test_a_device_that_became_another_files_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at a device and its mount it may be detached, and attached to the image of another daemon."""
    require("root", "xfs")
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
        filesystem._make_image(tmp_path / name / "layers.img")
    other = filesystem.prepare(tmp_path / "other")
    try:
        look, answers = loop.device_of, [loop.device_of(tmp_path / "other" / "layers.img")]
        monkeypatch.setattr(loop, "device_of", lambda image: answers.pop() if answers else look(image))
        own = filesystem.prepare(tmp_path / "own")
        try:
            assert not answers
            assert loop.is_mounted_from(own.root, tmp_path / "own" / "layers.img")
        finally:
            filesystem.release(own)
    finally:
        filesystem.release(other)
