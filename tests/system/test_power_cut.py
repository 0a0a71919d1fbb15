"""The power goes at a random moment, on XFS and on ext4: what was reported stored is there, whole; nothing else is half
there.

A shutdown of the file system under a loop mount drops everything that was not flushed (research into how real file
systems lose data says what that can and cannot show: it tears no block). SNAPSHOTD_SEED=N begins with that round.
"""

from __future__ import annotations

import contextlib
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from snapshotd.client.results import Policy
from snapshotd.errors import SnapshotdError
from tests import long
from tests.capabilities import require
from tests.leftovers import instance_of, nothing_left
from tests.loop_disk import Disk, loop_disk
from tests.storage_rig import Daemon, Line, World, another_boot, clean, in_own_mount_namespace, kill_containers

pytestmark = [pytest.mark.runc, pytest.mark.usefixtures("nobody_adopts_orphans")]

ROUNDS = long.size(1, 30)
SEED = long.SEED
MAX_LINES = 4


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["ext4", pytest.param("xfs", marks=pytest.mark.long)])
@in_own_mount_namespace
def test_what_was_stored_survives_every_power_cut(kind: str, small_root: Path) -> None:
    require("xfs")
    with loop_disk(kind, 4 << 30) as disk:
        daemon = Daemon(disk.mount_point / "state")
        try:
            _rounds(disk, daemon, small_root)
        finally:
            daemon.end()


def _rounds(disk: Disk, daemon: Daemon, small_root: Path) -> None:
    world = World(daemon.start(), disk.scratch, SEED)
    daemon.client.import_image(str(small_root), name="small")
    lines = [world.create(), world.create()]
    with daemon.explained():
        for number in range(ROUNDS):
            rng = random.Random(SEED + number)
            try:
                _power_cut(disk, daemon, world, lines, rng)
                another_boot(daemon.state_dir)
                daemon.start(SNAPSHOTD_LAYER_BUDGET=rng.choice(("0", "")))
                _verify(world)
                lines = _go_on(world, rng)
                clean(daemon)
            except BaseException as exc:
                exc.add_note(f"round {number}, SNAPSHOTD_SEED={SEED + number}")
                raise
        daemon.stop()
    nothing_left(daemon.state_dir, running=False)


def _power_cut(disk: Disk, daemon: Daemon, world: World, lines: list[Line], rng: random.Random) -> None:
    """Work until the power goes. Afterwards the disk is mounted again, and nothing of before runs."""
    instance = instance_of(daemon.state_dir)
    with ThreadPoolExecutor(1) as thread:
        worker = thread.submit(_work, world, lines, random.Random(rng.random()))
        time.sleep(rng.uniform(0.02, 1.5))  # the one random moment that this test is about
        disk.cut()
        time.sleep(rng.choice((0.0, 0.0, 0.1, 0.5)))  # a daemon that outlives its disk must not report anything stored
        daemon.kill()
        worker.result(60)
    kill_containers(instance)
    disk.unmount()
    disk.mount()


def _work(world: World, lines: list[Line], rng: random.Random) -> None:
    """Steps, some waited for, until the daemon is gone. What was reported is noted in `world`, which is not on the
    disk."""
    with contextlib.suppress(SnapshotdError, OSError):  # the power goes
        while True:
            what = rng.random()
            line = rng.choice(lines)
            if what < 0.75:
                world.step(line, wait=rng.random() < 0.3)
            elif what < 0.85 and world.stored:
                origin = rng.choice(sorted(world.stored))
                (fork,) = world.client.fork(origin).trajectories
                lines[rng.randrange(len(lines))] = Line(fork.id, world.expected[origin])
            elif what < 0.9:
                world.client.flush()
                world.note_stored()
            elif what < 0.95:
                world.prune_to(rng.randrange(1, 4))
            else:
                world.client.stop(line.id)


def _verify(world: World) -> None:
    found = {s.id: s for s in world.client.all_snapshots()}
    for snapshot in world.stored:
        assert snapshot in found, f"{snapshot} was reported stored and is gone"
        assert found[snapshot].state == "stored", f"{snapshot} was reported stored and is {found[snapshot].state}"
    assert all(s.state in ("stored", "lost", "pruned") for s in found.values()), (
        "what was only captured is lost or stored"
    )
    # A row that was not flushed may be gone with the snapshot; but never one in the middle of a line.
    world.forget_snapshots(world.expected.keys() - found.keys())
    for one in found.values():
        if one.state == "stored":
            world.verify_outcome(one)
            world.stored.add(one.id)
        elif one.id in world.expected or one.state == "lost":
            world.forget_snapshots({one.id})
            assert one.parent is None or one.parent in found
    world.begun_is_over()


def _go_on(world: World, rng: random.Random) -> list[Line]:
    """The system works: steps on forks of what is there, and on the trajectories whose last snapshot is; old ones are
    removed."""
    client = world.client
    heads = {t.id: t.head for t in client.trajectories()}
    usable = [Line(t, world.expected[head]) for t, head in heads.items() if head in world.stored]
    lines = rng.sample(usable, min(1, len(usable)))
    while len(lines) < 2:
        origin = rng.choice(sorted(world.stored)) if world.stored else None
        if origin is None:
            lines.append(world.create())
        else:
            (fork,) = client.fork(origin).trajectories
            lines.append(Line(fork.id, world.expected[origin]))
    for line in lines:
        world.step(line)
        world.step(line, wait=True)
    _shrink(world, {line.id for line in lines})
    assert client.prune(Policy(), grace_s=0).freed_bytes >= 0
    return lines


def _shrink(world: World, keep: set[str]) -> None:
    """Remove the oldest trajectories that nothing was forked from, so that a round's time does not grow."""
    trajectories = sorted(world.client.trajectories(), key=lambda t: t.created_at)
    origins = {t.forked_from for t in trajectories}
    left = len(trajectories)
    for one in trajectories:
        own = {s.id for s in world.client.log(one.id)}
        if left > MAX_LINES and one.id not in keep and not origins & own:
            world.client.remove(one.id, force=True)
            world.forget_snapshots(own)
            left -= 1
