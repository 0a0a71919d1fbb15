"""kill -9 at every failpoint, and at random moments: after a restart nothing stored is lost, nothing is half there,
nothing leaks."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd import failpoints
from snapshotd.errors import InternalError, SnapshotdError
from snapshotd.kernel import processes
from snapshotd.types import NO_ISOLATION
from tests import long, way
from tests.leftovers import nothing_left
from tests.storage_rig import Daemon, Line, World, clean, wait_until

pytestmark = [pytest.mark.runc, pytest.mark.usefixtures("nobody_adopts_orphans")]

NO_LAYERS = {"SNAPSHOTD_LAYER_BUDGET": "0"}
ALL_LAYERS = {"SNAPSHOTD_LAYER_BUDGET": str(1 << 40)}


@pytest.fixture(scope="module")
def daemon(small_root: Path) -> Iterator[Daemon]:
    """A state directory with an image. Every test starts its daemon; all work on the one history."""
    directory = Path(tempfile.mkdtemp(prefix="snapshotd-kill-", dir="/var/tmp"))
    daemon = Daemon(directory / "state")
    try:
        daemon.start().import_image(str(small_root), name="small")
        yield daemon
        daemon.stop()
        nothing_left(daemon.state_dir, running=False)
    finally:
        daemon.end()
        subprocess.run(way.owning("rm", "-r", directory), check=True)


@pytest.fixture(scope="module")
def world(daemon: Daemon) -> World:
    return World(daemon.client, daemon.state_dir.parent / "scratch")


@pytest.fixture
def folder_world(world: World) -> Iterator[World]:
    """The same history, whose newer sandboxes are plain folders."""
    runtime, world.runtime = world.runtime, NO_ISOLATION
    yield world
    world.runtime = runtime


class Scenario:
    """What an unarmed daemon does first (`prepare`), and what makes the armed one reach its failpoint (`act`, which is
    cut off)."""

    env: dict[str, str] = NO_LAYERS
    retries = False
    """Whether a child process dies that is asked again and again; else the daemon dies, or a child that is asked
    once."""
    damaged = merged = False

    def __init__(self, daemon: Daemon, world: World) -> None:
        self.daemon, self.world, self.client = daemon, world, daemon.client

    def prepare(self) -> None:
        self.line = self.world.create()
        self.world.step(self.line)
        self.world.step(self.line, wait=True)

    def while_down(self) -> None:
        """Between the two daemons."""

    def act(self) -> None:
        self.world.step(self.line)

    def afterwards(self) -> None:
        """With an unarmed daemon again."""
        self.line.content = self.world.expected[self.client.trajectory(self.line.id).head]
        self.world.step(self.line)


class LiveProcess(Scenario):
    def act(self) -> None:
        self.world.step(self.line, live=True)


class Create(Scenario):
    def act(self) -> None:
        self.world.create()


class Fork(Scenario):
    def act(self) -> None:
        self.client.fork(self.line.id)


class Remove(Scenario):
    def act(self) -> None:
        self.own = {s.id for s in self.client.log(self.line.id)}
        self.world.forget_snapshots(self.own)
        self.client.remove(self.line.id, force=True)

    def afterwards(self) -> None:
        assert self.line.id not in {t.id for t in self.client.trajectories()}, "it was recorded as removed"


class Archived(Scenario):
    """A step that is archived; whoever waits is told that it failed."""

    def act(self) -> None:
        self.world.step(self.line)
        self.world.client.flush()


class Evict(Scenario):
    """Layers that nobody stands on any more; the next batch makes room."""

    def act(self) -> None:
        self.world.step(self.line)
        self.client.stop(self.line.id, wait="stored")
        self.world.create()
        self.client.flush()


class ArchivedByChild(Archived):
    retries = True


class Merge(Scenario):
    env = ALL_LAYERS
    merged = True

    def act(self) -> None:
        for _ in range(20):
            self.world.step(self.line)
        self.client.flush()  # the background has done all of it


class Cold(Scenario):
    """A fork of an evicted snapshot, and a step in it, while its layer is being written."""

    def prepare(self) -> None:
        super().prepare()
        for one in self.client.trajectories():
            if one.status == "running":  # an earlier test's, too: a live sandbox keeps its layers
                self.client.stop(one.id, wait="stored")
        wait_until(lambda: self.client.usage().layer_bytes == 0, "all layers are evicted")

    def act(self) -> None:
        (fork,) = self.client.fork(self.line.id).trajectories
        self.world.step(Line(fork.id, self.line.content))
        wait_until(self.daemon.died, "the layer is written")


class Prune(Scenario):
    """A prune that removes packs, leaves some as they are and writes others anew."""

    retries = False

    def prepare(self) -> None:
        other = self.world.create()
        self.world.fill(other)
        self.client.stop(other.id, wait="stored")
        self.line = self.world.create()
        self.world.step(self.line, wait=True)
        for _ in range(3):
            self.world.fill(self.line)
        self.world.fill(self.line, small=True)
        self.client.stop(self.line.id, wait="stored")
        self.world.note_stored()
        self.world.forget(other)

    def act(self) -> None:
        self.world.prune_to(1)


class PruneLists(Prune):
    """A large content that differs little from an earlier one, which goes."""

    def prepare(self) -> None:
        self.line = self.world.create()
        for part in range(4):
            self.world.patch(self.line, part)
        self.client.stop(self.line.id, wait="stored")
        self.world.note_stored()


class Repair(Scenario):
    """A pack of which a part is damaged, and all of it is in layers still."""

    env = ALL_LAYERS
    damaged = True

    def prepare(self) -> None:
        self.line = self.world.create()
        self.world.fill(self.line)
        self.world.step(self.line, wait=True)
        self.world.note_stored()

    def while_down(self) -> None:
        pack = max((self.daemon.state_dir / "repo/store/packs").rglob("*/*"), key=lambda path: path.stat().st_mtime_ns)
        pack.chmod(0o600)
        with pack.open("r+b") as file:
            file.seek(pack.stat().st_size // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 0xFF]))

    def act(self) -> None:
        self.client.repair()

    def afterwards(self) -> None:
        self.client.repair()
        super().afterwards()


class RepairIndex(Repair):
    """An index that cannot be used."""

    def while_down(self) -> None:
        for name in ("index.db-wal", "index.db-shm"):
            (self.daemon.state_dir / "repo" / name).unlink(missing_ok=True)
        with (self.daemon.state_dir / "repo/index.db").open("r+b") as file:
            file.write(b"\xff" * 4096)


class Import(Scenario):
    """A bundle of a trajectory that was removed here."""

    def prepare(self) -> None:
        super().prepare()
        self.bundle = self.daemon.state_dir.parent / "bundle"
        self.client.export_file(self.line.id, self.bundle, whole=True)
        self.content = {s.id: self.world.expected[s.id] for s in self.client.log(self.line.id)}
        self.world.forget(self.line)
        self.world.importing = self.content

    def act(self) -> None:
        self.client.import_bundle(self.bundle)

    def afterwards(self) -> None:
        here = {s.id for s in self.client.all_snapshots()} & self.content.keys()
        assert here in (set(), set(self.content)), "a bundle is taken in as a whole or not at all"
        if not here:
            self.client.import_bundle(self.bundle, wait="stored")
        self.world.expected.update(self.content)
        for snapshot in self.content:
            self.world.verify(snapshot)
        self.bundle.unlink()


SCENARIOS: dict[str, type[Scenario]] = {
    "engine.step.begin": Scenario,
    "engine.step.sealed": Scenario,
    "engine.step.outputs_saved": Scenario,
    "engine.step.committed": Scenario,
    "engine.start.container_created": Create,
    "engine.start.pivoted": Create,
    "engine.fork.recorded": Fork,
    "engine.remove.recorded": Remove,
    "engine.archive.tree": ArchivedByChild,
    "engine.archive.record": ArchivedByChild,
    "engine.archive.flushed": ArchivedByChild,
    "engine.archive.stored": Archived,
    "engine.prune.recorded": Prune,
    "engine.cold.built": Cold,
    "layers.merge.built": Merge,
    "layers.evict.renamed": Evict,
    "layers.capture.copied": LiveProcess,
    "repo.pack.written": ArchivedByChild,
    "repo.pack.stored": ArchivedByChild,
    "repo.index.committed": Archived,
    "repo.gc.forgotten": Prune,
    "repo.gc.copied": Prune,
    "repo.gc.indexed": Prune,
    "repo.gc.deleted": Prune,
    "repo.gc.relisted": PruneLists,
    "repo.repair.saved": Repair,
    "repo.repair.kept": RepairIndex,
    "repo.repair.indexed": Repair,
    "repo.repair.aside": Repair,
    "repo.repair.moved": Repair,
    "engine.import.ingested": Import,
    "engine.import.committed": Import,
}
"""Every failpoint of storing, and what reaches it."""
ELSEWHERE = (
    "catalog.",
    "engine.rebuild.",
    "engine.journal.",
    "engine.resume.",
    "engine.reuse.",
    "engine.approval.",
    "engine.compensate.",
    "engine.edit.",
    "engine.experiment.",
    "engine.find.",
    "engine.fork.changed",
    "engine.values.",
    "engine.output.",
    "engine.command.",
    "engine.service.",
    "engine.request.",
    "engine.folders.",
    "client.apply.",
    "langgraph.",
    "engine.publish.",
    "engine.takeover.",
    "engine.remove.published",
    "engine.prune.told",
    "repo.fleet.",
)
"""Failpoints of the history of a node of a fleet: tests/crash/test_fleet_history.py, and of its
garbage: tests/crash/test_fleet_collection.py;
of the agent's mind: tests/e2e/test_kills.py, tests/e2e/test_survive.py, tests/crash/test_mind_kill.py; of
background commands: tests/e2e/test_background.py; of reuse: tests/e2e/test_reuse.py; of folders: tests/e2e/test_hooks.py;
of services: tests/e2e/test_services.py; of the index of texts: tests/crash/test_find_kill.py;
of experiments: tests/e2e/test_experiment.py;
of a catalog that is made again: tests/e2e/test_missing_files.py; of requests that are asked again:
tests/e2e/test_asked_again.py; of the client: tests/unit/client/test_host_change.py;
of a graph's program: tests/e2e/test_langgraph.py; and of a fleet's repository: tests/crash/test_fleet_repository_kill.py."""


def test_every_failpoint_has_a_scenario() -> None:
    assert SCENARIOS.keys() == {name for name in failpoints.NAMES if not name.startswith(ELSEWHERE)}


READ_ELSEWHERE = (
    "engine.archive.tree",
    "repo.pack.",
    "repo.gc.forgotten",
    "repo.gc.indexed",
    "repo.gc.deleted",
    "repo.gc.relisted",
    "repo.repair.saved",
    "repo.repair.indexed",
    "repo.repair.aside",
)
"""Failpoints at which the daemon sees a child die as it does at others of the same scenario. The short set walks those of
the repository over the repository alone (tests/unit/repo/test_packs.py, tests/model/test_repo_gc.py), the long one here
too."""
SEEN_ELSEWHERE = ("engine.step.sealed", "engine.step.outputs_saved")
"""Between the begin and the commit of a step, which are both here. The short set dies there under an agent
(tests/e2e/test_kills.py)."""


IN_SHORT = set(long.some([n for n in SCENARIOS if not n.startswith((*READ_ELSEWHERE, *SEEN_ELSEWHERE))], 9))
"""The short set has nine of the others."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in IN_SHORT)) for name in SCENARIOS]
)
def test_killed_at_a_failpoint(daemon: Daemon, world: World, name: str) -> None:
    with daemon.explained():
        _kill_at(daemon, world, name)


