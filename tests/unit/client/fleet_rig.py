"""Daemons over plain folders that other machines reach, as the nodes of a fleet."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from snapshotd.client import Fleet, Sandbox
from snapshotd.client.remote.logins import Login, save_login
from tests.unit.daemon.process import Daemon, start

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs" / "examples" / "fleet" / "attempts.py"
OURS = "FLEET = None  # this machine\n"
"""The line of the example that changes."""
SAID = [
    "[0, 2, 3, 6, 10, 18, 32, 40, 40, 40, 40, 40, 40, 40, 40, 40]",
    "write root(n), the integer square root of n",
    "7",
]


class Nodes:
    """Daemons that are known by one token each, as logins of the user."""

    def __init__(self) -> None:
        self.daemons: dict[str, Daemon] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="sf-", dir="/tmp"))  # paths of sockets are short

    def start(self, count: int) -> list[str]:
        """Addresses of so many more, and of those before."""
        for number in range(len(self.daemons), len(self.daemons) + count):
            place = self._folder / str(number)
            place.mkdir()
            daemon = start(place / "state", place / "s.sock", SMALL_LISTEN="127.0.0.1:0")
            told = daemon.client.status()
            token = daemon.client.create_token("fleet", scopes=["admin"]).token
            save_login(told["listening"], Login(token, told["fingerprint"]))
            self.daemons[told["listening"]] = daemon
        return list(self.daemons)

    def statuses(self, address: str) -> dict[str, str]:
        """Of the node's trajectories."""
        return {one.id: one.status for one in self.daemons[address].client.trajectories()}

    def close(self) -> None:
        for daemon in self.daemons.values():
            daemon.close()
        shutil.rmtree(self._folder)


def task_on(fleet: Fleet, address: str) -> Sandbox:
    """A sandbox on this node, with a file."""
    sandbox = Sandbox.create(client=fleet.client(address))
    sandbox.files.write("task", "a task\n")
    return sandbox


def example(folder: Path, line: str) -> list[str]:
    """The command that runs the example, with another line in the place of `OURS`."""
    text = EXAMPLE.read_text()
    assert text.count(OURS) == 1
    script = folder / "attempts.py"
    script.write_text(text.replace(OURS, line))
    return [sys.executable, str(script)]


def environment(**more: str) -> Mapping[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}
