"""A port of a sandbox is never one of another network, even if the sandbox ends in the middle."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.engine.runs import ports
from snapshotd.errors import Conflict
from tests.capabilities import require


class Box:
    """A sandbox whose first process has the id of this one, in the machine's network. `lives`: how often its cgroup
    still holds that process when it is looked at."""

    def __init__(self, lives: int, closes: bool = False) -> None:
        self.trajectory: Any = SimpleNamespace(id="t" * 32, name="box", shown_name="box")
        self.container = SimpleNamespace(pid=os.getpid())
        self.isolated = True
        self.cgroup = self
        self.connections: dict[socket.socket, object] = {}
        self.closed = False
        self._lives, self._closes = lives, closes

    def members(self) -> list[int]:
        self._lives -= 1
        self.closed = self._closes and self._lives == 0
        return [self.container.pid] if self._lives >= 0 else []

    def connect(self, port: int) -> Any:
        sandbox: Any = self
        return ports.connect(sandbox, self.trajectory, port, lambda: None)


@pytest.fixture
def server() -> Iterator[socket.socket]:
    require("root")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.mark.parametrize("lives", [0, 1])
def test_a_process_id_that_is_no_longer_the_sandboxes_is_not_followed(server: socket.socket, lives: int) -> None:
    with pytest.raises(Conflict, match="is not running"):
        Box(lives).connect(server.getsockname()[1])
    assert select.select([server], [], [], 0)[0] == [], "somebody has connected"


def test_a_sandbox_that_ends_while_one_connects_has_no_connection(server: socket.socket) -> None:
    box = Box(2, closes=True)
    with pytest.raises(Conflict, match="is not running"):
        box.connect(server.getsockname()[1])
    assert box.connections == {}
    end, _ = server.accept()
    with end:
        assert end.recv(1) == b""


def test_a_connection_is_known_until_it_is_closed(server: socket.socket) -> None:
    box = Box(2)
    connection = box.connect(server.getsockname()[1])
    assert list(box.connections) == [connection.socket]
    connection.close()
    assert box.connections == {}


def test_a_connection_with_itself_is_none(server: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes any free port for our end, also the one that we connect to."""
    number = server.getsockname()[1]
    server.close()

    class Unlucky(socket.socket):
        def connect(self, address: Any) -> None:
            self.bind(address)
            super().connect(address)

    monkeypatch.setattr(socket, "socket", Unlucky)
    with pytest.raises(Conflict, match="nothing listens"):
        Box(2).connect(number)
