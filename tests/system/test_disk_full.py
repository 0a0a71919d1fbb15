"""The disk of the state directory is full: whoever writes is told so (exit code 12), nothing is damaged, and all works
again with space.

On XFS layers lie on the disk itself, on ext4 in an image of their own on it. The disk is filled from inside a sandbox
and from outside, to several degrees, so that different writes are the first that fail; and once its inodes are used up.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshotd.api.wire import lock_path_of
from snapshotd.client.results import Policy
from snapshotd.daemon.lock import lock_holder
from snapshotd.errors import OutOfSpace, Unsupported
from snapshotd.kernel import mounts
from tests import long
from tests.capabilities import layer_naming, require
from tests.leftovers import nothing_left
from tests.loop_disk import Disk, filled, loop_disk
from tests.storage_rig import Daemon, Line, World, clean, in_own_mount_namespace, wait_until

pytestmark = [pytest.mark.runc, pytest.mark.usefixtures("nobody_adopts_orphans")]

DISK_BYTES = 900 << 20
SMALL_DISK_BYTES = 400 << 20
LEFT_BYTES = (0, 100 << 10, 3 << 20)[: long.size(1, 3)]
"""How much of the disk the filler leaves."""


class Rig:
    """A daemon on a disk of its own, with some history in it, all stored."""

    def __init__(self, disk: Disk, small_root: Path) -> None:
        self.disk, self.daemon = disk, Daemon(disk.mount_point / "state")
        self.client = self.daemon.start(SNAPSHOTD_LAYER_BUDGET="0")
        self.client.import_image(str(small_root), name="small")
        self.world = World(self.client, disk.scratch / "world")
        moved = self.world.create()
        self.world.step(moved)
        self.world.step(moved)
        self.bundle = disk.scratch / "bundle"
        self.client.export_file(moved.id, self.bundle, whole=True)
        self.world.forget(moved)
        self.line, self.big = self.world.create(), self.world.create()
        self.world.step(self.line)
        self.cold = self.world.step(self.line).snapshot
        assert self.cold is not None
        self.client.tag(self.cold.id, "cold")
        self.world.disk_may_be_full = True
        self.grow(1)
        self.client.stop(self.line.id, wait="stored")
        self.world.note_stored()

    def grow(self, times: int) -> None:
        """Snapshots with much that a prune can give up. Their files are nowhere compared; `check` reads them."""
        for _ in range(times):
            done = self.client.exec(
                self.big.id, ["sh", "-c", "head -c 6000000 /dev/urandom > /root/random"], wait="stored"
            )
            assert done.snapshot is not None
            self.world.expected[done.snapshot.id] = {}

    def grow_much(self) -> None:
        """One of 400 files with 40 MB, for which the archive has processes that help it."""
        script = "rm -f /root/*; for n in $(seq 400); do head -c 100000 /dev/urandom > /root/random$n; done"
        done = self.client.exec(self.big.id, ["sh", "-c", script])
        assert done.snapshot is not None
        self.world.expected[done.snapshot.id] = {}

    def end(self) -> None:
        self.daemon.end()

    def alive(self) -> None:
        assert self.daemon.process is not None
        assert self.daemon.process.poll() is None, self.daemon.log()[-3000:]
        self.client.status()

    def whole(self) -> None:
        """With space again: everything is there, and works."""
        wait_until(lambda: not _fails(self.client.flush), "what was captured is stored when there is space")
        self.world.settle()
        self.world.note_stored()
        self.world.verify_all()
        self.world.fill(self.line)
        assert self.cold is not None
        (fork,) = self.client.fork(self.cold.id).trajectories
        self.world.step(Line(fork.id, self.world.expected[self.cold.id]), wait=True)
        self.world.forget(Line(fork.id))
        clean(self.daemon)


def _fails(action: Callable[[], object]) -> bool:
    """Whether the disk was too full for it. No other error is one that a full disk may lead to."""
    try:
        action()
    except OutOfSpace:
        return True
    return False


def _everything(rig: Rig) -> dict[str, bool]:
    """Each kind of work once; whether the disk was too full for it."""
    client, world = rig.client, rig.world
    assert rig.cold is not None
    cold = rig.cold.id
    target = rig.disk.scratch / "exported"
    work: dict[str, Callable[[], object]] = {
        "step": lambda: world.fill(rig.line),
        "archive": client.flush,
        "create": lambda: client.remove(client.create(image="small", runtime="runc")[0].id, force=True),
        "fork": lambda: client.remove(client.fork(cold).trajectories[0].id, force=True),
        "export": lambda: client.export_file(cold, target),
        "import": lambda: [world.client.remove(line.id) for line in client.import_bundle(rig.bundle).trajectories],
        "tag": lambda: client.tag(cold, "tagged", move=True),
        "log": lambda: client.log(rig.line.id),
        "check": lambda: client.check(read_data=True),
    }
    result = {}
    for name, action in work.items():
        result[name] = _fails(action)
        rig.alive()
    assert not result["log"]
    if not result["export"]:
        target.unlink()
    return result


def _attached(disk: Disk) -> bool:
    """Whether a file on the disk is a loop device."""
    listed = subprocess.run(["losetup", "--list", "--output", "BACK-FILE"], capture_output=True, text=True, check=True)
    return str(disk.mount_point) in listed.stdout


@contextlib.contextmanager
def rigged(kind: str, small_root: Path, options: tuple[str, ...] = ()) -> Iterator[Rig]:
    """A rig on a small disk of its own. After the block, when there is space again, everything is there; and the daemon
    leaves nothing."""
    require("xfs")
    with loop_disk(kind, DISK_BYTES, options) as disk:
        rig = Rig(disk, small_root)
        try:
            with rig.daemon.explained():
                yield rig
                rig.whole()
                rig.daemon.stop()
        finally:
            rig.end()
        nothing_left(rig.daemon.state_dir, running=False)


@pytest.mark.parametrize("kind", ["xfs", pytest.param("ext4", marks=pytest.mark.long)])
@in_own_mount_namespace
def test_filled_from_outside(kind: str, small_root: Path) -> None:
    with rigged(kind, small_root) as rig:
        for left in LEFT_BYTES:
            with filled(rig.disk, left) as fill:
                failed = _everything(rig)
                fill()
                failed |= {name: True for name, fails in _everything(rig).items() if fails}
            assert any(failed.values()) or left, "the disk was not full"
            rig.whole()


@pytest.mark.parametrize("kind", ["xfs", pytest.param("ext4", marks=pytest.mark.long)])
@in_own_mount_namespace
def test_prune_frees_space_on_a_full_disk(kind: str, small_root: Path) -> None:
    """Also with a daemon that was started on it."""
    with rigged(kind, small_root) as rig:
        for again in (False, True):
            rig.grow(3)
            with filled(rig.disk, 0) as fill:
                if again:
                    rig.daemon.kill()
                    fill()
                    rig.daemon.start(SNAPSHOTD_LAYER_BUDGET="0")
                else:
                    _fails(lambda: rig.world.fill(rig.line))
                    fill()
                report = rig.client.prune(Policy(keep_last=1), grace_s=0)
                rig.world.pruned |= {item.snapshot for item in report.pruned}
                rig.world.stored -= rig.world.pruned
                assert report.freed_bytes > 10_000_000
                wait_until(lambda: rig.disk.free_bytes() > 10_000_000, "the disk has the space")
                rig.world.fill(rig.line)
            rig.whole()


@pytest.mark.parametrize("kind", ["xfs", pytest.param("ext4", marks=pytest.mark.long)])
@in_own_mount_namespace
def test_a_small_disk_that_was_filled_is_not_the_end(kind: str, small_root: Path) -> None:
    """A daemon starts on it, and a removal gives space back."""
    require("xfs")
    with loop_disk(kind, SMALL_DISK_BYTES) as disk:
        daemon = Daemon(disk.mount_point / "state")
        try:
            with daemon.explained():
                client = daemon.start()
                client.import_image(str(small_root), name="small")
                greedy = client.create(image="small", runtime="runc")[0].id
                client.exec(greedy, ["sh", "-c", "head -c 40000000 /dev/urandom > /root/random"], wait="stored")
                # with ext4, what the layer takes is on the disk only when the image's own file system has written it
                os.sync()
                with filled(disk, 0) as fill:
                    daemon.kill()
                    os.truncate(
                        lock_path_of(daemon.state_dir), 0
                    )  # as a daemon left it that could not even write who it is
                    fill()
                    client = daemon.start()
                    assert lock_holder(daemon.state_dir) == client.version().pid
                    client.remove(greedy, force=True)
                    client.prune(grace_s=0)
                    # 80 MB come back, and half of what is free is kept ahead for the layers
                    wait_until(lambda: disk.free_bytes() > 55_000_000, "the spaces of layer and pack are back")
                    client.create(image="small", runtime="runc")
                daemon.stop()
        finally:
            daemon.end()
        nothing_left(daemon.state_dir, running=False)


@pytest.mark.long  # one process: below
@pytest.mark.parametrize("kind", ["xfs"])
@in_own_mount_namespace
def test_filled_while_several_processes_store_a_large_step(kind: str, small_root: Path) -> None:
    """Its layer of 40 MB fits, its packs of 40 MB do not."""
    with rigged(kind, small_root) as rig, filled(rig.disk, 55 << 20):
        rig.grow_much()
        assert _fails(rig.client.flush)
        rig.alive()


@pytest.mark.parametrize("kind", ["xfs", pytest.param("ext4", marks=pytest.mark.long)])
@in_own_mount_namespace
def test_filled_from_inside_a_sandbox(kind: str, small_root: Path) -> None:
    with rigged(kind, small_root) as rig:
        greedy = rig.client.create(image="small", runtime="runc")[0].id
        script = "cat /dev/zero > /root/huge; for n in $(seq 2000); do echo $n > /root/small$n || exit 3; done"
        _fails(lambda: rig.client.exec(greedy, ["sh", "-c", script]))
        rig.alive()
        _everything(rig)
        rig.client.remove(greedy, force=True)
        wait_until(
            lambda: rig.disk.free_bytes() > DISK_BYTES // 8, "XFS gives the space back, which it does in the background"
        )


@pytest.mark.long  # a full disk: above
@pytest.mark.parametrize("kind", ["ext4", pytest.param("xfs", marks=pytest.mark.long)])
@in_own_mount_namespace
def test_a_sparse_copy_of_a_state_directory_works_on_a_full_disk(kind: str, small_root: Path) -> None:
    """The documented backup has no blocks where there are only zeros: the reserves get theirs at the start."""
    require("xfs")
    with loop_disk(kind, SMALL_DISK_BYTES) as disk:
        first, daemon = Daemon(disk.mount_point / "first"), Daemon(disk.mount_point / "state")
        try:
            with daemon.explained():
                client = first.start()
                client.import_image(str(small_root), name="small")
                greedy = client.create(image="small", runtime="runc")[0].id
                client.exec(greedy, ["sh", "-c", "head -c 20000000 /dev/urandom > /root/random"], wait="stored")
                first.stop()
                subprocess.run(["cp", "-a", "--sparse=always", first.state_dir, daemon.state_dir], check=True)
                shutil.rmtree(first.state_dir)
                client = daemon.start()
                reserves = [daemon.state_dir / name for name in ("reserve", "repo/index.db.reserve")]
                assert all(path.stat().st_blocks * 512 >= 4 << 20 for path in reserves)
                assert client.status()["durability"] == "ok"

                def said() -> bool:
                    fill()  # the layers' image gives the disk what it has allocated ahead
                    return bool(client.status()["durability"] != "ok")

                with filled(disk, 0) as fill:
                    wait_until(said, "the status says that the disk is full")
                    client.remove(greedy, force=True)
                    fill()
                    client.prune(grace_s=0)
                    wait_until(lambda: client.status()["durability"] == "ok", "there is space again")
                    client.create(image="small", runtime="runc")
                daemon.stop()
        finally:
            first.end()
            daemon.end()
        nothing_left(daemon.state_dir, running=False)


@in_own_mount_namespace
def test_what_is_stored_can_be_read_and_removed_without_the_layers(small_root: Path) -> None:
    """The layers' image cannot be mounted. What waits in it is there again when it can."""
    require("xfs")
    with loop_disk("ext4", DISK_BYTES) as disk:
        daemon = Daemon(disk.mount_point / "state")
        try:
            with daemon.explained():
                client = daemon.start()
                client.import_image(str(small_root), name="small")
                world = World(client, disk.scratch / "world")
                kept, gone = world.create(), world.create()
                world.step(gone, wait=True)
                stored = world.step(kept, wait=True).snapshot
                assert stored is not None
                client.flush()
                daemon.stop()
                wait_until(lambda: not _attached(disk), "the image is not mounted any more")
                image = daemon.state_dir / "layers.img"
                with image.open("r+b") as file:
                    head = file.read(4096)
                    file.seek(0)
                    file.write(bytes(4096))
                daemon.start()
                world.verify(stored.id)
                assert client.log(kept.id)
                assert "cannot mount the layer image" in client.status()["durability"]
                with pytest.raises(Unsupported, match="cannot mount the layer image"):
                    client.fork(stored.id)
                world.forget(gone)
                client.prune(grace_s=0)
                assert not client.check(read_data=True).damages
                daemon.stop()
                with image.open("r+b") as file:
                    file.write(head)
                daemon.start()
                (fork,) = client.fork(stored.id).trajectories
                world.step(Line(fork.id, world.expected[stored.id]), wait=True)
                world.verify_all()
                daemon.stop()
        finally:
            daemon.end()
        nothing_left(daemon.state_dir, running=False)


