"""kill -9 of the daemon between any two calls: the next command works, every captured snapshot is there, nothing is
orphaned."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapshotd import failpoints
from tests.e2e.support import Snap
from tests.leftovers import nothing_left


@pytest.mark.long  # while an agent runs: the next test, and test_survive.py
def test_killed_between_any_two_calls(own_snap: Snap, runtime: str) -> None:
    snap = own_snap
    trajectory, first = snap.create("--runtime", runtime)
    snapshots = [first]
    for number in range(4):
        snapshots.append(snap.sh(trajectory, f"echo {number} >> log; seq {number} > s{number}")["snapshot"])
        snap.kill_daemon()
        assert [s["id"] for s in snap.json("log", trajectory)] == snapshots
        for index, snapshot in enumerate(snapshots[1:]):
            assert snap("cat", f"{snapshot}:/workspace/log").stdout == "".join(f"{n}\n" for n in range(index + 1))
        assert snap.json("ps") == [], "the sandboxes ended with their daemon"
        nothing_left(snap.state_dir, running=True)
    (fork,) = snap.json("fork", snapshots[2])["trajectories"]
    snap.kill_daemon()
    assert snap.sh(fork, "cat log")["stdout"] == "0\n1\n"
    assert snap.sh(trajectory, "cat log")["stdout"] == "0\n1\n2\n3\n"
    snap.stop_daemon()
    nothing_left(snap.state_dir, running=False)


@pytest.mark.each_runtime
def test_everything_is_killed_while_an_agent_runs(own_snap: Snap, runtime: str, tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text("import time\nopen('started', 'w').close()\nprint('up', flush=True)\ntime.sleep(1000)\n")
    name = f"victim-{runtime}"
    running = own_snap.follow("run", "--runtime", runtime, "--name", name, agent)
    assert running.stdout is not None
    assert running.stdout.readline() == "up\n"
    own_snap.crash()
    _, errors = running.communicate(timeout=60)
    assert running.returncode != 0
    assert "snapshotd" in errors
    trajectory = next(t for t in own_snap.json("ls") if t["name"] == name)
    assert trajectory["status"] == "interrupted"
    assert [s["tool"]["name"] for s in own_snap.json("log", name)] == ["start"]
    nothing_left(own_snap.state_dir, running=True)
    own_snap.stop_daemon()


PASSED = ("engine.step.", "engine.start.", "engine.fork.", "layers.capture.")
"""By a step and a fork. Who kills at the others: tests/crash/test_storage_kill.py (`ELSEWHERE`)."""

CHANGED = "engine.fork.changed"
"""By a fork with variants only: tests/crash/test_mind_kill.py."""


# in the short set tests/crash/test_storage_kill.py kills at such ones, and test_survive.py while an agent runs
@pytest.mark.long
@pytest.mark.parametrize("name", [n for n in failpoints.NAMES if n.startswith(PASSED) and n != CHANGED])
def test_killed_at_every_failpoint(own_snap: Snap, name: str) -> None:
    """Whatever the daemon was doing: a step is wholly there or wholly absent, and the next one works."""
    snap = own_snap
    trajectory, first = snap.create("--runtime", "runc")
    done = snap.sh(trajectory, "echo 1 > a; (sleep 1000 >/dev/null 2>&1 &)" if "capture" in name else "echo 1 > a")[
        "snapshot"
    ]
    snap.stop_daemon()
    before = [s["id"] for s in snap.json("log", trajectory)]
    assert before[:2] == [first, done]
    snap.stop_daemon()
    armed = Snap(snap.state_dir, {**snap.env, "SNAPSHOTD_FAILPOINT": name})
    armed("exec", trajectory, "--", "sh", "-c", "(sleep 1000 >/dev/null 2>&1 &) ; echo 2 > a; echo new > b", code=None)
    armed("fork", done, code=None)
    armed("rm", "--force", trajectory, code=None)
    armed.stop_daemon()
    assert f"failpoint {name} reached" in (snap.state_dir / "daemon.log").read_text(errors="replace")
    survivors = [t["id"] for t in snap.json("ls")]
    if trajectory in survivors:
        history = snap.json("log", trajectory)
        assert [s["id"] for s in history][: len(before)] == before
        for entry in history[len(before) :]:
            if entry["tool"]["name"] == "exec":
                assert snap("cat", f"{entry['id']}:/workspace/a").stdout == "2\n"
                assert snap("cat", f"{entry['id']}:/workspace/b").stdout == "new\n"
        assert snap("cat", f"{done}:/workspace/a").stdout == "1\n"
        assert snap.sh(trajectory, "echo 3 > a; cat a")["stdout"] == "3\n"
    nothing_left(snap.state_dir, running=True)
    snap.stop_daemon()
    nothing_left(snap.state_dir, running=False)
