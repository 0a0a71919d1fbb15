"""Nothing that a client can send makes the real daemon fail or hang."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.client import Snapshotd
from tests import long
from tests.any_request import ON_THIS_MACHINE, Operation, ask_anything, operations
from tests.e2e.prepared import daemon_on
from tests.e2e.support import Snap

WITHOUT = {"/shutdown": "it does end the daemon", **dict.fromkeys(ON_THIS_MACHINE, "it touches this machine")}


@pytest.fixture(scope="module")
def snap(minimal_state: Path, tmp_path_factory: pytest.TempPathFactory, engine_env: dict[str, str]) -> Iterator[Snap]:
    """A daemon of its own: requests of this kind remove what they find."""
    with daemon_on(minimal_state, tmp_path_factory.mktemp("s") / "state", engine_env) as snap:
        yield snap


@pytest.mark.parametrize("operation", operations(WITHOUT), ids=" ".join)
def test_no_request_makes_the_daemon_fail(operation: Operation, snap: Snap) -> None:
    client = Snapshotd(snap.state_dir, autostart=False)
    pid = client.version().pid
    ask_anything(client.socket_path, operation, _known(client), long.size(2, 40))
    assert client.version().pid == pid


def _known(client: Snapshotd) -> dict[str, str]:
    """A sandbox with a command in the background. Requests may have ended the one that was there."""
    running = [one.trajectory.id for one in client.sandboxes() if client.commands(one.trajectory.id)]
    ref = running[0] if running else client.create()[0].id
    commands = client.commands(ref) or [client.exec_in_background(ref, ["cat"], stdin=True)]
    client.tag(ref, "known", move=True)
    return {"ref": ref, "name": "known", "command": commands[-1].id, "which": "stdout", "port": "8000"}
