"""The shipped unit under a real systemd, which is the first process of namespaces of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd import daemon
from snapshotd.types import new_id
from tests import built_images
from tests.capabilities import require
from tests.e2e.support import wait_until

UNIT = Path(daemon.__file__).with_name("snapshotd.service")
_BOOT = Path(__file__).parents[1] / "systemd_boot.sh"
_OWN = ("multi-user.target", "basic.target", "sysinit.target", "shutdown.target")
"""Units that every service depends on: empty ones, so that nothing else of this machine is started."""
PROGRAM = Path(sys.executable).with_name("snapshotd")


class Machine:
    """A machine whose first process is systemd."""

    def __init__(self, units: Path, state_dir: Path) -> None:
        self._cgroups = f"snapshotd-systemd-{new_id()[:8]}"
        self._units, self._env = units, {**os.environ, "SNAPSHOTD_STATE_DIR": str(state_dir)}
        with open(units / "console", "wb") as console:
            argv = [str(_BOOT), str(units), self._cgroups]
            self._boot = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=console, stderr=console)
        wait_until(self._answers, f"systemd answers: {(units / 'console').read_text()}")

    def run(self, *argv: str | Path, code: int = 0) -> str:
        """Run a program there; returns its output."""
        entered = ["nsenter", "-t", str(self._first()), "--mount", "--pid", "--cgroup", "--", *map(str, argv)]
        done = subprocess.run(entered, env=self._env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == code, (argv, done.returncode, done.stdout, done.stderr)
        return done.stdout

    def property(self, name: str) -> str:
        return self.run("systemctl", "show", "--value", "-p", name, "snapshotd").strip()

    def _first(self) -> int:
        """The first process, seen from here."""
        children = Path(f"/proc/{self._boot.pid}/task/{self._boot.pid}/children").read_text().split()
        return int(children[0])

    def _answers(self) -> bool:
        assert self._boot.poll() is None, (self._units / "console").read_text()
        with contextlib.suppress(IndexError, AssertionError, FileNotFoundError):
            self.run("systemctl", "show", "-p", "Version")
            return True
        return False

    def close(self) -> None:
        with contextlib.suppress(IndexError, ProcessLookupError):
            os.kill(self._first(), signal.SIGKILL)
        self._boot.kill()
        self._boot.wait()
        for line in (self._units / "cgroups").read_text().splitlines():
            for base, _, _ in os.walk(Path(line).parent, topdown=False):
                wait_until(lambda base=base: _removed(base), f"{base} is empty")  # type: ignore[misc]


def _removed(cgroup: str) -> bool:
    try:
        os.rmdir(cgroup)
    except FileNotFoundError:
        return True
    except OSError:  # EBUSY: its last process is not reaped yet
        return False
    return True


@pytest.fixture
def machine(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    require("root", "runc", "systemd")
    state_dir, units = tmp_path_factory.mktemp("s") / "state", tmp_path / "units"
    (units / "snapshotd.service.d").mkdir(parents=True)
    for name in _OWN:
        (units / name).write_text("[Unit]\nDefaultDependencies=no\n")
    shutil.copy(UNIT, units)
    (units / "snapshotd.service.d" / "here.conf").write_text(
        f"[Service]\nExecStart=\nExecStart={PROGRAM} daemon --foreground\nEnvironment=SNAPSHOTD_STATE_DIR={state_dir}\n"
    )
    running = Machine(units, state_dir)
    yield running
    running.close()


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    """And the line that the long test below puts in the place of `ExecStart` differs in the path only."""
    require("systemd")
    shutil.copy(UNIT, tmp_path)
    (unit := tmp_path / UNIT.name).write_text(UNIT.read_text().replace("/usr/local/bin/snapshotd", str(PROGRAM)))
    verified = subprocess.run(
        ["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60, check=False
    )
    assert (verified.returncode, [line for line in verified.stderr.splitlines() if UNIT.name in line]) == (0, [])
    (line,) = [line for line in UNIT.read_text().splitlines() if line.startswith("ExecStart=")]
    assert line == "ExecStart=/usr/local/bin/snapshotd daemon --foreground"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_it_is_ready_when_it_has_started_agents_outlive_the_daemon_and_a_stop_leaves_nothing(
    machine: Machine, run_folder: Path
) -> None:
    machine.run("systemctl", "start", "snapshotd")
    assert (machine.property("ActiveState"), machine.property("NRestarts")) == ("active", "0")
    assert machine.property("MainPID") in machine.run(PROGRAM, "daemon", "--status")
    machine.run(PROGRAM, "image", "import", built_images.minimal_archive(run_folder), "--name", "default")
    script = "n=0; while :; do n=$((n + 1)); echo $n > count; sleep 0.05; done"
    machine.run(PROGRAM, "run", "--detach", "--name", "agent", "--", "sh", "-c", script)

    def count() -> int:
        shown = machine.run(PROGRAM, "exec", "-q", "agent", "--", "sh", "-c", "cat count || echo 0").strip()
        return int(shown or 0)

    wait_until(lambda: count() > 0, "it counts")
    before, first = count(), machine.property("MainPID")
    machine.run("systemctl", "kill", "--kill-whom=main", "--signal=KILL", "snapshotd")
    wait_until(
        lambda: machine.property("NRestarts") == "1" and machine.property("ActiveState") == "active", "it is back"
    )
    assert machine.property("MainPID") != first
    assert count() > before, "it is the same agent: another one would begin again"
    assert "running" in machine.run(PROGRAM, "ps")
    machine.run("systemctl", "stop", "snapshotd")
    assert (machine.property("ActiveState"), machine.property("Result")) == ("inactive", "success")
    left = [line for line in machine.run("ps", "-eo", "pid=,ppid=,args=").splitlines() if "snapshotd" in line]
    assert left == []

    machine.run("systemctl", "start", "snapshotd")
    last = int(machine.run(PROGRAM, "cat", "agent:/workspace/count"))
    assert last > before, "it was stopped with a last snapshot"
    machine.run("systemctl", "stop", "snapshotd")
