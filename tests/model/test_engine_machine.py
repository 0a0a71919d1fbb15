"""Random walks of the whole engine (real runc sandboxes, real kernel, kills) against an oracle; see engine_machine.py.

SNAPSHOTD_MACHINE_STEPS and SNAPSHOTD_MACHINE_SEEDS (comma-separated) ask for longer walks, or for one seed again.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.kernel import syscalls
from tests.e2e.support import Snap
from tests.leftovers import nothing_left
from tests.model.engine_machine import SLOW_S, Machine

STEPS = int(os.environ.get("SNAPSHOTD_MACHINE_STEPS", "100"))
SEEDS = tuple(int(seed) for seed in os.environ.get("SNAPSHOTD_MACHINE_SEEDS", "1,2,3").split(","))


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="snapshotd-machine-", dir="/var/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def no_hangs() -> Iterator[None]:
    """A request that is never answered fails."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(2 * SLOW_S)
    yield
    socket.setdefaulttimeout(before)


@pytest.mark.runc
@pytest.mark.timeout(120 + STEPS * 3)
@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_differs_from_the_oracle(seed: int, small_root: Path, folder: Path, no_hangs: None) -> None:
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 0)  # what a killed daemon leaves is adopted by the first process, as on a real machine
    snap = Snap(folder / "state")
    try:
        snap("image", "import", small_root, "--name", "default")
        snap.stop_daemon()
        machine = Machine(snap, seed, folder)
        machine.run(STEPS)
        print(f"seed {seed}: {dict(machine.counts)}")
    finally:
        snap.stop_daemon()
    nothing_left(snap.state_dir, running=False)
