"""The client's verbs of durable storage: waiting, exports that are whole or not there, uploads, errors by class."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from pathlib import Path

import pytest

from snapshotd.client import Sandbox, Snapshotd
from snapshotd.client.local.part_file import part_file
from snapshotd.client.results import Policy
from snapshotd.errors import Conflict, DaemonUnavailable, NotFound, OutOfSpace, Unsupported, UsageError
from snapshotd.types import new_id
from tests.unit.daemon.process import Daemon, damage

MIB = 1 << 20

pytestmark = [pytest.mark.usefixtures("both_clients"), pytest.mark.same_verbs]


# -- waiting -----------------------------------------------------------------------------------------------------------


def test_every_method_that_makes_a_snapshot_can_wait_until_it_is_stored(client: Snapshotd, short_dir: Path) -> None:
    line, snapshot = client.create(wait="stored")
    assert snapshot.state == "stored"
    assert client.exec(line.id, ["ls"]).snapshot.state == "captured"  # type: ignore[union-attr]
    done = client.exec(line.id, ["ls"], wait="stored")
    assert done.snapshot is not None
    assert done.snapshot.state == "stored"
    assert [item.state for item in client.log(line.id)] == ["stored"] * 3
    assert client.rewind(line.id, snapshot.id, wait="stored").state == "stored"
    client.exec(line.id, ["ls"])
    assert client.snapshot(client.fork(line.id, 2, wait="stored").trajectories[1].head).state == "stored"
    client.exec(line.id, ["ls"])
    assert client.snapshot(client.stop(line.id, wait="stored").head).state == "stored"
    assert client.snapshot(client.run(command=["ls"], wait="stored").head).state == "stored"
    client.export_file(line.id, short_dir / "b")
    assert client.snapshot(client.import_bundle(short_dir / "b", wait="stored").trajectories[0].head).state == "stored"


def test_objects_wait_too(client: Snapshotd) -> None:
    box = Sandbox.create(client=client, wait="stored")
    assert box.head().info.state == "stored"
    box.exec("ls", wait="stored")
    assert [snapshot.info.state for snapshot in box.snapshots()] == ["stored", "stored"]
    assert box.rewind(box.snapshots(last=1)[0], wait="stored").info.state == "stored"
    box.fork(1, wait="stored")
    box.stop(wait="stored")
    assert len(box.snapshots(last=2)) == 2


def test_what_cannot_be_waited_for_is_refused_before_anything_happens(client: Snapshotd, box: Sandbox) -> None:
    before = len(client.trajectories())
    for call in (
        lambda: client.create(wait="saved"),
        lambda: client.run(command=["ls"], wait="saved"),  # type: ignore[arg-type]
        lambda: client.exec(box.id, ["ls"], wait="saved"),
        lambda: client.fork(box.id, wait=""),  # type: ignore[arg-type]
        lambda: client.stop(box.id, wait="saved"),
        lambda: client.rewind(box.id, box.id, wait="saved"),  # type: ignore[arg-type]
        lambda: client.import_bundle(io.BytesIO(b"BUNDLE"), wait="saved"),  # type: ignore[arg-type]
    ):
        with pytest.raises(UsageError, match="captured or stored"):
            call()
    assert len(client.trajectories()) == before
    assert len(box.snapshots()) == 1
    assert box.info.status == "running"


# -- policies, prune, check, repair ------------------------------------------------------------------------------------


def test_policies(daemon: Daemon) -> None:
    client = daemon.client
    line, _ = client.create()
    assert client.policy() == Policy()
    assert client.set_policy(Policy(keep_last=5, keep_within_s=3600)) == Policy(keep_last=5, keep_within_s=3600)
    assert client.set_policy(Policy(keep_every=2), line.id) == client.policy(line.id) == Policy(keep_every=2)
    assert client.set_policy(None, line.id) == Policy(keep_last=5, keep_within_s=3600)
    with pytest.raises(UsageError, match="keep_last"):
        client.set_policy(Policy(keep_last=-1))
    with pytest.raises(NotFound):
        client.policy("a/b")


def test_prune_says_what_goes_and_then_does_it(daemon: Daemon) -> None:
    client, said = daemon.client, list[str]()
    line, first = client.create()
    ids = [first.id]
    for name in "abc":
        ran = client.exec(line.id, ["touch", name])
        assert ran.snapshot is not None
        ids.append(ran.snapshot.id)
    client.flush()
    plan = client.prune(Policy(keep_last=1), dry_run=True, progress=said.append)
    assert (plan.dry_run, [item.snapshot for item in plan.pruned], plan.kept) == (True, ids[1:3], 2)
    assert client.snapshot(ids[1]).state == "stored"
    assert client.prune(Policy(keep_last=1), grace_s=0).pruned == plan.pruned
    assert client.snapshot(ids[1]).state == "pruned"
    assert client.prune(Policy(keep_last=1)).pruned == ()
    assert client.usage().states == {"captured": 0, "stored": 2, "lost": 0, "pruned": 2}


def test_check_and_repair(daemon: Daemon, workspace: Path) -> None:
    client, said = daemon.client, list[str]()
    _, snapshot = client.create(workspace=workspace, wait="stored")
    assert client.check(progress=said.append).damages == ()
    assert said
    damage(daemon)
    report = client.check(read_data=True)
    assert report.bytes_read > 0
    assert report.damages
    client.repair()
    assert client.check(read_data=True).damages == ()
    assert client.snapshot(snapshot.id).id == snapshot.id


# -- export and import -------------------------------------------------------------------------------------------------


def test_an_export_to_a_file(client: Snapshotd, box: Sandbox, short_dir: Path) -> None:
    target = short_dir / "box.bundle"
    target.write_bytes(b"an older one")
    moved = list[int]()
    info = client.export_file(box.id, target, whole=True, moved=moved.append)
    assert (info.bytes, info.warnings) == (target.stat().st_size, ())
    assert moved[-1] == info.bytes
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert os.listdir(short_dir) == ["box.bundle"]
    box.head().export(short_dir / "tree.tar", form="tar")
    with tarfile.open(short_dir / "tree.tar") as tree:
        found = tree.extractfile("workspace/a.txt")
        assert found is not None
        assert found.read() == b"hello\n"


def test_a_failed_export_leaves_nothing_and_the_older_file(client: Snapshotd, short_dir: Path) -> None:
    target = short_dir / "x"
    target.write_bytes(b"an older one")
    with pytest.raises(NotFound):
        client.export_file("nobody", target)
    assert target.read_bytes() == b"an older one"
    assert os.listdir(short_dir) == ["x"]


def test_a_daemon_that_dies_in_the_middle_of_an_export(daemon: Daemon, short_dir: Path) -> None:
    (short_dir / "work").mkdir()
    (short_dir / "work" / "large").write_bytes(os.urandom(32 * MIB))
    line, _ = daemon.client.create(workspace=short_dir / "work")

    def kill(_: int) -> None:
        daemon.kill()

    with pytest.raises(DaemonUnavailable):
        daemon.client.export_file(line.id, short_dir / "x", moved=kill)
    assert not (short_dir / "x").exists()
    assert not (short_dir / "x.part").exists()


def test_places_that_cannot_be_written(client: Snapshotd, box: Sandbox, short_dir: Path) -> None:
    (short_dir / "folder").mkdir()
    (short_dir / "link.part").symlink_to(short_dir / "precious")
    for name in ("folder", "missing/x", "link"):
        with pytest.raises(UsageError, match=name):
            client.export_file(box.id, short_dir / name)
    assert not (short_dir / "precious").exists()
    assert client.export_file(box.id, "/dev/null").bytes > 0
    with pytest.raises(OutOfSpace, match="/dev/full"):
        client.export_file(box.id, "/dev/full")


def test_two_writers_of_one_file_do_not_mix(short_dir: Path) -> None:
    target = short_dir / "x"
    with part_file(target) as write:
        write(b"first")
        with pytest.raises(Conflict, match="another process is writing"), part_file(target) as second:
            second(b"second")
    assert target.read_bytes() == b"first"
    (short_dir / "x.part").write_bytes(b"left by a killed one, and longer than the next")
    with part_file(target) as write:
        write(b"again")
    assert target.read_bytes() == b"again"
    with pytest.raises(ZeroDivisionError), part_file(target) as write:
        write(b"half" * (1 // 0))
    assert target.read_bytes() == b"again"
    assert os.listdir(short_dir) == ["x"]


def test_what_was_exported_can_be_imported(client: Snapshotd, workspace: Path, short_dir: Path) -> None:
    box = Sandbox.create(workspace=workspace, client=client)
    client.export_file(box.id, short_dir / "b")
    client.remove(box.id, force=True)
    name = f"copy-{new_id()[:8]}"
    done = client.import_bundle(short_dir / "b", name=name)
    assert (done.trajectories[0].name, done.snapshot_count) == (name, 1)
    assert b"".join(client.cat(name, "/workspace/a.txt")) == b"hello\n"
    with (short_dir / "b").open("rb") as opened:
        assert client.import_bundle(opened).snapshot_count == 0, "it is here"


def test_imports_that_fail_are_errors_by_class(client: Snapshotd, box: Sandbox, short_dir: Path) -> None:
    client.export_file(box.id, short_dir / "b")
    whole, long = (short_dir / "b").read_bytes(), b"x" * (32 * MIB)
    client.remove(box.id, force=True)
    for content in (b"", b"nonsense", long, whole[: len(whole) // 2], whole[:-100] + bytes(100)):
        with pytest.raises(UsageError):
            client.import_bundle(io.BytesIO(content))
    client.create(name=box.name)
    with pytest.raises(Conflict, match="belongs to another"):
        client.import_bundle(io.BytesIO(whole), name=box.name)
    with pytest.raises(UsageError, match="cannot be read"):
        client.import_bundle(short_dir / "missing")
    with pytest.raises(UsageError, match="cannot be read"):
        client.import_bundle(short_dir)


@pytest.fixture
def bundle(client: Snapshotd, short_dir: Path) -> bytes:
    """Of something large that is not here any more."""
    (short_dir / "work").mkdir()
    (short_dir / "work" / "large").write_bytes(os.urandom(8 * MIB))
    line, _ = client.create(workspace=short_dir / "work")
    client.export_file(line.id, short_dir / "bundle")
    client.remove(line.id, force=True)
    return (short_dir / "bundle").read_bytes()


def test_a_source_that_fails_is_what_the_caller_sees_and_nothing_is_imported(client: Snapshotd, bundle: bytes) -> None:
    class Failing(io.BytesIO):
        def read(self, count: int | None = -1, /) -> bytes:
            if self.tell() > MIB:
                raise OSError(5, "Input/output error")
            return super().read(count)

    before = len(client.trajectories())
    for _ in range(5):
        with pytest.raises(OSError, match="Input/output"):
            client.import_bundle(Failing(bundle))
    assert len(client.trajectories()) == before


def test_a_daemon_that_dies_in_the_middle_of_an_import(daemon: Daemon, bundle: bytes) -> None:
    class Deadly(io.BytesIO):
        def read(self, count: int | None = -1, /) -> bytes:
            if self.tell() > MIB and daemon.process.poll() is None:
                daemon.kill()
            return super().read(count)

    with pytest.raises(DaemonUnavailable):
        daemon.client.import_bundle(Deadly(bundle))


def test_mounts(client: Snapshotd, short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(short_dir)
    with pytest.raises((UsageError, Unsupported)):
        client.mount("all")
    (short_dir / "all").mkdir()
    with pytest.raises(NotFound):
        client.unmount("all")
