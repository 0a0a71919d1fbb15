"""A process that makes a user namespace, or a sandbox, and waits for the daemon ends with it, whenever that is killed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from snapshotd.kernel.holding import cgroup
from snapshotd.types import new_id
from tests.capabilities import require

_KILLED_WHILE_IT_WAITS = r"""
import os, signal
from snapshotd.kernel.holding import cgroup
from snapshotd.kernel.namespaces import user_namespace
from snapshotd.runtime.starter import Starter
from snapshotd.types import IdMap
read = os.read
def die(fd, count):
    data = read(fd, count)
    if any(word in data for word in (b"\0", b"ready", b"unmapped")):  # the helper waits
        os.kill(os.getpid(), signal.SIGKILL)
    return data
os.read = die
ORDER = {{"config": {{"process": {{"oomScoreAdj": 0, "rlimits": []}}}}, "owner": 1_800_000_000, "filters": []}}
GROUP, SETTINGS = cgroup.at("{group}"), cgroup.GroupSettings([(cgroup._layout()[1], [], [])], [])
{make}
"""


@pytest.mark.parametrize(
    "make",
    [
        "user_namespace(IdMap(1_700_000_000, 65_536))",
        "Starter().user_namespace('a-container', IdMap(1_700_000_000, 65_536), 1_800_000_000)",
        "Starter().make('a-container', ORDER, GROUP, SETTINGS, IdMap(1_700_000_000, 65_536))",
    ],
)
def test_nothing_outlives_a_killed_parent(make: str) -> None:
    """What outlived it would hold its descriptors: the standard output here, the connections of all clients in a
    daemon."""
    require("root")
    shared = f"/snapshotd-test-{new_id()[:8]}"
    program = _KILLED_WHILE_IT_WAITS.format(make=make, group=f"{shared}/one")
    try:
        killed = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
        assert killed.returncode == -9, killed.stderr
    finally:
        cgroup.at(shared).remove()
