"""A daemon over the fake engine, as a process of its own."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from snapshotd.client import autostart
from snapshotd.client.client import Snapshotd
from tests import forked

FAKE_DAEMON = Path(__file__).with_name("fake_daemon.py")


def start_fakes(monkeypatch: pytest.MonkeyPatch, *, forked_ones: bool = True) -> None:
    """From now on commands start daemons over the fake engine, as root would real ones. `forked_ones=False`: in the
    client's own way, with an interpreter of their own."""

    def argv(state_dir: Path, socket_path: Path, ready_fd: int, _isolation: str | None) -> list[str]:
        return [sys.executable, str(FAKE_DAEMON), str(state_dir), str(socket_path), str(ready_fd)]

    def spawn(state_dir: Path, socket_path: Path, ready_fd: int, isolation: str | None) -> Any:
        if not forked.can_be_forked(os.environ):
            return ordinary(state_dir, socket_path, ready_fd, isolation)
        args = [str(state_dir), str(socket_path), str(ready_fd)]
        with autostart._open_log(state_dir) as log, open(os.devnull, "rb") as nothing:
            fds = {0: nothing.fileno(), 1: log.fileno(), 2: log.fileno(), ready_fd: ready_fd}
            return forked.start(args, fds, env=os.environ, cwd="/", module=forked.FAKE_DAEMON, new_session=True)

    ordinary = autostart._spawn
    if forked_ones:
        monkeypatch.setattr(autostart, "_spawn", spawn)
    monkeypatch.setattr(autostart, "daemon_argv", argv)
    monkeypatch.setattr(os, "geteuid", lambda: 0)


@dataclass
class Daemon:
    """A daemon process. `client` starts none when it is gone."""

    state_dir: Path
    socket_path: Path
    process: forked.Process

    @property
    def client(self) -> Snapshotd:
        return Snapshotd(self.state_dir, self.socket_path, autostart=False)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)

    def close(self) -> None:
        self.kill()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def start(state_dir: Path, socket_path: Path, **environment: str) -> Daemon:
    """Start one and wait until it answers; AssertionError with what it said if it dies.

    Its own end of the ready pipe closes when it dies, so nothing can hang.
    """
    ready_r, ready_w = os.pipe()
    error_r, error_w = os.pipe()
    args, fds = [str(state_dir), str(socket_path), str(ready_w)], {2: error_w, ready_w: ready_w}
    process = forked.start(args, fds, env={**os.environ, **environment}, cwd=os.getcwd(), module=forked.FAKE_DAEMON)
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


def environment(daemon: Daemon) -> dict[str, str]:
    """What commands in processes of their own find this daemon by."""
    return {**os.environ, "SNAPSHOTD_STATE_DIR": str(daemon.state_dir), "SNAPSHOTD_SOCKET": str(daemon.socket_path)}