OF_A_CHILD = ("engine.archive.", "repo.", *([] if way.WAY else ["layers.merge."]))
"""Failpoints at which a child of the daemon dies. An ordinary user's daemon merges layers itself (layers/delta.py)."""
WITH_A_MOUNT = ("engine.start.pivoted", "engine.cold.built", "layers.merge.built")
"""Failpoints that a plain folder does not pass."""


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in WITH_A_MOUNT])
def test_killed_at_a_failpoint_without_isolation(daemon: Daemon, folder_world: World, name: str) -> None:
    with daemon.explained():
        _kill_at(daemon, folder_world, name)


@pytest.mark.parametrize("name", ["repo.pack.stored", "repo.gc.forgotten"])
def test_what_was_removed_is_collected_after_a_kill(daemon: Daemon, folder_world: World, name: str) -> None:
    """The kill leaves packs that the index does not know, with snapshots that the catalog does not have: they were
    removed, before they were stored or before the prune that was cut off."""
    with daemon.explained():
        _restart(daemon, folder_world, **NO_LAYERS)
        other, line = folder_world.create(), folder_world.create()
        folder_world.step(other)
        if name == "repo.gc.forgotten":
            folder_world.step(line, wait=True)
        daemon.kill()
        daemon.start(SNAPSHOTD_FAILPOINT=name, **NO_LAYERS)
        if name == "repo.pack.stored":
            folder_world.step(line, wait=False)
            with contextlib.suppress(SnapshotdError):
                daemon.client.flush()
        folder_world.forget(line)
        with contextlib.suppress(SnapshotdError):
            daemon.client.prune(grace_s=0)
        assert daemon.reached(name) > 0
        daemon.kill()
        daemon.start(**NO_LAYERS)
        _settle(folder_world)
        clean(daemon)


