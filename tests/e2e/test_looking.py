"""Looking at snapshots (`log`, `show`, `tree`) while the daemon has other things to do."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.client import Snapshotd
from snapshotd.client.results import FileCounts
from tests.e2e.support import AGENT, Snap, daemon_with, processes_with, wait_until

pytestmark = pytest.mark.runc


@pytest.fixture(scope="module")
def place(small_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Snap]:
    with daemon_with(small_root, tmp_path_factory.mktemp("looking") / "state") as snap:
        yield snap


def test_nobody_waits_for_changes_to_be_counted(place: Snap) -> None:
    """They are shown as not counted yet: the queue behind them may be that of fifty busy sandboxes."""
    trajectory, _ = place.create("--runtime", "runc")
    client = Snapshotd(state_dir=place.state_dir, autostart=False)
    place.sh(trajectory, "echo first > first")
    client.flush()  # the processes that count, in layers and in trees, are there from now on
    counting = [
        pid
        for pid, line in processes_with(str(place.state_dir))
        if "storage.worker" in line or "children archive" in line
    ]
    assert len(counting) == 2
    for pid in counting:
        os.kill(pid, signal.SIGSTOP)
    try:
        taken = place.sh(trajectory, "echo second > second")["snapshot"]
        assert [one["files"] is None for one in place.json("log", trajectory)] == [False, False, True]
        last = place("log", trajectory).stdout.splitlines()[-1].split()
        assert last[5:7] == ["…", "-"]
        assert place.json("show", taken)["files"] is None
        assert "files        …\n" in place("show", taken).stdout
        assert place.json("tree")[0]["snapshots"][-1]["files"] is None
        assert client.snapshot(taken).files is None
        done = place("exec", trajectory, "--", "sh", "-c", "echo third > third")
        assert "exec  done  …  " in done.stderr
        assert place.json("rewind", trajectory, taken, "--files")["files"] is None
    finally:
        for pid in counting:
            os.kill(pid, signal.SIGCONT)
    wait_until(lambda: client.snapshot(taken).files is not None, "it is counted")
    assert client.snapshot(taken).files == FileCounts(1, 0, 0, 7)
    place("rm", "--force", trajectory)


def test_a_diff_of_what_changed_nothing_says_what_to_ask_for(snap: Snap, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(f"{AGENT}\nshell('echo hi > made')\n")
    snap("run", "-q", "--runtime", "runc", "--name", "ended", tmp_path / "agent.py")
    first, *_, last = [one["id"] for one in snap.json("log", "ended")]
    run = snap("diff", "ended")
    (hint,) = re.findall("`snapshotd (diff [^`]*)`", run.stderr)
    assert hint.split()[1:] == [first[:12], "ended"]
    assert "A /workspace/made" in snap(*hint.split()).stdout
    fork = snap.json("fork", last)["trajectories"][0]
    assert f"diff {last[:12]} " not in snap("diff", fork).stderr, "a fork without a step has nothing to show"
    assert snap("diff", first, first).stderr == f"snapshotd: the files of {first} and {first} are the same\n"
    assert snap("diff", "--json", first, first).stderr == ""
    assert snap("diff", first, last).stderr == ""
    snap("rm", "--force", fork)
    snap("rm", "ended")
