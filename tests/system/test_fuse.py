"""Mounts, for real: the lazy lower layer under overlayfs and the folder to browse, compared with the original; and what
happens when processes die."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.engine.context import Context
from snapshotd.engine.storage.browse import Browse
from snapshotd.errors import NotFound, SandboxFailed, Unsupported, UsageError
from snapshotd.fuse.child import MountProcess
from snapshotd.fuse.lazy import LazyMount
from snapshotd.kernel import mounts, namespaces
from snapshotd.repo.writing.writer import PackRepository
from snapshotd.store.local import LocalStore
from snapshotd.trees.archive import apply
from snapshotd.types import IdMap, RecordID, Snapshot, TreeID
from tests import forked, long, records
from tests.capabilities import layer_naming, require
from tests.e2e.support import alive
from tests.fuse_rig import CHILD, MANY, READ_ANY, acl, in_user_namespace, make_variety, manifest
from tests.memory_repository import MemoryRepository

SHIFT = 1_700_000_000


@pytest.fixture(autouse=True, scope="module")
def forked_mounts() -> Iterator[None]:
    """A process behind a mount is forked (tests/forked.py); that of a parent that is killed is an interpreter."""
    with forked.children():
        yield


def poll(condition: Callable[[], object], deadline_s: float = 60) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def serving_pid(lazy: LazyMount) -> int:
    server = lazy.server()
    assert server is not None
    return server.pid


class Rig:
    """A repository in a file, mounts of it, and overlays over them. Everything goes with `close`."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.repository = MemoryRepository()
        self.opened = ExitStack()
        self._count = 0
        self._points: list[Path] = []

    def archive(self, folder: Path) -> TreeID:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            result = apply(self.repository, fd, None, salt=os.fsencode(folder), marks=False)
        finally:
            os.close(fd)
        assert result.warnings == ()
        return result.tree

    def saved(self) -> Path:
        path = self.base / "repository"
        if path.is_dir():  # a real one
            return path
        path.write_bytes(pickle.dumps(self.repository))
        return path

    def lazy(self) -> LazyMount:
        mount = LazyMount([*CHILD, "lazy", str(self.saved())], self.base / "lazy")
        self.opened.callback(mount.close)
        return mount

    def overlay(self, lazy_fd: int, image: Path, shift: int = 0) -> Path:
        """Mount what a sandbox would get; returns where. Its upper is `self.base / "layerN" / "upper"`."""
        self._count += 1
        point, layer = self.base / f"merged{self._count}", self.base / f"layer{self._count}"
        for folder in (point, layer, layer / "upper", layer / "work"):
            folder.mkdir()

        def opened(fd: int) -> int:
            held.callback(os.close, fd)
            return fd

        with ExitStack() as held:
            lower, parent = (opened(os.open(folder, os.O_PATH)) for folder in (image, layer))
            if shift:
                mapping = opened(namespaces.user_namespace(IdMap(shift, 65536)))
                lower, parent = (opened(mounts.id_mapped_clone(fd, mapping)) for fd in (lower, parent))
            upper, work = (opened(os.open(name, os.O_PATH, dir_fd=parent)) for name in ("upper", "work"))
            merged = opened(mounts.overlay([lazy_fd, lower], upper, work, layer_naming()))
            mounts.attach(merged, opened(os.open(point, os.O_PATH)))
        self._points.append(point)
        return point

    def leave(self, point: Path) -> None:
        self._points.remove(point)
        mounts.detach(str(point))

    def close(self) -> None:
        for point in list(self._points):
            self.leave(point)
        self.opened.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    require("root", "fuse")
    made = Rig(tmp_path)
    yield made
    made.close()
    assert [m.point for m in mounts.read_mountinfo() if os.fsencode(tmp_path) in m.point] == []


@pytest.fixture
def variety(tmp_path: Path) -> Iterator[Path]:
    require("root")
    root = tmp_path / "variety"
    make_variety(root)
    yield root
    subprocess.run(["rm", "-rf", str(root)], check=True, timeout=60)  # too deep for shutil


# -- the lazy lower ----------------------------------------------------------------------------------------------------


