"""The probes of the host leave nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

from snapshotd.kernel.probes import needed
from tests.capabilities import require


def _mounts() -> tuple[str, str]:
    return os.readlink("/proc/self/ns/mnt"), Path("/proc/self/mountinfo").read_text()


def test_a_probe_leaves_the_process_where_it_was(tmp_path: Path) -> None:
    require("root")
    before = _mounts()
    found = needed.probe(tmp_path)
    assert found.overlays, found.reasons
    assert _mounts() == before
    assert os.listdir(tmp_path) == []
