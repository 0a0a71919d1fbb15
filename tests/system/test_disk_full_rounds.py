"""A small disk is filled by steps, the daemon is killed or restarted on it or not, there is space again: every snapshot
that was acknowledged has exactly the bytes that it was taken with, or is called lost."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from snapshotd.errors import DataLoss, OutOfSpace, Unsupported
from tests import long
from tests.capabilities import require
from tests.leftovers import nothing_left
from tests.loop_disk import Disk, loop_disk
from tests.storage_rig import Daemon, in_own_mount_namespace, wait_until

pytestmark = [pytest.mark.runc, pytest.mark.usefixtures("nobody_adopts_orphans")]

DISK_BYTES = 480 << 20
MAX_STEPS = 40
FREED_BYTES = 220 << 20
"""More than all layers can take, so that they can be stored beside themselves."""
ROUNDS = 40
_SUM = "print unpack(q(%64L*), do { local $/; <STDIN> })"
Content = dict[str, tuple[int, int]]
"""What is below /workspace: name to size and sum. Random words that were replaced by zeros, or cut off, have another
sum."""
SEEDS = range(long.SEED, long.SEED + ROUNDS) if long.LONG else range(1, 2)


def _content(root: Path) -> Content:
    found = {}
    for path in root.iterdir():
        words = array("I", path.read_bytes())
        found[path.name] = len(words) * 4, sum(words) % 2**64
    return found


class Round:
    """One daemon on one disk, with what was acknowledged."""

    def __init__(self, disk: Disk, small_root: Path, seed: int) -> None:
        self.disk, self.rng = disk, random.Random(seed)
        self.ballast = disk.mount_point / "ballast"
        with self.ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, FREED_BYTES)
        self.daemon = Daemon(disk.mount_point / "state")
        self.client = self.daemon.start()
        self.client.import_image(str(small_root), name="small")
        self.line = self.client.create(image="small", runtime="runc")[0].id
        self.content: Content = {}
        self.expected: dict[str, Content] = {}

    def step(self, megabytes: int) -> None:
        name = f"f{self.rng.randrange(12)}"
        words = megabytes * 250_000
        script = f"head -c {words * 4} /dev/urandom > new && mv new {name} && LC_ALL=C perl -e '{_SUM}' < {name}"
        said: list[bytes] = []
        done = self.client.exec(self.line, ["sh", "-c", script], on_output=lambda _, data: said.append(bytes(data)))
        if done.exit_code != 0:
            raise OutOfSpace("the command met the full disk by itself")
        self.content = {**self.content, name: (words * 4, int(b"".join(said)))}
        assert done.snapshot is not None
        self.expected[done.snapshot.id] = self.content

    def fill(self) -> None:
        """Steps until the disk is full, with now and then a wait until all is stored."""
        for _ in range(MAX_STEPS):
            try:
                self.step(self.rng.choice((1, 10, 25, 25)))
                if self.rng.random() < 0.15:
                    self.client.flush()
            except (OutOfSpace, DataLoss):
                return

    def free(self) -> None:
        self.ballast.unlink(missing_ok=True)

    def end(self) -> str:
        how = self.rng.choice(("kill", "kill", "restart", "neither"))
        if how == "kill":
            self.daemon.kill()
        elif how == "restart":
            self.daemon.stop()
        return how

    def start(self) -> None:
        """On the disk as it is. Snapshots that were stored can be read and removed, whatever became of the layers."""
        if self.daemon.process is None:
            self.daemon.start()
        states = {one.id: one.state for one in self.client.log(self.line)}
        stored = [snapshot for snapshot in self.expected if states[snapshot] == "stored"]
        if stored:
            assert self.restored(stored[-1]) == self.expected[stored[-1]]

    def settle(self) -> None:
        """With space again: what is not lost gets stored, after another start where that is what the daemon asks
        for."""
        with contextlib.suppress(DataLoss):
            try:
                wait_until(self.flushed, "what was captured is stored when there is space")
            except Unsupported:
                self.daemon.stop()
                self.daemon.start()
                wait_until(self.flushed, "what was captured is stored after another start")

    def flushed(self) -> bool:
        try:
            self.client.flush()
        except OutOfSpace:
            return False
        return True

    def restored(self, snapshot: str) -> Content:
        target = self.disk.scratch / "restored"
        shutil.rmtree(target, ignore_errors=True)
        self.client.restore(snapshot, target, path="/workspace")
        return _content(target)

    def verify(self) -> Counter[str]:
        """Every acknowledged snapshot is right, or is called lost and refuses to be read."""
        counts: Counter[str] = Counter()
        states = {one.id: one.state for one in self.client.log(self.line)}
        for snapshot, content in self.expected.items():
            state = states[snapshot]
            try:
                found = self.restored(snapshot)
            except DataLoss:
                state = {one.id: one.state for one in self.client.log(self.line)}[snapshot]
                assert state == "lost", (snapshot, state)
            except Unsupported:
                assert state == "captured", (snapshot, state)
                state = "kept for later"
            else:
                assert state != "lost"
                assert found == content, (
                    f"snapshot {snapshot}, which is {state}, has other bytes than it was taken with"
                )
            counts[state] += 1
        return counts


@pytest.mark.parametrize("kind", ["ext4", pytest.param("xfs", marks=pytest.mark.long)])
@pytest.mark.parametrize("seed", SEEDS)
@in_own_mount_namespace
def test_no_acknowledged_snapshot_has_other_bytes(
    seed: int, kind: str, small_root: Path, record_property: Callable[[str, object], None]
) -> None:
    require("xfs")
    with loop_disk(kind, DISK_BYTES) as disk:
        rig = Round(disk, small_root, seed)
        daemon = rig.daemon
        try:
            with daemon.explained():
                rig.fill()
                how = rig.end()
                early = rig.rng.random() < 0.5
                if early:
                    rig.start()
                    before = rig.verify()
                rig.free()
                rig.start()
                if not early:
                    before = rig.verify()
                rig.settle()
                after = rig.verify()
                report = rig.client.check(read_data=True)
                assert not report.damages, report
                assert after.keys() <= {"stored", "lost"}, after
                record_property("round", f"{how}{' early' if early else ''}: {dict(before)} then {dict(after)}")
                rig.client.remove(rig.line, force=True)
                rig.client.prune(grace_s=0)
                daemon.stop()
        finally:
            rig.free()
            daemon.end()
        nothing_left(daemon.state_dir, running=False)
