"""The probes of the host leave nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

from snapshotd.kernel.probes import needed
from tests.capabilities import require


def _mounts(folder: Path) -> tuple[str, list[str]]:
    """The namespace, and the mounts below the folder: others are mounted meanwhile by other tests."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return os.readlink("/proc/self/ns/mnt"), [line for line in lines if str(folder) in line]


def test_a_probe_leaves_the_process_where_it_was(tmp_path: Path) -> None:
    require("root")
    before = _mounts(tmp_path)
    found = needed.probe(tmp_path)
    assert found.overlays, found.reasons
    assert _mounts(tmp_path) == before
    assert os.listdir(tmp_path) == []
