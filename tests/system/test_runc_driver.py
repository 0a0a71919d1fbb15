"""What only the runc driver does: user namespace, its own seccomp profile, slirp4netns, and recovery after a crash of
the daemon."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.errors import SandboxFailed, Unsupported
from snapshotd.runtime import _exec
from snapshotd.runtime.base import DEFAULT_PATH, Container, ContainerSpec, ExecSpec
from snapshotd.runtime.keeper import KeeperClient
from snapshotd.runtime.runc import RuncRuntime
from snapshotd.runtime.starter import Starter
from snapshotd.types import ContainerID, Network, new_id
from tests import rigs
from tests.capabilities import require
from tests.contracts.runtime import Rig, eventually
from tests.contracts.runtime_rig import read_all
from tests.keeper_rig import keepers, killed_daemon
from tests.leftovers import text_of

pytestmark = pytest.mark.runc


@pytest.fixture
def rig(small_root: Path) -> Iterator[Rig]:
    with rigs.work_directory() as directory:
        rig = rigs.runc(f"test-{new_id()[:8]}", directory, small_root, rigs.ID_MAP)
        yield rig
        assert rig.runtime.list() == []
        rig.keeper.close()


def _again(rig: Rig) -> RuncRuntime:
    """The driver as a restarted daemon makes it: same arguments, no memory."""
    old = rig.runtime
    assert isinstance(old, RuncRuntime)
    return RuncRuntime(old._cgroup.removeprefix("/snapshotd-"), old._run_dir, rigs.ID_MAP, rig.keeper, Starter())


def test_root_inside_is_nobody_outside(rig: Rig) -> None:
    with rig.container() as container:
        process = rig.start(container, "sleep", "1000")
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert f"Uid:\t{rigs.ID_MAP.base}\t" in status
        rig.shell(container, "echo x > /root/file; chown 5:6 /root/file")
        made = os.stat(rig.work / "layers" / container.id / "upper/root/file")
        assert (made.st_uid, made.st_gid) == (5, 6)  # on disk: the container's ids
        process.kill()
        os.close(process.stdout_fd)
        os.close(process.stderr_fd)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="system call numbers of x86-64")
def test_own_seccomp_profile(rig: Rig) -> None:
    calls = {
        "AF_ALG": "41, 38, 5, 0",
        "AF_VSOCK": "41, 40, 1, 0",
        "clone3": "435, 0, 0",
        "io_uring_setup": "425, 1, 0",
        "unshare nothing": "272, 0",
        "unshare files": "272, 0x400",
        "unshare time": "272, 0x80",
        "AF_UNIX": "41, 1, 1, 0",
        "adjtimex": "159, 0",
        "personality": "135, 0xffffffff",
        "personality odd": "135, 0x0400000",
    }
    once = '$! = 0; $x = syscall({}); print "{}:", $x < 0 ? $!+0 : 0, "\\n";'
    script = "".join(once.format(arguments, name) for name, arguments in calls.items())
    with rig.container() as container:
        answers = dict(
            line.split(":") for line in rig.run(container, "perl", "-e", script).stdout.decode().splitlines()
        )
    assert answers == {
        "AF_ALG": "1",
        "AF_VSOCK": "1",
        "clone3": "38",
        "io_uring_setup": "1",
        "unshare nothing": "0",
        "unshare files": "0",
        "unshare time": "1",
        "AF_UNIX": "0",
        "adjtimex": "1",
        "personality": "0",
        "personality odd": "1",
    }


def test_a_sandbox_cannot_hold_a_command_for_ever(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """runc reads /etc/passwd in the container; a fifo in its place would block it."""
    monkeypatch.setattr(_exec, "_START_DEADLINE_S", 1.0)
    before = _children()
    with rig.container() as container:
        rig.shell(container, "rm /etc/passwd; mknod /etc/passwd p")
        assert (rig.work / "layers" / container.id / "upper/etc/passwd").is_fifo()
        assert rig.run(container, "true").code == 0  # the starter reads no file of the sandbox
        begin = time.monotonic()
        with rig.by_runc(), pytest.raises(SandboxFailed, match="could not enter"):
            rig.start(container, "true")
        assert time.monotonic() - begin < 30, "half of what it may take without the patch"
        rig.runtime.destroy(container.id)
    names = [text_of(Path(f"/proc/{pid}/comm")).strip() for pid in _children() - before]
    assert not any(name.startswith("runc") for name in names), names


def _children() -> set[str]:
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in text_of(path).split()}


@pytest.mark.parametrize("recorded", [True, False])
def test_a_restarted_daemon_finds_and_removes_everything(rig: Rig, recorded: bool) -> None:
    require("slirp4netns")
    spec = rig.spec(network=Network.BRIDGE)
    container = rig.runtime.create(spec)
    rig.give_root(container)
    process = rig.start(container, "sleep", "1000")
    record = rig.work / "runc/bundles" / container.id / "slirp.pid"
    slirp = int(record.read_text().split()[0])
    if not recorded:
        record.unlink()  # the daemon died right after it had started it
    assert Path(f"/proc/{slirp}/comm").read_text() == "slirp4netns\n"
    again = _again(rig)
    assert again.list() == [container.id]
    again.destroy(container.id)
    assert again.list() == []
    assert process.wait(60) == 137
    for pid in (slirp, container.pid, process.pid):
        eventually(lambda pid=pid: _has_ended(pid), f"process {pid} is still there")  # type: ignore[misc]
    rig.runtime.destroy(container.id)  # reaps the init, which is a child of this process
    assert not os.path.exists(f"/proc/{container.pid}")
    os.close(process.stdout_fd)
    os.close(process.stderr_fd)


_DAEMON = """
    from snapshotd.runtime.runc import RuncRuntime
    from snapshotd.runtime.starter import Starter
    from tests.contracts.runtime_rig import Rig
    from snapshotd.types import Network
    from tests import rigs
    work, tree, instance, init = (pathlib.Path(word) for word in {words!r})
    starter = Starter()
    runtime = RuncRuntime(str(instance), work / "runc", rigs.ID_MAP, keeper, starter)
    rig = Rig(runtime, work, tree, init, keeper=keeper, starter=starter)
    container = rig.runtime.create(rig.spec(network=Network.BRIDGE))
    rig.give_root(container)
    rig.start_kept(container, "agent", "sh", "-c", "echo before; while ! test -e /go; do sleep 0.02; done; echo after; exit 7")
    print(container.id, container.pid)