def _kill_at(daemon: Daemon, world: World, name: str) -> None:
    scenario = SCENARIOS[name](daemon, world)
    _restart(daemon, world, **scenario.env)
    scenario.prepare()
    daemon.kill()
    scenario.while_down()
    daemon.start(SNAPSHOTD_FAILPOINT=name, **scenario.env)
    with contextlib.suppress(SnapshotdError, ConnectionError):
        scenario.act()
    if scenario.retries:
        if daemon.reached(name) < 2:  # a third death, and the snapshot is given up, so that others can be stored
            with contextlib.suppress(SnapshotdError):
                world.client.flush()
        wait_until(lambda: daemon.reached(name) > 1, f"a child died at {name} twice: {daemon.log()[-2000:]}")
        assert world.client.status()["durability"] != "ok"
    else:
        wait_until(lambda: daemon.reached(name) > 0, f"{name} is reached: {daemon.log()[-2000:]}")
    if name.startswith(OF_A_CHILD) and name != "engine.archive.stored":
        world.client.status()  # the daemon lives
        daemon.kill()
    else:
        wait_until(daemon.died, "the daemon died")
    daemon.start(**scenario.env)
    _settle(world)
    scenario.afterwards()
    clean(daemon, damaged=scenario.damaged, merged=scenario.merged)
    world.note_stored()
    _shrink(world)


