"""A long trajectory: layers are merged behind the agent's back, and every old snapshot still is what it was."""

from __future__ import annotations

from pathlib import Path

from snapshotd.client import Snapshotd
from tests.e2e.support import Snap, host_manifest

STEPS = 80
MAX_LAYERS = 32


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


def test_a_deleted_file_stays_deleted_when_layers_are_merged(snap: Snap, runtime: str, tmp_path: Path) -> None:
    """A folder of the workspace, which is in the merged layer alone: its listing has no name that cannot be opened."""
    client = Snapshotd(state_dir=snap.state_dir, autostart=False)
    (tmp_path / "src").mkdir()
    for name in ("keep.py", "gone.py"):
        (tmp_path / "src" / name).write_text(f"# {name}\n")
    trajectory, _ = snap.create("--runtime", runtime, "--workspace", tmp_path)
    deleted = client.exec(trajectory, ["rm", "/workspace/src/gone.py"]).snapshot
    assert deleted is not None
    for number in range(20):
        client.flush(trajectory)
        taken = client.exec(trajectory, ["sh", "-c", f"echo {number} > /workspace/of"]).snapshot
        assert taken is not None
        if client.snapshot(taken.id).layers <= number:
            break
    else:
        raise AssertionError("nothing was merged")
    use = "cd /workspace; ls src && cat src/*.py && cp -r src /tmp/copy && rm -r /tmp/copy"
    assert snap.sh(trajectory, use)["stdout"] == "keep.py\n# keep.py\n"
    assert snap.json("exec", "--snapshot", taken.id, "--", "sh", "-c", use)["stdout"] == "keep.py\n# keep.py\n"
    snap.sh(trajectory, "rm -r /workspace/src && ! ls /workspace/src")
    snap("rewind", trajectory, deleted.id)
    assert snap.sh(trajectory, use)["stdout"] == "keep.py\n# keep.py\n"
    snap("rm", "--force", trajectory)
