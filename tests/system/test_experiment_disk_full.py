"""An experiment on a full disk waits, and goes on when there is room: no branch has ended for that."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from tests.capabilities import require
from tests.leftovers import nothing_left
from tests.loop_disk import filled, loop_disk
from tests.storage_rig import Daemon, in_own_mount_namespace, wait_until

pytestmark = [pytest.mark.runc, pytest.mark.usefixtures("nobody_adopts_orphans")]


SCRIPT = "trap 'exit 0' USR1; : snapshotd-test-waits; while :; do sleep 0.1; done"
DESCRIPTION = f"""
name = "way"
from = "base"
program = ["sh", "-c", "{SCRIPT}"]
n = 2
parallel = 1
[score]
command = ["true"]
"""


def waiting() -> list[int]:
    """The programs that run now."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (directory / "cmdline").read_bytes() == b"\0".join((b"sh", b"-c", SCRIPT.encode(), b"")):
                found.append(int(directory.name))
    return found


def let_end() -> None:
    for pid in waiting():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)


@in_own_mount_namespace
def test_an_experiment_goes_on_when_there_is_room(small_root: Path, tmp_path: Path) -> None:
    """The first branch ends on the full disk; the last step, the score, or the next branch has no room there."""
    require("xfs")
    described = tmp_path / "way.toml"
    described.write_text(DESCRIPTION)
    with loop_disk("xfs", 400 << 20) as disk:
        daemon = Daemon(disk.mount_point / "state")
        try:
            with daemon.explained():
                client = daemon.start()
                client.import_image(str(small_root), name="small")
                client.create(image="small", runtime="runc", name="base")
                client.create_experiment(described)
                wait_until(
                    lambda: waiting() != [] and client.experiment("way").branches[0].trajectory is not None,
                    "the first branch runs",
                )
                with filled(disk, 0):
                    let_end()
                    wait_until(
                        lambda: any("waits for room" in (one.error or "") for one in client.experiment("way").branches),
                        "a branch waits for room",
                    )
                    assert client.experiment("way").ended is None
                    assert "failed" not in [one.state for one in client.experiment("way").branches]

                def has_ended() -> bool:
                    let_end()
                    return client.experiment("way").settled

                wait_until(has_ended, "the experiment has ended")
                found = client.experiment("way")
                assert [(one.state, one.passed, one.error) for one in found.branches] == [("scored", True, None)] * 2
                daemon.stop()
        finally:
            daemon.end()
        nothing_left(daemon.state_dir, running=False)
