"""A long trajectory: layers are merged behind the agent's back, and every old snapshot still is what it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapshotd.client import Snapshotd
from tests.e2e.support import Snap, host_manifest

STEPS = 80
MAX_LAYERS = 32


@pytest.mark.long  # shallow: test_scale.py; exact: test_fidelity.py, test_deleted_names.py
def test_stacks_stay_shallow_and_old_snapshots_exact(snap: Snap, tmp_path: Path) -> None:
    client = Snapshotd(state_dir=snap.state_dir, autostart=False)
    trajectory, _ = snap.create("--runtime", "runc")
    expected: dict[int, tuple[str, dict[str, object]]] = {}
    depths = []
    for number in range(STEPS):
        script = (
            f"mkdir -p d{number % 7}; echo {number} > d{number % 7}/f{number % 5}; echo {number} >> log; "
            f"[ {number} -lt 9 ] || rm -rf d{(number + 3) % 7}; [ ! -e d1 ] || mv d1 e{number}; rm -rf e{number - 4}"
        )
        done = client.exec(trajectory, ["sh", "-c", script])
        assert done.exit_code == 0
        assert done.snapshot is not None
        if number % 10 == 9:
            client.flush()
            expected[number] = (done.snapshot.id, snap.manifest(trajectory))
        depths.append(client.snapshot(done.snapshot.id).layers)
    assert max(depths) <= MAX_LAYERS
    assert depths[-1] < STEPS // 2, "layers were merged"
    for number, (snapshot, seen) in expected.items():
        target = tmp_path / str(number)
        snap("restore", snapshot, "--path", "/workspace", "--to", target)
        assert host_manifest(target) == seen, f"step {number}"
    snap("rm", "--force", trajectory)
