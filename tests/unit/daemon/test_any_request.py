"""Nothing that a client can send makes the server fail or hang: the operations that would touch this machine, and are therefore
left out where all others are (e2e/test_any_request.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from snapshotd.api.wire import API_PREFIX
from tests import long
from tests.any_request import ON_THIS_MACHINE, Operation, ask_anything, operations
from tests.unit.daemon.process import Daemon, start

LEFT = [one for one in operations({}) if one[1].removeprefix(API_PREFIX) in ON_THIS_MACHINE]


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Its engine refuses them, once it has a request that the API allows."""
    folder = tmp_path_factory.mktemp("s")
    daemon = start(folder / "state", folder / "s.sock", SMALL_REFUSING="1")
    yield daemon
    daemon.close()


@pytest.mark.parametrize("operation", LEFT, ids=" ".join)
def test_no_request_makes_the_server_fail(operation: Operation, refusing: Daemon) -> None:
    ask_anything(refusing.socket_path, operation, {}, long.size(10, 100))
    assert refusing.client.version().pid == refusing.process.pid
