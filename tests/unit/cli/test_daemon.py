"""`snapshotd daemon --restart`, with real processes of small daemons."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.api.wire import lock_path_of
from snapshotd.cli.main import main
from snapshotd.client.client import Snapshotd
from snapshotd.daemon.lock import lock_holder
from tests.unit.cli.conftest import Cli, Ran
from tests.unit.daemon.process import start, start_small_ones


@pytest.fixture
def state_dir(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where commands start small daemons, as root would real ones; without one at first."""
    start_small_ones(monkeypatch)
    found = short_dir / "state"
    monkeypatch.setenv("SNAPSHOTD_STATE_DIR", str(found))
    yield found
    pid = lock_holder(found) if found.exists() else None
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
        while lock_holder(found) is not None:
            os.sched_yield()


@pytest.fixture
def restart(capfd: pytest.CaptureFixture[str]) -> Cli:
    def run(*args: str) -> Ran:
        capfd.readouterr()
        code = main(["daemon", "--restart", *args])
        said = capfd.readouterr()
        return Ran(code, said.out, said.err)

    return run


def test_another_takes_the_place_of_the_running_one(state_dir: Path, restart: Cli) -> None:
    old = start(state_dir, state_dir / "snapshotd.sock")
    try:
        Snapshotd(state_dir).create(name="box")
        done = restart("--json")
        assert done.code == 0, done.err
        assert old.process.wait(60) == -signal.SIGKILL
        pid = lock_holder(state_dir)
        assert done.json == {"stopped": old.process.pid, "started": pid}
        assert Snapshotd(state_dir, autostart=False).version().pid == pid, "it is another"
    finally:
        old.close()
    again = restart()
    assert (again.code, again.out) == (0, "")
    assert (
        again.err
        == f"snapshotd: daemon {lock_holder(state_dir)} ready on {state_dir}/snapshotd.sock in place of {pid}\n"
    )


LAST_MOMENTS = """
import os, signal, sys, time
from pathlib import Path
from snapshotd.daemon.lock import StateLock

lock = StateLock(Path(sys.argv[1]))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("up", flush=True)
signal.sigwait([signal.SIGTERM])
lock.release()
time.sleep(0.5)
os.write(1, b"gone")
os._exit(0)
"""


def test_it_has_stopped_when_its_process_is_gone(tmp_path: Path) -> None:
    """And with it its mounts, which keep a disk busy: its last moments come after it let go of the state directory."""
    with subprocess.Popen([sys.executable, "-c", LAST_MOMENTS, str(tmp_path)], stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == b"up\n"
        assert main(["--state-dir", str(tmp_path), "daemon", "--stop"]) == 0
        os.set_blocking(daemon.stdout.fileno(), False)
        assert daemon.stdout.read() == b"gone"


def test_one_is_started_where_none_runs(state_dir: Path, restart: Cli) -> None:
    done = restart()
    assert (done.code, done.out) == (0, "")
    assert done.err == f"snapshotd: daemon {lock_holder(state_dir)} ready on {state_dir}/snapshotd.sock\n"
    assert restart("--json").json["stopped"] is not None


def test_what_keeps_the_new_one_from_starting(state_dir: Path, restart: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    assert restart().code == 0
    monkeypatch.setenv("SMALL_FAILURE", "no init for sandboxes: catatonit is not installed; run `snapshotd setup`")
    done = restart()
    assert done.code == 7
    assert done.err == "snapshotd: no init for sandboxes: catatonit is not installed; run `snapshotd setup`\n"
    assert lock_holder(state_dir) is None


@pytest.mark.parametrize("how", ["--restart", "--stop"])
def test_a_process_that_only_has_the_daemons_number_is_let_alone(
    state_dir: Path, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The lock lies in a folder that a container shares, and the number in it is one of the container's."""
    state_dir.mkdir(mode=0o700)
    with subprocess.Popen(["sleep", "1000"]) as other, lock_path_of(state_dir).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.write(f"{other.pid}\n")
            lock.flush()
            assert main(["daemon", how]) == 9
            assert f"process {other.pid} here is another" in capfd.readouterr().err
            assert other.poll() is None
        finally:
            other.kill()


@pytest.mark.parametrize("other", ["--stop", "--status", "--rebuild-catalog"])
def test_it_goes_with_no_other_verb(state_dir: Path, restart: Cli, other: str) -> None:
    done = restart(other)
    assert done.code == 2
    assert "exclude each other" in done.err
    assert not state_dir.exists()
