"""Fixtures of the tests of whole parts on a real kernel."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.engine.engine import Engine
from snapshotd.kernel import mounts
from tests import mind_rig
from tests.mind_rig import Agent
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


@pytest.fixture(scope="module")
def engine(small_root: Path) -> Iterator[Engine]:
    """One of the module's own, in this process, over the real runtime."""
    with mind_rig.engine(small_root) as opened:
        yield opened


@pytest.fixture
def agent(engine: Engine) -> Agent:
    return mind_rig.agent(engine)
