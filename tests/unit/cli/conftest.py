"""The command line in this process, against a small daemon."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from snapshotd.cli.main import main
from snapshotd.engine.host import doctor
from snapshotd.types import new_id
from tests.unit.cli.world import World
from tests.unit.daemon.process import Daemon


@dataclass
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Ran]


@pytest.fixture(autouse=True)
def _never_a_real_daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_trials: None) -> None:
    """Whatever goes wrong in a test, it must not start the machine's daemon when it runs as root."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("SNAPSHOTD_STATE_DIR", str(tmp_path / "no-state"))
    monkeypatch.delenv("SNAPSHOTD_SOCKET", raising=False)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def cli(shared_daemon: Daemon, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`cli("ls", "--json")` runs one command line against the shared daemon."""
    monkeypatch.setenv("SNAPSHOTD_STATE_DIR", str(shared_daemon.state_dir))
    monkeypatch.setenv("SNAPSHOTD_SOCKET", str(shared_daemon.socket_path))

    def run(*args: str) -> Ran:
        capfdbinary.readouterr()
        code = main(list(args))
        captured = capfdbinary.readouterr()
        return Ran(code, captured.out.decode(errors="surrogateescape"), captured.err.decode())

    return run


@pytest.fixture
def box(cli: Cli, workspace: Path) -> str:
    """The name of a sandbox of the test's own."""
    name = f"box-{new_id()[:8]}"
    assert cli("create", "--name", name, "--workspace", str(workspace)).code == 0
    return name


@pytest.fixture
def edited(daemon: Daemon) -> Daemon:
    """With a snapshot `box` that has a state and two messages."""
    daemon.client.create(name="box")
    daemon.client.exec("box", ["remember", "tasks", '["a", "b"]'])
    for role in ("user", "assistant"):
        daemon.client.exec("box", ["snapshotd-agent", "message", role, "fix it"])
    return daemon


@pytest.fixture
def world(daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("SNAPSHOTD_STATE_DIR", str(daemon.state_dir))
    monkeypatch.setenv("SNAPSHOTD_SOCKET", str(daemon.socket_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)  # whose the folder is; the daemon is there
    monkeypatch.setattr(doctor, "setup", lambda _: [doctor.Check("git", ok=True, detail="installed")])
    return World(daemon, tmp_path)
