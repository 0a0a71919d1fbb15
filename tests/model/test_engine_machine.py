"""Random walks of the whole engine (real runc sandboxes, real kernel, kills) against an oracle; see engine_machine.py.

tests/long.py says how to run longer walks, or one seed again; `pytest -s` shows every 250 steps what was done.
"""

from __future__ import annotations

import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.client import Policy, Snapshotd
from snapshotd.kernel import syscalls
from tests import long, way
from tests.e2e.support import Snap, wait_until
from tests.leftovers import nothing_left
from tests.model.engine_machine import SLOW_S, Machine
from tests.model.engine_manner import FOLDER

STEPS = long.size(30, 1000)
SEEDS = long.seeds(1, 2)


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="snapshotd-machine-", dir="/var/tmp"))
    yield path
    subprocess.run(way.owning("rm", "-r", path), check=True)


@pytest.fixture
def no_hangs() -> Iterator[None]:
    """A request that is never answered fails."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(2 * SLOW_S)
    yield
    socket.setdefaulttimeout(before)


@pytest.fixture
def snap(small_root: Path, folder: Path, no_hangs: None) -> Iterator[Snap]:
    syscalls.prctl(
        syscalls.PR_SET_CHILD_SUBREAPER, 0
    )  # what a killed daemon leaves is adopted by the first process, as on a real machine
    snap = Snap(folder / "state", {"SNAPSHOTD_LAYER_BUDGET": "0"})
    try:
        snap("image", "import", small_root, "--name", "default")
        yield snap
    finally:
        snap.stop_daemon()
    nothing_left(snap.state_dir, running=False)


@pytest.mark.runc
@pytest.mark.timeout(120 + STEPS * 3)
@pytest.mark.parametrize(
    "runtime",
    [
        "runc",
        pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.long]),
        pytest.param(FOLDER, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_differs_from_the_oracle(
    request: pytest.FixtureRequest, seed: int, snap: Snap, folder: Path, runtime: str
) -> None:
    if runtime == "docker":
        snap.env["DOCKER_HOST"] = request.getfixturevalue("docker_engine")
    snap.stop_daemon()
    Machine(snap, seed, folder, runtime).run(STEPS)


@pytest.mark.runc
def test_prune_while_snapshots_are_stored(snap: Snap) -> None:
    """What is in the repository and not in the catalog yet is not collected, old contents that come back included."""
    client = Snapshotd(state_dir=snap.state_dir, autostart=False)
    line = client.create(runtime="runc")[0].id
    failures: list[BaseException] = []
    done = threading.Event()

    def prune() -> None:
        try:
            while not done.is_set():
                client.prune(Policy(keep_last=1), grace_s=0)
        except BaseException as exc:  # noqa: BLE001 - raised again below
            failures.append(exc)

    thread = threading.Thread(target=prune)
    thread.start()
    try:
        for number in range(long.size(40, 80)):
            assert client.exec(line, ["sh", "-c", f"echo {number % 3} > /workspace/f"]).exit_code == 0
            if number % 8 == 7:
                client.flush()
    finally:
        done.set()
        thread.join()
    assert not failures, failures
    client.flush()
    report = client.check(read_data=True)
    assert not report.damages, report


@pytest.mark.runc
def test_a_copy_builds_on_the_copy_before_although_that_is_stored(snap: Snap) -> None:
    """A process that lives makes captures copy; the last copy's layer stays as long as the next one takes from it."""
    client = Snapshotd(state_dir=snap.state_dir, autostart=False)
    line = client.create(runtime="runc")[0].id
    client.exec(line, ["sh", "-c", "setsid sleep 100000 >/dev/null 2>&1 </dev/null & echo kept > /workspace/kept"])
    for number in range(4):
        taken = client.exec(line, ["sh", "-c", f"echo {number} > /workspace/f"], wait="stored").snapshot
        assert taken is not None
        assert taken.method == way.COPY
        assert b"".join(client.cat(taken.id, "/workspace/kept")) == b"kept\n"
        wait_until(lambda: client.usage().layer_bytes < 100_000, "layers were evicted")


@pytest.mark.runc
def test_a_snapshot_over_a_lazy_layer_can_be_read_before_it_is_stored(snap: Snap) -> None:
    client = Snapshotd(state_dir=snap.state_dir, autostart=False)
    line = client.create(runtime="runc")[0].id
    for number in range(5):
        client.exec(
            line, ["sh", "-c", f"echo {number} > /workspace/f; seq 200000 > /workspace/s{number}"], wait="stored"
        )
        client.stop(line)
        taken = client.exec(line, ["sh", "-c", "echo more >> /workspace/f"]).snapshot
        assert taken is not None
        assert b"".join(client.cat(taken.id, "/workspace/f")) == f"{number}\nmore\n".encode()
        assert [c.path for c in client.diff(taken.id)] == ["/workspace/f"]


@pytest.mark.runc
def test_what_was_removed_does_not_wait_to_be_stored(snap: Snap) -> None:
    client = Snapshotd(state_dir=snap.state_dir, autostart=False)
    line = client.create(runtime="runc")[0].id
    client.exec(line, ["sh", "-c", "echo 1 > /workspace/f"])
    client.remove(line, force=True)
    client.flush()
    usage = client.usage()
    assert (usage.unarchived, sum(usage.states.values())) == (0, 0), usage
