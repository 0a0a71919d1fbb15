"""A small daemon (tests/small_daemon.py), as a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from snapshotd.client import Sandbox, autostart
from snapshotd.client.client import Snapshotd
from snapshotd.types import new_id
from tests import forked

SMALL_DAEMON = Path(__file__).parents[2] / "small_daemon.py"


def start_small_ones(monkeypatch: pytest.MonkeyPatch, *, forked_ones: bool = True) -> None:
    """From now on commands start small daemons (tests/small_daemon.py), as root would its own. `forked_ones=False`: in the
    client's own way, with an interpreter of their own."""

    def argv(state_dir: Path, socket_path: Path, ready_fd: int, _isolation: str | None) -> list[str]:
        return [sys.executable, str(SMALL_DAEMON), str(state_dir), str(socket_path), str(ready_fd)]

    def spawn(state_dir: Path, socket_path: Path, ready_fd: int, isolation: str | None) -> Any:
        if not forked.can_be_forked(os.environ):
            return ordinary(state_dir, socket_path, ready_fd, isolation)
        args = [str(state_dir), str(socket_path), str(ready_fd)]
        with autostart._open_log(state_dir) as log, open(os.devnull, "rb") as nothing:
            fds = {0: nothing.fileno(), 1: log.fileno(), 2: log.fileno(), ready_fd: ready_fd}
            return forked.start(args, fds, env=os.environ, cwd="/", module=forked.SMALL_DAEMON, new_session=True)

    ordinary = autostart._spawn
    if forked_ones:
        monkeypatch.setattr(autostart, "_spawn", spawn)
    monkeypatch.setattr(autostart, "daemon_argv", argv)
    monkeypatch.setattr(os, "geteuid", lambda: 0)


@dataclass(eq=False)
class Daemon:
    """A daemon process. `client` starts none when it is gone."""

    state_dir: Path
    socket_path: Path
    process: forked.Process

    @property
    def client(self) -> Snapshotd:
        return Snapshotd(self.state_dir, self.socket_path, autostart=False)

    def kill(self) -> None:
        """As `kill -9` does; then end what is left to the next daemon."""
        self.process.kill()
        self.process.wait(60)
        for pid in processes_below(self.socket_path.parent / "run"):
            os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        if self.process.poll() is None and self.terminate():
            raise AssertionError(f"the daemon ended badly: {self.log()}")
        assert self.process.stderr is not None
        self.process.stderr.close()

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def log(self) -> str:
        return (self.state_dir / "daemon.log").read_text()


def processes_below(directory: Path) -> list[int]:
    """Those that name something below a directory in their command lines."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.fsencode(f"{directory}/") in Path("/proc", name, "cmdline").read_bytes():
                found.append(int(name))
    return found


def start_with_ports(state_dir: Path, socket_path: Path) -> Daemon:
    """Sandboxes have the ports of this machine."""
    return start(state_dir, socket_path, SMALL_PORTS="1")


def start(state_dir: Path, socket_path: Path, module: str = forked.SMALL_DAEMON, **environment: str) -> Daemon:
    """Start one and wait until it answers; AssertionError with what it said if it dies.

    Its own end of the ready pipe closes when it dies, so nothing can hang.
    """
    ready_r, ready_w = os.pipe()
    error_r, error_w = os.pipe()
    args, fds = [str(state_dir), str(socket_path), str(ready_w)], {2: error_w, ready_w: ready_w}
    process = forked.start(args, fds, env={**os.environ, **environment}, cwd=os.getcwd(), module=module)
    process.stderr = os.fdopen(error_r, "rb")
    os.close(error_w)
    os.close(ready_w)
    with os.fdopen(ready_r, "rb") as ready:
        line = ready.readline()
    if not line.startswith(b'{"ready"'):
        assert process.stderr is not None
        with process.stderr as stderr:
            error = stderr.read().decode()
        process.wait(60)
        raise AssertionError(f"the daemon did not start: {error}")
    return Daemon(state_dir, socket_path, process)


def damage(daemon: Daemon) -> None:
    """Change a byte in the middle of every pack."""
    damage_packs(daemon.state_dir / "repo/store/packs")


def damage_packs(folder: Path) -> None:
    """Change a byte in the middle of every one there."""
    packs = [path for path in folder.rglob("*") if path.is_file()]
    assert packs
    for pack in packs:
        with pack.open("r+b") as file:
            file.seek(pack.stat().st_size // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 0xFF]))


def environment(daemon: Daemon) -> dict[str, str]:
    """What commands in processes of their own find this daemon by."""
    return {**os.environ, "SNAPSHOTD_STATE_DIR": str(daemon.state_dir), "SNAPSHOTD_SOCKET": str(daemon.socket_path)}


@pytest.fixture
def client(shared_daemon: Daemon) -> Snapshotd:
    return shared_daemon.client


@pytest.fixture
def box(client: Snapshotd, workspace: Path) -> Sandbox:
    return Sandbox.create(name=f"box-{new_id()[:8]}", workspace=workspace, client=client)
