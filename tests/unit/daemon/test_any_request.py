"""Nothing that a client can send makes the server fail or hang: every operation, over a fake engine."""

from __future__ import annotations

import pytest

from snapshotd.types import new_id
from tests import long
from tests.any_request import Operation, ask_anything, operations
from tests.unit.daemon.process import Daemon
from tests.unit.daemon.process import start_fake as start_daemon  # noqa: F401 - see conftest.py

WITHOUT = {"/shutdown": "it does end the daemon"}


@pytest.mark.parametrize("operation", operations(WITHOUT), ids=" ".join)
def test_no_request_makes_the_server_fail(operation: Operation, shared_daemon: Daemon) -> None:
    client, name = shared_daemon.client, f"box-{new_id()[:8]}"
    client.create(name=name)
    command = client.exec_in_background(name, ["cat"], stdin=True)
    snapshot = client.snapshot(name)
    client.tag(snapshot.id, name)
    known = {"ref": name, "name": name, "command": command.id, "which": "stdout", "port": "8000"}
    ask_anything(shared_daemon.socket_path, operation, known, long.size(3, 100))
    assert client.version().pid == shared_daemon.process.pid
