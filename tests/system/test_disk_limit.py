"""A sandbox takes no more of the disk than its limit says, in bytes and in files, and the others and the daemon go on.

Where the file system of the layers has project quotas, a program is told that no space is left; else the daemon ends it
(docs/limits.md).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from snapshotd.client.client import Snapshotd
from snapshotd.layers.store import READY_LAYERS
from tests import long
from tests.capabilities import require
from tests.leftovers import nothing_left
from tests.storage_rig import Daemon, wait_until

pytestmark = pytest.mark.runc

LIMIT_BYTES = 64 << 20
WRITE_ON = "n=0; while head -c 4000000 /dev/zero > /root/f$n; do n=$((n+1)); done; exit 3"
MAKE_FILES = "perl -e 'for (;;) { open(F, \">/root/e\" . $n++) or exit 3 }'"


@pytest.fixture(scope="module")
def daemon(small_root: Path) -> Iterator[Daemon]:
    require("xfs")
    with tempfile.TemporaryDirectory(prefix="snapshotd-limit-", dir="/var/tmp") as directory:
        daemon = Daemon(Path(directory) / "state")
        try:
            daemon.start().import_image(str(small_root), name="small")
            yield daemon
            daemon.stop()
        finally:
            with suppress(AssertionError):
                daemon.end()
        nothing_left(daemon.state_dir, running=False)


def taken_bytes(daemon: Daemon) -> int:
    """Without the ballast, which grows when others fill the disk that the image of the layers lies on."""
    st, ballast = os.statvfs(daemon.root / "layers"), daemon.root / "layers" / ".ballast"
    held = ballast.stat().st_blocks * 512 if ballast.exists() else 0
    return (st.f_blocks - st.f_bfree) * st.f_frsize - held


def wait_until_free(daemon: Daemon, before: int) -> None:
    """Until what a removed sandbox took, or reserved, is free again."""
    wait_until(lambda: taken_bytes(daemon) < before + (16 << 20), "what it took is free again")


def limited(client: Snapshotd, disk: int = LIMIT_BYTES) -> str:
    trajectory = client.create(image="small", runtime="runc", disk=disk)[0]
    assert trajectory.limits.disk_bytes == disk
    return trajectory.id


@pytest.mark.parametrize(
    ("script", "disk"),
    [(WRITE_ON, LIMIT_BYTES), (MAKE_FILES, long.size(20 << 20, LIMIT_BYTES))],
    ids=["bytes", "files"],
)
def test_a_sandbox_at_its_limit_is_stopped_and_the_rest_goes_on(daemon: Daemon, script: str, disk: int) -> None:
    client = daemon.client
    before = taken_bytes(daemon)
    other, greedy = client.create(image="small", runtime="runc")[0].id, limited(client, disk)
    said: list[bytes] = []
    done = client.exec(greedy, ["sh", "-c", script], on_output=lambda stream, data: said.append(data))
    assert done.exit_code == 3 or (done.exit_code == 137 and b"disk limit" in b"".join(said)), (done, said)
    assert done.snapshot is not None
    assert taken_bytes(daemon) < before + 4096 * (1 << 20), "it was stopped late"
    assert client.exec(other, ["sh", "-c", "echo $$ > /root/mine"]).exit_code == 0
    emptied = client.exec(greedy, ["sh", "-c", "rm -rf /root/*"])
    assert emptied.exit_code == 0, emptied
    for trajectory in (greedy, other):
        client.remove(trajectory, force=True)
    wait_until_free(daemon, before)


def test_steps_count_together(daemon: Daemon) -> None:
    """Each fits; all of them do not. Nor in a throw-away fork."""
    client = daemon.client
    greedy = limited(client)
    for n in range(2):
        assert (
            client.exec(greedy, ["sh", "-c", f"head -c 30000000 /dev/urandom > /root/f{n}"], wait="stored").exit_code
            == 0
        )
    too_much = ["sh", "-c", "head -c 30000000 /dev/urandom > /root/f && sleep 60"]
    assert client.exec_snapshot(client.log(greedy)[-1].id, too_much).exit_code != 0
    assert client.exec(greedy, too_much).exit_code != 0
    client.remove(greedy, force=True)


@pytest.mark.long  # a sandbox at its limit is stopped, in this file
def test_a_file_that_a_failed_reservation_left_is_counted(daemon: Daemon) -> None:
    """XFS keeps what it could reserve beyond the end of the file, which has no size then."""
    client = daemon.client
    before = taken_bytes(daemon)
    greedy = limited(client)
    script = "perl -e 'open F, \">/root/x\"; syscall(285, fileno F, 0, 0, 3 << 30); sleep 30; exit 3'"
    assert client.exec(greedy, ["sh", "-c", script]).exit_code in (3, 137)
    client.remove(greedy, force=True)
    wait_until_free(daemon, before)


def test_a_removed_trajectory_leaves_no_layer_behind(daemon: Daemon) -> None:
    """Neither those that were merged in the background, nor one that was being read when it was removed."""
    client = daemon.client
    box = client.create(image="small", runtime="runc")[0].id
    for n in range(10):
        client.exec(box, ["sh", "-c", f"head -c 100000 /dev/urandom > /root/f{n}"])
    client.flush()
    client.exec(box, ["sh", "-c", "head -c 60000000 /dev/urandom > /root/big"])
    client.remove(box, force=True)  # the last step is being counted and stored
    wait_until(
        lambda: sum(not name.startswith(".") for name in os.listdir(daemon.root / "layers")) <= 1 + READY_LAYERS,
        "only images and the layers made ahead are there",
    )