def _restart(daemon: Daemon, world: World, **env: str) -> None:
    """Have an unarmed daemon with this environment, whatever the last test left: usually the one that is wanted."""
    if daemon.process is not None:
        if daemon.env == env and daemon.process.poll() is None:
            return
        daemon.kill()
    daemon.start(**env)
    _settle(world)


def _settle(world: World) -> None:
    """All that was reported is there, before and after what was captured is stored."""
    world.settle()
    captured = [s.id for s in world.client.all_snapshots() if s.state == "captured"]
    for snapshot in captured:
        world.verify(snapshot)
    world.client.flush()
    world.note_stored()
    assert all(s.state in ("stored", "pruned") for s in world.client.all_snapshots())
    for snapshot in captured:
        world.verify(snapshot)


def _shrink(world: World) -> None:
    """Verify everything, and remove the oldest trajectories that nothing was forked from, so that a test's time does
    not grow."""
    world.verify_all()
    lines = sorted(world.client.trajectories(), key=lambda line: line.created_at)
    origins = {line.forked_from for line in lines}
    for line in lines[:-3]:
        if not origins & {s.id for s in world.client.log(line.id)}:
            world.forget(Line(line.id))


# -- at random moments -------------------------------------------------------------------------------------------------

SEED = long.SEED
STEPS = 30