"""


def test_a_container_and_its_command_outlive_a_daemon_that_is_killed(small_root: Path) -> None:
    """The next one attaches the container, has the command's whole output and its exit code, runs more, and removes
    everything."""
    require("slirp4netns")
    init = shutil.which("catatonit")
    assert init is not None
    with rigs.work_directory() as work:
        instance = f"test-{new_id()[:8]}"
        socket_path = work / "keeper" / "keeper.sock"
        (line,) = killed_daemon(socket_path, _DAEMON.format(words=[str(work), str(small_root), instance, init]))
        container_id, pid = ContainerID(line.split()[0]), int(line.split()[1])
        keeper = KeeperClient(socket_path)
        runtime = RuncRuntime(instance, work / "runc", rigs.ID_MAP, keeper, Starter(used=False))
        assert runtime.list() == [container_id]
        container = runtime.attach(container_id)
        assert container == Container(container_id, pid, rigs.ID_MAP)
        process = keeper.process("agent")
        assert process is not None
        assert process.wait(0) is None
        touch = runtime.exec(container, ExecSpec(["touch", "/go"], cwd="/", env={"PATH": DEFAULT_PATH}))
        assert touch.wait(60) == 0
        assert process.wait(60) == 7
        keeper.drop("agent")
        assert read_all([process.stdout_fd, process.stderr_fd]) == [b"before\nafter\n", b""]
        for fd in (process.stdout_fd, process.stderr_fd, touch.stdout_fd, touch.stderr_fd):
            os.close(fd)
        runtime.destroy(container_id)
        assert runtime.list() == []
        assert runtime.attach(container_id) is None
        keeper.close()
        assert keepers(socket_path) == []


def test_another_process_with_the_inits_number_is_not_attached(rig: Rig) -> None:
    """Neither one of the host nor one of the same container: its numbers may have been given away since."""
    with rig.container() as container, rig.container() as other:
        process = rig.start(container, "sleep", "1000")
        record = rig.work / "runc/state" / container.id / "state.json"
        right, again = record.read_text(), _again(rig)
        for pid in (os.getpid(), 1, process.pid, other.pid, 2**22 + 1, 0, -1):
            record.write_text(json.dumps({**json.loads(right), "init_process_pid": pid}))
            assert again.attach(container.id) is None, pid
        record.write_text("")
        assert again.attach(container.id) is None
        record.write_text(right)
        assert again.attach(container.id) == container
        process.kill()
        os.close(process.stdout_fd)
        os.close(process.stderr_fd)


def _has_ended(pid: int) -> bool:
    """It is gone, or waits for this process to reap it."""
    status = text_of(Path(f"/proc/{pid}/status"))
    return status == "" or ("State:\tZ" in status and f"PPid:\t{os.getpid()}" in status)


def test_half_made_containers_are_listed_and_removed(rig: Rig) -> None:
    """What a crash can leave at any point of a creation: a bundle, a state directory that runc cannot read, a cgroup
    with a process."""
    with rig.container():
        pass  # makes the directories
    run_dir = rig.work / "runc"
    only_bundle, only_state, only_cgroup = (ContainerID(new_id()) for _ in range(3))
    (run_dir / "bundles" / only_bundle).mkdir()
    (run_dir / "state" / only_state).mkdir()
    (run_dir / "state" / only_state / "state.json").write_text("{broken")
    runtime = rig.runtime
    assert isinstance(runtime, RuncRuntime)
    group = Path(runtime._group(only_cgroup).directory)
    group.mkdir(parents=True)
    with subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL) as orphan:
        (group / "cgroup.procs").write_text(str(orphan.pid))
        assert runtime.list() == sorted([only_bundle, only_state, only_cgroup])
        for container_id in (only_bundle, only_state, only_cgroup):
            runtime.destroy(container_id)
        assert orphan.wait(60) == -signal.SIGKILL
    assert runtime.list() == []
    assert not group.parent.exists()


def test_an_id_that_exists_is_refused_and_left_alone(rig: Rig) -> None:
    with rig.container() as container:
        spec = ContainerSpec(container.id, rig.work / "run" / container.id, rig.share, rig.spec().limits, Network.NONE)
        with pytest.raises(SandboxFailed, match="exists already"):
            rig.runtime.create(spec)
        assert rig.shell(container, "echo alive") == "alive\n"


def test_missing_programs_are_named(rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = RuncRuntime("test", tmp_path / "run", None, rig.keeper, Starter())
    assert "runc is not installed" in (missing.unavailable() or "")
    with pytest.raises(Unsupported, match="runc is not installed"):
        missing.create(rig.spec())
    (tmp_path / "runc").symlink_to("/usr/sbin/runc")
    with pytest.raises(Unsupported, match="slirp4netns"):
        rig.runtime.create(rig.spec(network=Network.BRIDGE))
    assert rig.runtime.list() == []
    assert not (tmp_path / "run").exists()


def test_a_share_that_cannot_be_executed_is_named(rig: Rig) -> None:
    spec = rig.spec()
    (rig.share / "init").chmod(0o644)
    try:
        with pytest.raises(SandboxFailed, match="cannot be executed"):
            rig.runtime.create(spec)
    finally:
        (rig.share / "init").chmod(0o755)
