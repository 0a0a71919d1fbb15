"""The daemon is replaced, or dies, while people use it: commands and followers go on at the next one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.errors import Conflict
from tests.e2e.support import Snap
from tests.leftovers import nothing_left

pytestmark = pytest.mark.runc

NOTE = "snapshotd: the daemon went away; following its successor"
AGENT = """
import os, time
print("up", flush=True)
while not os.path.exists("/workspace/go"):
    time.sleep(0.05)
print("went on", flush=True)
"""


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    program = tmp_path / "agent.py"
    program.write_text(AGENT)
    return program


@pytest.fixture
def stopped(own_snap: Snap) -> Iterator[Snap]:
    """No daemon runs at first, and nothing is left at the end."""
    own_snap.stop_daemon()
    yield own_snap
    nothing_left(own_snap.state_dir, running=True)
    own_snap.stop_daemon()
    nothing_left(own_snap.state_dir, running=False)


def _follow(snap: Snap, *words: str | Path) -> subprocess.Popen[str]:
    """Start a command that follows a run, and wait until it shows what the agent said."""
    running = snap.follow(*words)
    assert running.stdout is not None
    assert running.stdout.readline() == "up\n", running.communicate(timeout=60)
    return running


def _ended(running: subprocess.Popen[str]) -> list[str]:
    """What a follower said whose run was interrupted, after its output."""
    out, errors = running.communicate(timeout=120)
    assert running.returncode == 125, errors
    assert out == "", "the output is not shown twice"
    assert "Traceback" not in errors
    return errors.splitlines()


@pytest.mark.long  # beside an agent: test_a_followed_run_whose_daemon_goes_away
def test_restart_without_agents(stopped: Snap) -> None:
    snap = stopped
    first = snap.json("daemon", "--restart")
    assert first["stopped"] is None
    assert first["started"] == snap.daemon_pid()
    trajectory, start = snap.create("--runtime", "runc")
    done = snap.sh(trajectory, "echo kept > kept")["snapshot"]
    second = snap.json("daemon", "--restart")
    assert second["stopped"] == first["started"]
    assert second["started"] == snap.daemon_pid() != first["started"]
    assert [one["id"] for one in snap.json("log", trajectory)] == [start, done]
    assert snap.sh(trajectory, "cat kept")["stdout"] == "kept\n"
    told = snap("daemon", "--restart").stderr
    assert (
        told
        == f"snapshotd: daemon {snap.daemon_pid()} ready on {snap.state_dir}/snapshotd.sock in place of {second['started']}\n"
    )
    snap("rm", "--force", trajectory)


@pytest.mark.long  # by a kill: test_what_ends_with_the_daemon in test_survive.py
def test_a_command_is_cut_off(stopped: Snap) -> None:
    """Only followers ask again: nobody knows what a command has done."""
    snap = stopped
    trajectory, first = snap.create("--runtime", "runc")
    running = _follow(snap, "exec", trajectory, "--", "sh", "-c", "echo up; sleep 1000")
    snap("daemon", "--restart")
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 125
    assert "the daemon went away" in errors
    assert "Traceback" not in errors
    assert [one["id"] for one in snap.json("log", trajectory)] == [first]
    snap("rm", "--force", trajectory)


@pytest.mark.parametrize("how", [pytest.param("killed", marks=pytest.mark.long), "restarted"])
def test_a_followed_run_whose_daemon_goes_away(stopped: Snap, agent: Path, how: str) -> None:
    """Everybody who follows it goes on with it, at a daemon that one of them has started."""
    snap, name = stopped, f"followed-{how}"
    ran = _follow(snap, "run", "--runtime", "runc", "--name", name, agent)
    attached = _follow(snap, "attach", name)
    quiet = _follow(snap, "attach", "--quiet", name)
    before = snap.daemon_pid()
    if how == "killed":
        snap.kill_daemon()
    else:
        assert snap.json("daemon", "--restart")["stopped"] == before
    assert "is running" in snap("resume", name, code=Conflict.exit_code).stderr
    snap("exec", name, "--", "touch", "/workspace/go")
    for running in (ran, attached, quiet):
        out, errors = running.communicate(timeout=120)
        assert running.returncode == 0, errors
        assert out == "went on\n", "the output before is not shown twice"
        assert (NOTE in errors) == (running is not quiet)
    assert snap.daemon_pid() != before
    assert [one["status"] for one in snap.json("ls") if one["name"] == name] == ["finished"]
    snap("rm", "--force", name)


@pytest.mark.long  # the same: test_everything_is_killed_while_an_agent_runs in test_crash.py
def test_a_followed_run_whose_sandbox_is_lost_with_its_daemon(stopped: Snap, agent: Path) -> None:
    """Everybody who follows it hears how it ended."""
    snap, name = stopped, "lost"
    ran = _follow(snap, "run", "--runtime", "runc", "--name", name, agent)
    quiet = _follow(snap, "attach", "--quiet", name)
    snap.crash()
    *_, ended, last = _ended(ran)
    assert ended.startswith("■ interrupted, 1 snapshot;")
    assert "went away before its agent ended (interrupted)" in last
    assert "snapshotd resume" in last
    (last,) = _ended(quiet)
    assert "(interrupted)" in last
    assert [one["status"] for one in snap.json("ls") if one["name"] == name] == ["interrupted"]
    resumed = _follow(snap, "resume", name)
    snap.crash()
    assert NOTE in _ended(resumed)
    snap("rm", "--force", name)


def test_another_socket_is_told_who_serves_the_state_directory(own_snap: Snap, tmp_path: Path) -> None:
    own_snap("ls")  # starts it
    other, pid = tmp_path / "other.sock", own_snap.daemon_pid()
    said = own_snap("ls", "--socket", other, code=6).stderr
    assert f"pid {pid}" in said
    assert f"serves at {own_snap.state_dir}/snapshotd.sock" in said
