"""Fixtures of the tests of whole parts on a real kernel."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.kernel import mounts
from tests.parking_box import Box


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    shared = (
        Path("/dev/shm") / f"parking-{os.getpid()}"
    )  # a mount of its own in every root: unix sockets do not work through an overlay
    shared.mkdir()
    folder = tmp_path / "layers"
    folder.mkdir()
    made = Box(folder, shared)
    yield made
    made.close()
    shutil.rmtree(shared)
    assert [mount.point for mount in mounts.read_mountinfo() if mount.point.startswith(bytes(tmp_path))] == []
