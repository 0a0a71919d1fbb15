"""The client's verbs of durable storage: waiting, exports that are whole or not there, uploads, errors by class."""

from __future__ import annotations

import io
import os
import stat
import threading
from pathlib import Path

import pytest

from snapshotd.client import Sandbox, Snapshotd
from snapshotd.client.local.part_file import part_file
from snapshotd.client.results import Policy
from snapshotd.errors import Conflict, DaemonUnavailable, DataLoss, InternalError, NotFound, OutOfSpace, UsageError
from snapshotd.types import new_id
from tests.unit.daemon.asking import eventually
from tests.unit.daemon.process import Daemon

MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("both_clients")


@pytest.fixture
def client(shared_daemon: Daemon) -> Snapshotd:
    return shared_daemon.client


@pytest.fixture
def box(client: Snapshotd) -> Sandbox:
    return Sandbox.create(name=f"box-{new_id()[:8]}", client=client)


def damaged(client: Snapshotd) -> str:
    return client.create(name=f"damaged-{new_id()[:8]}")[0].id


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


def test_a_snapshot_that_cannot_be_stored_is_captured_all_the_same(client: Snapshotd) -> None:
    line, _ = client.create(name=f"full-{new_id()[:8]}")
    with pytest.raises(OutOfSpace):
        client.exec(line.id, ["ls"], wait="stored")
    assert len(client.log(line.id)) == 2


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
    client.exec(line.id, ["ls"])
    client.flush()
    plan = client.prune(dry_run=True, progress=said.append)
    assert (plan.dry_run, [item.snapshot for item in plan.pruned], plan.kept) == (True, [first.id], 1)
    assert said == ["looking at the snapshots, grace 600 s"]
    assert client.snapshot(first.id).state == "stored"
    assert client.prune(grace_s=0).pruned == plan.pruned
    assert client.snapshot(first.id).state == "pruned"
    assert client.prune().pruned == ()
    assert client.usage().states == {"captured": 0, "stored": 1, "lost": 0, "pruned": 1}


def test_check_and_repair(daemon: Daemon) -> None:
    client, said = daemon.client, list[str]()
    assert client.check(progress=said.append).damages == ()
    assert said == ["pack 1 of 2", "pack 2 of 2"]
    damaged(client)
    report = client.check(read_data=True)
    assert report.bytes_read == 5 * MIB
    assert report.damages[0].path == "/workspace/a\udcff"
    assert report.damages[1].snapshot is None
    assert client.repair().lost == report.unreadable
    assert client.repair().actions == ()


# -- export and import -------------------------------------------------------------------------------------------------


def test_an_export_to_a_file(client: Snapshotd, box: Sandbox, short_dir: Path) -> None:
    target = short_dir / "box.bundle"
    target.write_bytes(b"an older one")
    moved, said = list[int](), list[str]()
    info = client.export_file(box.id, target, whole=True, since="abcd", progress=said.append, moved=moved.append)
    assert (info.bytes, info.warnings) == (3 * MIB, ("one socket was left out",))
    assert (moved[-1], said) == (3 * MIB, ["1 of 3 MiB"])
    assert target.read_bytes().startswith(b"BUNDLE bundle True abcd\n")
    assert target.stat().st_size == 3 * MIB
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert os.listdir(short_dir) == ["box.bundle"]
    assert box.head().export(short_dir / "tree.tar", form="tar").bytes == 3 * MIB
    assert (short_dir / "tree.tar").read_bytes().startswith(b"BUNDLE tar False None\n")


def test_a_failed_export_leaves_nothing_and_the_older_file(client: Snapshotd, short_dir: Path) -> None:
    target = short_dir / "x"
    target.write_bytes(b"an older one")
    with pytest.raises(DataLoss, match="pack-7"):
        client.export_file(damaged(client), target)
    with pytest.raises(NotFound):
        client.export_file("nobody", target)
    assert target.read_bytes() == b"an older one"
    assert os.listdir(short_dir) == ["x"]