def changed_copy(variety: Path) -> Path:
    """Another version of the variety tree: the image below, with things more, less and other."""
    image = variety.with_name("image")
    image.mkdir()
    names = [entry.path for entry in os.scandir(variety) if entry.name != "deep"]  # too deep for cp
    subprocess.run(["cp", "-a", "--", *names, str(image)], check=True, timeout=60)
    shutil.rmtree(image / "a/b")
    shutil.rmtree(image / "empty directory")
    (image / "empty directory").write_text("was a file")
    (image / "large").unlink()
    (image / "large").mkdir()
    (image / "large/below").touch()
    (image / "only below").mkdir()
    (image / "only below/x").touch()
    for number in range(0, MANY, 2):
        (image / f"many/{number}").unlink()
        (image / f"many/only below {number}").touch()
    (image / "attributes").unlink()
    (image / "attributes").write_text("other")
    return image


def test_an_overlay_over_the_lazy_lower_shows_the_snapshot(rig: Rig, variety: Path) -> None:
    image = changed_copy(variety)
    tree, below = rig.archive(variety), rig.archive(image)
    lazy = rig.lazy()
    fd = lazy.open_layer(tree, below, 0)
    rig.opened.callback(os.close, fd)
    merged = rig.overlay(fd, image)
    expected, found = manifest(variety), manifest(merged)
    del expected[b""], found[b""]  # the root's own attributes are those of the upper
    assert found == expected