@pytest.mark.parametrize(("kind", "what"), [("xfs", "space"), ("ext4", "space"), ("ext4", "inodes")])
@in_own_mount_namespace
def test_no_overlay_that_is_less_than_asked_for(kind: str, what: str) -> None:
    """On a full disk the kernel mounts one that is read-only, or does not follow redirects, and says so in its log
    only."""
    require("xfs")
    with (
        loop_disk(kind, DISK_BYTES, ("-N", "2000") if what == "inodes" else ()) as disk,
        contextlib.ExitStack() as opened,
    ):
        naming, fds = layer_naming(), []
        for name in ("lower", "upper", "work"):
            (disk.mount_point / name).mkdir()
            fds.append(os.open(disk.mount_point / name, os.O_PATH | os.O_DIRECTORY))
            opened.callback(os.close, fds[-1])
        many = disk.mount_point / "many"
        many.mkdir()
        with filled(disk, 0) if what == "space" else contextlib.nullcontext():
            with contextlib.suppress(OSError):
                for number in range(10_000 if what == "inodes" else 0):
                    (many / str(number)).touch()
            with pytest.raises(OSError, match="overlay") as failed:
                os.close(mounts.overlay(fds[:1], fds[1], fds[2], naming))
            assert failed.value.errno == errno.ENOSPC
        shutil.rmtree(many)
        shutil.rmtree(disk.mount_point / "work" / "work", ignore_errors=True)  # what the failed mount had made
        mount = mounts.overlay(fds[:1], fds[1], fds[2], naming)
        os.close(mount)


@pytest.mark.long  # without blocks: above
@in_own_mount_namespace
def test_without_inodes(small_root: Path) -> None:
    with rigged("ext4", small_root, ("-N", "4000")) as rig:
        many = rig.disk.mount_point / "many"
        many.mkdir()
        with contextlib.suppress(OSError):
            for number in range(10_000):
                (many / str(number)).touch()
        assert os.statvfs(many).f_ffree == 0
        failed = _everything(rig)
        assert any(failed.values()), "there are inodes left"
        for path in many.iterdir():
            path.unlink()
        many.rmdir()