@pytest.mark.parametrize("number", range(long.size(1, 40)))
def test_the_daemon_is_killed_in_a_burst(daemon: Daemon, world: World, number: int) -> None:
    rng = random.Random(SEED + number)
    _restart(daemon, world, SNAPSHOTD_LAYER_BUDGET=rng.choice(("0", "")))
    with daemon.explained(), _seeded(number):
        lines = [world.create(), world.create()]
        process = daemon.process
        assert process is not None
        killer = threading.Timer(rng.uniform(0.1, 2.5), process.kill)  # the random moment that this test is about
        killer.start()
        with contextlib.suppress(SnapshotdError, OSError):
            for _ in range(STEPS):
                world.step(rng.choice(lines), wait=rng.random() < 0.2)
        killer.join()
        daemon.kill()
        daemon.start(**NO_LAYERS)
        _settle(world)
        clean(daemon)
        _shrink(world)


def test_its_children_are_killed_in_a_burst(daemon: Daemon, world: World) -> None:
    """The archive's and the one that rebuilds layers, again and again: the daemon lives and starts them anew."""
    rng = random.Random(SEED)
    _restart(daemon, world, **NO_LAYERS)
    with daemon.explained(), _seeded(0):
        cold = world.create()
        origin = world.step(cold, wait=True).snapshot
        assert origin is not None
        world.client.stop(cold.id, wait="stored")
        line = world.create()
        done = threading.Event()
        kills: list[str] = []
        killer = threading.Thread(target=_kill_children, args=(daemon, rng, done, kills))
        killer.start()
        try:
            for number in range(STEPS):
                world.step(line)
                if number % 10 == 5:
                    with contextlib.suppress(InternalError):  # without FUSE a cold start needs the child that is killed
                        (fork,) = world.client.fork(origin.id).trajectories
                        world.step(Line(fork.id, world.expected[origin.id]))
        finally:
            done.set()
            killer.join()
        assert "archive" in kills
        wait_until(lambda: not _fails(world), "all is stored in the end")
        _settle(world)
        clean(daemon)
        _shrink(world)


@pytest.mark.long  # unit/repo/test_packers.py kills them
def test_those_that_help_the_archive_are_killed(daemon: Daemon, world: World) -> None:
    """While a large step is stored: the archive says so, and does it again."""
    _restart(daemon, world, **NO_LAYERS)
    with daemon.explained():
        line = world.create()
        for _ in range(long.size(1, 2)):
            world.many(line)
            wait_until(lambda: _helpers(daemon) != [], "somebody helps")
            for pid in _helpers(daemon):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not _fails(world), "all is stored in the end")
        _settle(world)
        clean(daemon)
        _shrink(world)


def _helpers(daemon: Daemon) -> list[int]:
    """The processes that make packs for the archive."""
    found = []
    for archive in daemon.children("archive"):
        for pid in processes.descendants(archive):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if b"\0pack\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
    return found


def _kill_children(daemon: Daemon, rng: random.Random, done: threading.Event, kills: list[str]) -> None:
    while not done.wait(rng.uniform(0.02, 0.4)):
        for role in ("archive", "cold"):
            for pid in daemon.children(role):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    kills.append(role)


def _fails(world: World) -> bool:
    """Whether storing still suffers from a child that was killed."""
    try:
        world.client.flush()
    except InternalError:
        return True
    return False


@contextlib.contextmanager
def _seeded(number: int) -> Iterator[None]:
    try:
        yield
    except BaseException as exc:
        exc.add_note(f"SNAPSHOTD_SEED={SEED} (test number {number})")
        raise