def test_a_sandbox_can_change_everything_over_the_lazy_lower(rig: Rig, variety: Path, tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    tree, below = rig.archive(variety), rig.archive(tmp_path / "image")
    fd = rig.lazy().open_layer(tree, below, 0)
    rig.opened.callback(os.close, fd)
    merged = rig.overlay(fd, tmp_path / "image")
    with (merged / "large").open("ab") as f:
        f.write(b"more")
    assert (merged / "large").read_bytes() == (variety / "large").read_bytes() + b"more"
    (merged / "a").rename(merged / "renamed")
    assert sorted(os.listdir(merged / "renamed/b")) == ["c", "third"]
    shutil.rmtree(merged / "many")
    assert not (merged / "many").exists()
    os.chown(merged / "setuid", 5, 5)
    assert (merged / "setuid").stat().st_uid == 5
    assert os.getxattr(merged / "attributes", "system.posix_acl_access") == acl(1000, 5)
    os.setxattr(merged / "attributes", "user.new", b"1")
    assert os.getxattr(merged / "attributes", "security.capability") == READ_ANY
    assert sorted(os.listdir(tmp_path / "layer1/upper")) == ["a", "attributes", "large", "many", "renamed", "setuid"]


@pytest.mark.parametrize("shift", [0, SHIFT])
def test_programs_run_from_the_lazy_lower_as_from_any_root(
    rig: Rig, small_root: Path, tmp_path: Path, shift: int
) -> None:
    """In a user namespace: exec, libraries by mmap, setuid, file capabilities, ACLs; with the ids that belong to the
    container."""
    changed = tmp_path / "changed"
    subprocess.run(["cp", "-a", str(small_root), str(changed)], check=True, timeout=60)
    for program in (changed / "usr/bin").iterdir():
        os.utime(program, ns=(1, 1), follow_symlinks=False)
    shutil.copy(changed / "usr/bin/id", changed / "usr/bin/setuid-id")
    (changed / "usr/bin/setuid-id").chmod(0o4755)
    shutil.copy(changed / "usr/bin/cat", changed / "usr/bin/capable-cat")
    os.setxattr(changed / "usr/bin/capable-cat", "security.capability", READ_ANY)
    (changed / "secret").write_text("secret")
    (changed / "secret").chmod(0o600)
    (changed / "shared").write_text("shared")
    os.setxattr(changed / "shared", "system.posix_acl_access", acl(1000, 4))
    (changed / "answer.pl").write_text("print 6 * 7")
    (changed / "mine").touch()
    os.chown(changed / "mine", 1000, 1001)
    tree, below = rig.archive(changed), rig.archive(small_root)
    fd = rig.lazy().open_layer(tree, below, shift)
    rig.opened.callback(os.close, fd)
    merged = rig.overlay(fd, small_root, shift)
    assert (merged / "mine").stat().st_uid == shift + 1000

    def run(uid: int, *command: str) -> str:
        result = in_user_namespace(shift, uid, merged, *command)
        return result.stdout + result.stderr

    assert run(0, "/bin/stat", "-c", "%u %g %a", "/mine", "/secret") == "1000 1001 644\n0 0 600\n"
    assert run(0, "/bin/perl", "/answer.pl") == "42"
    assert run(1000, "/bin/id", "-u") == "1000\n"
    assert run(1000, "/bin/setuid-id", "-u") == "0\n"
    assert run(1000, "/bin/cat", "/shared") == "shared"
    assert "Permission denied" in run(1001, "/bin/cat", "/shared")
    assert "Permission denied" in run(1000, "/bin/cat", "/secret")
    assert run(1000, "/bin/capable-cat", "/secret") == "secret"
    assert (
        run(0, "/bin/sh", "-c", "echo more >> /secret && cat /secret && chown 7 /mine && stat -c %u /mine")
        == "secretmore\n7\n"
    )
    upper = tmp_path / "layer1/upper"
    assert (upper / "mine").stat().st_uid == 7  # on disk lie the container's ids
    assert run(0, "/bin/touch", "/shared", "/bin/capable-cat", "/bin/setuid-id") == ""
    assert os.getxattr(upper / "shared", "system.posix_acl_access") == acl(1000, 4)
    assert run(1000, "/bin/capable-cat", "/secret", "/shared") == "secretmore\nshared"
    assert run(1000, "/bin/setuid-id", "-u") == "0\n"
    for name in ("shared", "usr/bin/capable-cat", "usr/bin/setuid-id"):
        assert (upper / name).exists()


def test_what_is_no_layer_is_not_there(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    tree = rig.archive(tmp_path / "image")
    lazy = rig.lazy()
    with pytest.raises(SandboxFailed, match=r"ffffffffffff cannot be read through FUSE"):
        lazy.open_layer(TreeID("f" * 64), tree, 0)
    point = tmp_path / "lazy"
    assert os.listdir(point) == []
    for name in ("x", f"0.{tree}", f"0.{tree}.{tree}x", f"-1.{tree}.{tree}", f"99999999999.{tree}.{tree}"):
        assert not (point / name).exists()
    with pytest.raises(OSError, match="Read-only"):
        (point / "x").touch()


def test_damage_is_an_error_and_never_other_bytes(rig: Rig, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder/short").write_bytes(b"s" * 10_000)
    (tmp_path / "folder/missing").write_bytes(b"m" * 10_000)
    (tmp_path / "folder/good").write_bytes(b"g" * 10_000)
    tree, below = rig.archive(tmp_path / "folder"), rig.archive(tmp_path / "empty")
    for content, data in list(rig.repository.contents.items()):
        if data.startswith(b"s"):
            rig.repository.contents[content] = data[:5000]
        elif data.startswith(b"m"):
            del rig.repository.contents[content]
    fd = rig.lazy().open_layer(tree, below, 0)
    rig.opened.callback(os.close, fd)
    merged = rig.overlay(fd, tmp_path / "empty")
    assert (merged / "good").read_bytes() == b"g" * 10_000
    for name in ("short", "missing"):
        with pytest.raises(OSError, match="Input/output error"):
            (merged / name).read_bytes()
        poll(lambda name=name: f"/{name}" in capfd.readouterr().err)


def test_a_layer_that_nobody_uses_is_forgotten(
    rig: Rig, variety: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "image").mkdir()
    tree, below = rig.archive(variety), rig.archive(tmp_path / "image")
    lazy = rig.lazy()
    for _ in range(2):
        fd = lazy.open_layer(tree, below, 0)
        merged = rig.overlay(fd, tmp_path / "image")
        assert len(os.listdir(merged / "many")) == MANY
        assert "has forgotten" not in capfd.readouterr().err
        rig.leave(merged)
        os.close(fd)
        lazy.drop_layer(tree, below, 0)
        poll(lambda: "the kernel has forgotten all of tree" in capfd.readouterr().err)


# -- processes that die ------------------------------------------------------------------------------------------------


def test_killing_the_server_fails_its_readers_at_once_and_it_comes_back(rig: Rig, tmp_path: Path) -> None:
    for name in ("image", "folder"):
        (tmp_path / name).mkdir()
    (tmp_path / "folder/file").write_bytes(b"x" * (8 << 20))
    tree, below = rig.archive(tmp_path / "folder"), rig.archive(tmp_path / "image")
    lazy = rig.lazy()
    fd = lazy.open_layer(tree, below, 0)
    rig.opened.callback(os.close, fd)
    merged = rig.overlay(fd, tmp_path / "image")
    assert lazy.server() is not None
    os.kill(serving_pid(lazy), signal.SIGSTOP)  # so that a reader is certainly in the middle
    reader = subprocess.Popen(
        ["cat", str(merged / "file")], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    poll(
        lambda: (
            "fuse" in Path(f"/proc/{reader.pid}/wchan").read_text()
            or "request_wait" in Path(f"/proc/{reader.pid}/wchan").read_text()
        )
    )
    os.kill(serving_pid(lazy), signal.SIGKILL)
    _, said = reader.communicate(timeout=60)
    assert reader.returncode == 1
    assert any(os.strerror(code) in said for code in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO)), said
    poll(lambda: lazy.server() is None)
    with pytest.raises(OSError, match=r"not connected|aborted|Input"):
        (merged / "file").read_bytes()

    again = lazy.open_layer(tree, below, 0)  # which starts it again
    rig.opened.callback(os.close, again)
    assert (rig.overlay(again, tmp_path / "image") / "file").read_bytes() == b"x" * (8 << 20)
    assert len([m for m in mounts.read_mountinfo() if m.point == os.fsencode(tmp_path / "lazy")]) == 1


def test_a_server_that_does_not_answer_is_killed(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapshotd.fuse.lazy.OPEN_DEADLINE_S", 0.5)
    (tmp_path / "image").mkdir()
    tree = rig.archive(tmp_path / "image")
    lazy = rig.lazy()
    lazy.start()
    os.kill(serving_pid(lazy), signal.SIGSTOP)
    with pytest.raises(SandboxFailed, match="cannot be read through FUSE"):
        lazy.open_layer(tree, tree, 0)
    os.close(lazy.open_layer(tree, tree, 0))


def test_killed_again_and_again_it_never_gives_other_bytes_nor_hangs(rig: Rig, tmp_path: Path) -> None:
    for name in ("image", "folder"):
        (tmp_path / name).mkdir()
    for number in range(40):
        (tmp_path / f"folder/{number}").write_bytes(bytes([number]) * (number << 15))
    tree, below = rig.archive(tmp_path / "folder"), rig.archive(tmp_path / "image")
    lazy = rig.lazy()
    whole = 0
    for round_number in range(6):
        fd = lazy.open_layer(tree, below, 0)
        merged = rig.overlay(fd, tmp_path / "image")
        os.close(fd)
        victim = serving_pid(lazy)
        killer = threading.Timer(0.005 * round_number, os.kill, (victim, signal.SIGKILL))
        killer.start()
        for number in range(40):
            began = time.monotonic()
            try:
                data = (merged / str(number)).read_bytes()
            except OSError:
                pass
            else:
                assert data == bytes([number]) * (number << 15)
                whole += 1
            assert time.monotonic() - began < 60
        killer.join()
        rig.leave(merged)
        poll(lambda: lazy.server() is None)
    assert whole


def test_the_server_ends_and_unmounts_with_its_parent(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    tree = rig.archive(tmp_path / "image")
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(tmp_path / "lazy"), tree, *CHILD, "lazy", str(rig.saved())],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert any(m.point == os.fsencode(tmp_path / "lazy") for m in mounts.read_mountinfo())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    poll(lambda: not alive(child))
    assert not any(m.point == os.fsencode(tmp_path / "lazy") for m in mounts.read_mountinfo())


_PARENT = """
import sys, threading
from pathlib import Path
from snapshotd.fuse.lazy import LazyMount
lazy = LazyMount(sys.argv[3:], Path(sys.argv[1]))
starter = threading.Thread(target=lazy.start)  # a thread that ends must not take the server along
starter.start()
starter.join()
lazy.open_layer(sys.argv[2], sys.argv[2], 0)
print(lazy.server().pid, flush=True)
threading.Event().wait()
"""


def test_a_server_that_cannot_mount_says_so(rig: Rig, tmp_path: Path) -> None:
    lazy = LazyMount([*CHILD, "lazy", str(tmp_path / "no such repository")], tmp_path / "lazy")
    with pytest.raises(Unsupported, match="serve it ended"):
        lazy.start()
    assert lazy.server() is None
    lazy.close()
    lazy.close()


# -- browsing ----------------------------------------------------------------------------------------------------------


class Browsed:
    """A catalog with one trajectory, and its mount at `point`."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.catalog_path = rig.base / "catalog.db"
        self.catalog = SqliteCatalog(self.catalog_path)
        rig.opened.callback(self.catalog.close)
        self.trajectory, self.first = records.started(self.catalog, "fix-it")
        self.point = rig.base / "history"
        self.point.mkdir()

    def store(self, snapshot: Snapshot, tree: TreeID) -> None:
        self.catalog.snapshots.set_stored(snapshot.id, tree, RecordID("e" * 64))

    def mount(self, *more: str) -> MountProcess:
        child = MountProcess([*CHILD, "browse", str(self.rig.saved()), str(self.catalog_path), str(self.point), *more])
        self.rig.opened.callback(child.close)
        return child


@pytest.fixture
def browsed(rig: Rig) -> Browsed:
    return Browsed(rig)


def test_a_browsed_snapshot_equals_the_original(browsed: Browsed, variety: Path) -> None:
    browsed.store(browsed.first, browsed.rig.archive(variety))
    browsed.mount()
    shown = browsed.point / "snapshots" / browsed.first.id
    assert manifest(shown) == manifest(variety)
    assert (shown / "plain").samefile(shown / "a/b/third")
    compared = subprocess.run(
        [
            "rsync",
            "-naHAXS",
            "--numeric-ids",
            "--checksum",
            "--delete",
            "--exclude=/deep/d*",
            "-i",
            f"{variety}/",
            f"{shown}/",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (compared.stdout, compared.stderr) == ("", "")


def test_it_equals_the_original_out_of_packs_read_by_many_at_once(browsed: Browsed, variety: Path) -> None:
    """The real repository, and readers in parallel: requests overlap, large reads go through threads."""
    (variety / "big").mkdir()
    for number in range(long.size(4, 12)):
        (variety / f"big/{number}").write_bytes(hashlib.shake_128(b"%d" % number).digest((number + 1) << 20))
    folder = browsed.rig.base / "repository"
    folder.mkdir()
    writer = PackRepository(LocalStore(folder / "packs"), folder / "index.db", bytes(32))
    fd = os.open(variety, os.O_RDONLY | os.O_DIRECTORY)
    tree = apply(writer, fd, None, salt=b"salt", marks=False).tree
    os.close(fd)
    writer.flush()
    writer.close()
    browsed.store(browsed.first, tree)
    browsed.mount()
    shown = browsed.point / "snapshots" / browsed.first.id
    expected = manifest(variety)
    readers = long.size(3, 6)
    with ThreadPoolExecutor(readers) as pool:
        for found in pool.map(manifest, [shown] * readers):
            assert found == expected


def test_usual_tools_work_across_time(browsed: Browsed, tmp_path: Path) -> None:
    trees = []
    for step in range(3):
        folder = tmp_path / f"step{step}"
        folder.mkdir()
        (folder / "same").write_text("same")
        (folder / "log").write_text(f"step {step}\n")
        trees.append(browsed.rig.archive(folder))
    snapshots = [browsed.first]
    for _ in range(2):
        snapshots.append(records.committed(browsed.catalog, snapshots[-1]))
    for snapshot, tree in zip(snapshots, trees, strict=True):
        browsed.store(snapshot, tree)
    browsed.mount()
    steps = browsed.point / "trajectories/fix-it"
    grep = subprocess.run(
        ["grep", "-r", "step", "."], cwd=steps, capture_output=True, text=True, timeout=60, check=True
    )
    assert sorted(grep.stdout.splitlines()) == [f"./{n}/log:step {n}" for n in range(3)]
    diff = subprocess.run(["diff", "-r", "0", "2"], cwd=steps, capture_output=True, text=True, timeout=60, check=False)
    assert diff.stdout == "diff -r 0/log 2/log\n1c1\n< step 0\n---\n> step 2\n"
    subprocess.run(["cp", "-a", f"{steps}/1", str(tmp_path / "copied")], check=True, timeout=60)
    assert manifest(tmp_path / "copied") == manifest(tmp_path / "step1")
    found = subprocess.run(
        ["find", "-L", ".", "-name", "log"], cwd=browsed.point, capture_output=True, text=True, timeout=60, check=True
    )
    assert len(found.stdout.splitlines()) == 3 * 3  # by name, by id, among all snapshots


def test_listings_are_current_and_only_stored_snapshots_are_there(browsed: Browsed, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    tree = browsed.rig.archive(tmp_path / "folder")
    browsed.mount()
    numbers = browsed.point / "trajectories" / browsed.trajectory.id
    tags, snapshots = browsed.point / "tags", browsed.point / "snapshots"
    assert sorted(os.listdir(browsed.point)) == ["snapshots", "tags", "trajectories"]
    assert sorted(os.listdir(browsed.point / "trajectories")) == sorted([browsed.trajectory.id, "fix-it"])
    assert os.readlink(browsed.point / "trajectories/fix-it") == browsed.trajectory.id
    assert os.listdir(numbers) == os.listdir(snapshots) == os.listdir(tags) == []
    assert not (numbers / "0").exists()
    browsed.store(browsed.first, tree)
    browsed.catalog.refs.tag(browsed.first.id, "good")
    assert os.listdir(numbers) == ["0"]
    assert os.listdir(snapshots) == [browsed.first.id]
    assert os.listdir(tags) == ["good"]
    poll(lambda: (numbers / "0").is_dir() and (tags / "good").is_dir())
    assert os.readlink(tags / "good") == f"../snapshots/{browsed.first.id}"
    browsed.catalog.snapshots.set_pruned([browsed.first.id])
    assert os.listdir(numbers) == os.listdir(snapshots) == os.listdir(tags) == []
    poll(lambda: not (numbers / "0").exists() and not (tags / "good").exists())
    for name in ("00", "-1", "1" * 30, "0 ", "x"):
        assert not (numbers / name).exists()


def test_a_directory_that_is_not_there_is_a_mistake_of_the_user(browsed: Browsed) -> None:
    browsed.point.rmdir()
    with pytest.raises(UsageError, match=r"cannot mount on .*history.: No such file or directory"):
        browsed.mount()
    browsed.point.mkdir()
    with pytest.raises(UsageError, match="there is no process 999999999 "):
        browsed.mount("999999999")


def test_a_plain_umount_ends_the_server(browsed: Browsed) -> None:
    child = browsed.mount()
    subprocess.run(["umount", str(browsed.point)], check=True, timeout=30)
    poll(lambda: not child.alive())
    child.close()


def test_only_root_gets_in(browsed: Browsed) -> None:
    browsed.rig.base.chmod(0o755)
    browsed.mount()
    result = subprocess.run(
        ["ls", str(browsed.point)], user=65534, capture_output=True, text=True, timeout=30, check=False
    )
    assert "Permission denied" in result.stderr


def test_it_mounts_in_the_namespace_of_another_process_and_leaves_nothing(browsed: Browsed) -> None:
    other = subprocess.Popen(
        ["unshare", "--mount", "--", "sh", "-c", "echo ready; read x"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdin is not None
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == b"ready\n"

        def there(pid: int | str) -> bool:
            return any(m.point == os.fsencode(browsed.point) for m in mounts.read_mountinfo(pid))

        child = browsed.mount(str(other.pid))
        assert there(other.pid)
        assert not there("self")
        seen = os.listdir(f"/proc/{other.pid}/root{browsed.point}")
        assert sorted(seen) == ["snapshots", "tags", "trajectories"]
        child.close()
        assert not there(other.pid)
        child = browsed.mount(str(other.pid))
        other.stdin.close()  # the namespace ends, and the server with it
        other.wait(60)
        poll(lambda: not child.alive())
    finally:
        other.kill()
        other.wait()
        other.stdin.close()
        other.stdout.close()


@contextlib.contextmanager
def elsewhere() -> Iterator[int]:
    """A process in a mount namespace of its own."""
    other = subprocess.Popen(
        ["unshare", "--mount", "--", "sh", "-c", "echo ready; read x"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        try:
            yield other.pid
        finally:
            other.kill()


def test_what_a_dead_server_left_goes(browsed: Browsed, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is unmounted, mounted again, when the daemon ends, and when the daemon that had begun it ended before."""
    monkeypatch.setattr("snapshotd.fuse.child.END_DEADLINE_S", 1.0)
    command = [*CHILD, "browse", str(browsed.rig.saved()), str(browsed.catalog_path)]
    own = dict.fromkeys(("state_dir", "run_dir", "share_dir"), browsed.rig.saved())

    def daemon() -> Browse:
        browse = Browse(cast(Context, SimpleNamespace(child=lambda _: command, **own)))
        browsed.rig.opened.callback(browse.close)
        return browse

    with elsewhere() as pid:

        def there() -> int:
            return sum(m.point == os.fsencode(browsed.point) for m in mounts.read_mountinfo(pid))

        def mounted(browse: Browse) -> MountProcess:
            browse.mount(browsed.point, pid)
            (child,) = browse._mounts.values()
            assert there() == 1
            return child

        def killed(browse: Browse) -> None:
            child = mounted(browse)
            child._process.kill()
            poll(lambda: not child.alive())

        browse = daemon()
        killed(browse)
        browse.unmount(browsed.point, pid)
        assert there() == 0
        killed(browse)
        killed(browse)
        browse.close()
        assert there() == 0
        hung = mounted(browse)
        os.kill(hung.pid, signal.SIGSTOP)
        browse.unmount(browsed.point, pid)
        assert there() == 0
        killed(browse)
        killed(daemon())  # which knows nothing of it
        browse = daemon()
        browse.unmount(browsed.point, pid)
        assert there() == 0
        with pytest.raises(NotFound, match="no snapshots mounted"):
            browse.unmount(browsed.point, pid)
        mounted(daemon())
        with pytest.raises(NotFound, match="no snapshots mounted"):
            browse.unmount(browsed.point, pid)
        assert there() == 1, "that of a server that lives is another daemon's"


def test_numbers_of_files_stay_the_same_over_mounts(browsed: Browsed, tmp_path: Path) -> None:
    (tmp_path / "folder/sub").mkdir(parents=True)
    for name in ("a", "b", "sub/c"):
        (tmp_path / "folder" / name).touch()
    os.link(tmp_path / "folder/a", tmp_path / "folder/sub/another a")
    browsed.store(browsed.first, browsed.rig.archive(tmp_path / "folder"))

    def numbers() -> dict[str, int]:
        shown = browsed.point / "snapshots" / browsed.first.id
        return {path.name: path.stat().st_ino for path in shown.rglob("*")}

    child = browsed.mount()
    before = numbers()
    child.close()
    browsed.mount()
    assert numbers() == before
    assert before["a"] == before["another a"]
    assert len(set(before.values())) == len(before) - 1 == 4


def test_the_second_view_of_a_tree_is_a_place_of_its_own(browsed: Browsed, tmp_path: Path) -> None:
    """Were both one directory to the kernel, entering one would move the other."""
    (tmp_path / "folder/sub").mkdir(parents=True)
    tree = browsed.rig.archive(tmp_path / "folder")
    second = records.committed(browsed.catalog, browsed.first)
    browsed.store(browsed.first, tree)
    browsed.store(second, tree)
    browsed.mount()
    places = [browsed.point / "trajectories" / browsed.trajectory.id / n / "sub" for n in ("0", "1")]
    assert len({place.stat().st_ino for place in places}) == 2
    fds = [os.open(place, os.O_RDONLY) for place in places]
    assert [os.readlink(f"/proc/self/fd/{fd}") for fd in fds] == [str(place) for place in places]
    for fd in fds:
        os.close(fd)
