"""A daemon that is killed while it fills the index of texts: the next one catches up, and nothing is there twice."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from snapshotd import failpoints
from snapshotd.client.client import Snapshotd
from snapshotd.errors import SnapshotdError
from tests.unit.daemon.process import start


def step_until_it_dies(client: Snapshotd) -> int:
    """Returns the number of steps that were begun."""
    begun = 0
    try:
        client.create(name="box")
        while True:
            begun += 1
            client.exec("box", ["/bin/sh", "-c", f"echo word{begun}"])
            client.find(f"word{begun}")
    except SnapshotdError:
        return begun


@pytest.mark.parametrize("failpoint", ["engine.find.read", "engine.find.added"])
@pytest.mark.parametrize("time", [1, 3])
def test_a_kill_loses_no_text(failpoint: str, time: int) -> None:
    with tempfile.TemporaryDirectory(prefix="find-") as folder:
        state_dir, socket_path = Path(folder) / "state", Path(folder) / "s.sock"
        armed = start(state_dir, socket_path, SNAPSHOTD_FAILPOINT=f"{failpoint}:{time}")
        begun = step_until_it_dies(armed.client)
        assert armed.process.wait(60) == failpoints.EXIT_CODE
        armed.kill()
        assert armed.process.stderr is not None
        armed.process.stderr.close()
        daemon = start(state_dir, socket_path)
        try:
            taken = [one.seq for one in daemon.client.log("box") if one.tool.name == "exec"]
            assert len(taken) >= begun - 1
            for number in range(1, len(taken) + 1):
                found = daemon.client.find(f"word{number}")
                assert sorted(hit.kind for hit in found.hits) == ["argument", "output"]
                assert found.waiting == 0
            daemon.client.stop("box")
            daemon.client.remove("box")
            assert daemon.client.find("word1").hits == ()
        finally:
            daemon.kill()
            assert daemon.process.stderr is not None
            daemon.process.stderr.close()
