"""Names that were deleted stay away in the running root, too: after merges of layers, rewinds and forks."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.support import Snap, wait_until

LOOK = "ls -A src src/deep; cat src/*.py src/deep/*.py; rm -rf copy && cp -r src copy && rm -r copy"
SEEN = "src:\ndeep\nkeep.py\n\nsrc/deep:\nkeep.py\nkeep\nkeep\n"


def test_deleted_names_do_not_come_back(snap: Snap, runtime: str, tmp_path: Path) -> None:
    """The layer of a workspace has directories that no other layer has. What was deleted in them is merged into it
    after some steps."""
    for folder in ("src", "src/deep"):
        (tmp_path / folder).mkdir()
        for name in ("keep", "gone"):
            (tmp_path / folder / f"{name}.py").write_text(f"{name}\n")
    trajectory, _ = snap.create("--runtime", runtime, "--workspace", tmp_path)
    deleted = snap.sh(trajectory, "rm src/gone.py src/deep/gone.py")["snapshot"]

    def merged() -> bool:
        done = snap.sh(trajectory, f"date +%N > step; {LOOK}")
        assert (done["stdout"], done["stderr"]) == (SEEN, "")
        shown = snap.json("show", done["snapshot"])
        return bool(shown["layers"] < shown["seq"])

    wait_until(merged, "layers were merged")
    (fork,) = snap.json("fork", trajectory)["trajectories"]
    assert snap.sh(fork, LOOK)["stdout"] == SEEN
    snap("rewind", trajectory, deleted)
    assert snap.sh(trajectory, LOOK)["stdout"] == SEEN
    snap("rm", "--force", fork, trajectory)
