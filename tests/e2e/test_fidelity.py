"""Every snapshot holds exactly what the sandbox saw at that step, whatever a shell command did; nothing of later
steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import Snap, host_manifest, wait_until

STEPS = (
    "echo one > a.txt; mkdir -p d/e/f; echo deep > d/e/f/g; printf '\\377' > \"$(printf 'odd\\tname\\nx')\"; : > empty",
    "echo two >> a.txt; mv d moved; ln -s moved/e link; ln -s /nowhere dangling; mkfifo pipe",
    "rm -r moved/e; mkdir moved/e; echo new > moved/e/fresh; ln a.txt hard.txt; chmod 4755 a.txt",
    "mv moved/e/fresh moved/other; rm empty; mkdir empty; touch -d '1969-12-31 23:59:58.5 UTC' moved/other",
    "chown 1234:4321 moved/other; chmod 0 moved; truncate -s 5M sparse; dd if=/dev/zero of=sparse bs=4k count=1 seek=900 conv=notrunc",
    "python3 -c \"import os; os.setxattr('moved/other', 'user.note', bytes(range(256)))\"; rm link; mkdir link; echo x > link/y",
    "mv moved again; mv again/other again/third; mv link moved; rm a.txt; rm dangling; echo y > dangling",
    "chmod 755 again; cp -a again copy; rm -rf again; mkdir again; ln hard.txt again/hard2",
    "echo gone > /etc/motd; rm -rf /etc/cron.d /var/log/apt; mkdir -p /opt/thing; echo z > /opt/thing/z; mv /etc/skel /etc/skeleton",
    "true",
)


@pytest.fixture(scope="module")
def history(snap: Snap, runtime: str, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, dict[str, Any]]]:
    """Snapshot ids with what the sandbox saw right after each step."""
    workspace = tmp_path_factory.mktemp("workspace")
    (workspace / "given").write_text("from the host\n")
    trajectory, first = snap.create("--runtime", runtime, "--workspace", workspace)
    seen = [(first, snap.manifest(trajectory))]
    for step in STEPS:
        done = snap.sh(trajectory, step)
        seen.append((done["snapshot"], snap.manifest(trajectory)))
    snap("stop", trajectory)
    return seen


def test_restore_gives_each_step_exactly(snap: Snap, history: list[tuple[str, dict[str, Any]]], tmp_path: Path) -> None:
    for number, (snapshot, seen) in enumerate(history):
        target = tmp_path / f"step{number}"
        snap("restore", snapshot, "--path", "/workspace", "--to", target)
        assert host_manifest(target) == seen, f"step {number}"


def test_fork_sees_each_step_exactly(snap: Snap, history: list[tuple[str, dict[str, Any]]]) -> None:
    for number, (snapshot, seen) in enumerate(history):
        (fork,) = snap.json("fork", snapshot)["trajectories"]
        assert snap.manifest(fork) == seen, f"step {number}"
        snap("rm", "--force", fork)


def test_cat_and_diff_follow_each_step(snap: Snap, history: list[tuple[str, dict[str, Any]]]) -> None:
    ids = [snapshot for snapshot, _ in history]
    assert snap("cat", f"{ids[1]}:/workspace/a.txt").stdout == "one\n"
    assert snap("cat", f"{ids[2]}:/workspace/a.txt").stdout == "one\ntwo\n"
    assert "does not exist" in snap("cat", f"{ids[0]}:/workspace/a.txt", code=4).stderr
    assert "does not exist" in snap("cat", f"{ids[7]}:/workspace/a.txt", code=4).stderr
    assert snap("cat", f"{ids[2]}:/workspace/moved/e/f/g").stdout == "deep\n"
    assert "does not exist" in snap("cat", f"{ids[2]}:/workspace/d/e/f/g", code=4).stderr
    changed = {c["path"]: c["change"] for c in snap.json("diff", ids[9])}
    assert changed["/etc/motd"] in ("added", "changed")
    assert changed["/opt/thing/z"] == "added"
    assert changed["/etc/skel"] == "deleted"
    assert changed["/etc/skeleton"] == "added"
    assert not [path for path in changed if path.startswith("/workspace")]
    assert snap.json("diff", ids[10]) == []


def test_each_step_is_reported_with_its_counts(snap: Snap, history: list[tuple[str, dict[str, Any]]]) -> None:
    wait_until(lambda: snap.json("show", history[-1][0])["files"] is not None, "all is counted")
    shown = snap.json("show", history[1][0])
    assert shown["tool"]["name"] == "exec"
    assert shown["files"]["added"] == 4
    assert shown["files"]["deleted"] == 0
    last = snap.json("show", history[-1][0])
    assert last["files"] == {"added": 0, "changed": 0, "deleted": 0, "bytes": 0}


def test_attributes_that_cannot_be_recorded_are_said_on_the_snapshot(snap: Snap) -> None:
    """The kernel refuses to list more than 64 KiB of names, to the daemon as to everybody else."""
    trajectory, _ = snap.create("--runtime", "runc")
    many = "import os; open('f', 'w'); [os.setxattr('f', f'user.{n:0245d}', b'x') for n in range(400)]"
    done = snap.json("exec", "--wait", "stored", trajectory, "--", "python3", "-c", many)
    assert done["exit_code"] == 0, done
    (said,) = snap.json("show", done["snapshot"])["warnings"]
    assert "workspace/f" in said
    assert "extended attributes" in said
    assert said in snap("show", done["snapshot"]).stdout
    assert snap.json("log", trajectory)[-1]["warnings"] == [said]
    assert done["snapshot"][:12] in snap("log", trajectory).stderr
    refused = snap(
        "exec", trajectory, "--", "sh", "-c", "sleep 1000 & echo x >> f", code=125
    ).stderr  # a live process: it would be copied
    assert "'f' has more extended attributes" in refused
    snap("rm", "--force", trajectory)