def test_a_daemon_that_dies_in_the_middle_of_an_export(daemon: Daemon, short_dir: Path) -> None:
    line, _ = daemon.client.create()

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
    assert client.export_file(box.id, "/dev/null").bytes == 3 * MIB
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


def test_what_was_exported_can_be_imported(client: Snapshotd, box: Sandbox, short_dir: Path) -> None:
    client.export_file(box.id, short_dir / "b")
    said: list[str] = []
    name = f"copy-{new_id()[:8]}"
    done = client.import_bundle(short_dir / "b", name=name, progress=said.append)
    assert (done.trajectories[0].name, done.snapshot_count, done.warnings) == (name, 1, (f"{3 * MIB} bytes came",))
    assert said[-1] == f"{3 * MIB} bytes"
    with (short_dir / "b").open("rb") as opened:
        assert client.import_bundle(opened).snapshot_count == 1


def test_imports_that_fail_are_errors_by_class(client: Snapshotd, box: Sandbox, short_dir: Path) -> None:
    long = b"x" * (32 * MIB)
    cases: list[tuple[type[Exception], bytes]] = [
        (UsageError, b""),
        (UsageError, b"nonsense"),
        (DataLoss, b"BUNDLE damaged\n" + long),
        (UsageError, long),
        (InternalError, b"BUNDLE crash\n..."),
    ]
    for expected, content in cases:
        with pytest.raises(expected):
            client.import_bundle(io.BytesIO(content))
    with pytest.raises(Conflict, match="taken"):
        client.import_bundle(io.BytesIO(b"BUNDLE..."), name=box.name)
    with pytest.raises(UsageError, match="cannot be read"):
        client.import_bundle(short_dir / "missing")
    with pytest.raises(UsageError, match="cannot be read"):
        client.import_bundle(short_dir)


def test_a_source_that_fails_is_what_the_caller_sees_and_nothing_is_imported(client: Snapshotd) -> None:
    class Failing(io.BytesIO):
        def read(self, count: int | None = -1, /) -> bytes:
            if self.tell() > MIB:
                raise OSError(5, "Input/output error")
            return super().read(count)

    before = len(client.trajectories())
    for _ in range(5):
        with pytest.raises(OSError, match="Input/output"):
            client.import_bundle(Failing(b"BUNDLE" + b"x" * (4 * MIB)))
    assert len(client.trajectories()) == before


def test_a_caller_that_gives_up_breaks_the_import_off(daemon: Daemon) -> None:
    gate = threading.Event()

    class GivesUp(Exception):  # noqa: N818 - no error of ours
        pass

    class Endless:
        sent = 0

        def read(self, count: int, /) -> bytes:
            if not self.sent:
                self.sent = 1
                return b"BUNDLE give up..." + b"x" * (2 * MIB)
            assert gate.wait(60)
            return b""

    def stop(_: str) -> None:
        raise GivesUp

    with pytest.raises(GivesUp):
        daemon.client.import_bundle(Endless(), progress=stop)
    gate.set()
    log = daemon.state_dir / "daemon.log"
    eventually(lambda: '"path": "/v1/import"' in log.read_text())  # the request has ended
    assert daemon.client.trajectories() == []


def test_a_daemon_that_dies_in_the_middle_of_an_import(daemon: Daemon) -> None:
    client = daemon.client
    with pytest.raises(DaemonUnavailable):
        client.import_bundle(io.BytesIO(b"BUNDLE" + b"x" * (64 * MIB)), progress=lambda _: daemon.kill())


def test_mounts(client: Snapshotd, short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(short_dir)
    with pytest.raises(UsageError, match="no directory"):
        client.mount("all")
    (short_dir / "all").mkdir()
    client.mount("all")
    assert client.status()["mounts"] == {str(short_dir / "all"): os.getpid()}
    with pytest.raises(Conflict):
        client.mount(short_dir / "all")
    client.unmount("all")
    with pytest.raises(NotFound):
        client.unmount("all")
