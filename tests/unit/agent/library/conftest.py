"""The library against a fake daemon that follows docs/agent-protocol.md."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from library_rig import PYTHON, Shell, environment, pythons

from tests.agent_daemon import FakeDaemon


@pytest.fixture
def daemon() -> FakeDaemon:
    return FakeDaemon()


@pytest.fixture
def recorder(daemon: FakeDaemon) -> FakeDaemon:
    return daemon


@pytest.fixture
def server(daemon: FakeDaemon, socket_path: Path) -> Iterator[FakeDaemon]:
    before = threading.active_count()
    with daemon.serving(socket_path):
        yield daemon
    assert threading.active_count() <= before, threading.enumerate()


@pytest.fixture
def shell(library: Path, socket_path: Path, tmp_path: Path) -> Iterator[Shell]:
    """Run a shell script that has `snapshotd-agent` on its PATH, and nothing of ours on PYTHONPATH. Fails when holders
    are left."""
    bins = tmp_path / "bin"
    bins.mkdir()
    (bins / "python3").symlink_to(PYTHON)
    (bins / "json.py").write_text("raise SystemExit('imported from the working directory')")
    command = library / "snapshotd" / "agent" / "bin"

    def run(script: str, *, check: bool = True, text: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        env = {
            "PATH": f"{command}:{bins}:{os.environ['PATH']}",
            "SNAPSHOTD_AGENT_SOCKET": str(socket_path),
            **environment,
        }
        done = subprocess.run(
            ["sh", "-c", "set -e\n" + script],
            env=env,
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="backslashreplace",
            timeout=60,
            cwd=bins,
            check=False,
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    yield run
    deadline = time.monotonic() + 30
    while left := [
        process for process in Path("/proc").glob("[0-9]*") if str(socket_path).encode() in environment(process)
    ]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


PYTHONS = pythons()


@pytest.fixture(
    params=[
        pytest.param(path, marks=() if path in (PYTHONS[0], PYTHONS[-1], Path(sys.executable)) else pytest.mark.long)
        for path in PYTHONS
    ],
    ids=lambda path: path.parts[-3] if "versions" in path.parts else "this",
)
def python(request: pytest.FixtureRequest) -> Path:
    """Every version, in the short set the oldest, the newest, and the one that runs this."""
    return Path(request.param)
