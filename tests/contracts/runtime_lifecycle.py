"""Runtime contract: creating and destroying containers, and that nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from snapshotd.errors import SandboxFailed
from snapshotd.kernel import mounts
from snapshotd.kernel.holding import cgroup
from snapshotd.runtime.base import Container, ContainerSpec
from snapshotd.types import ContainerID, Network, new_id
from tests import long
from tests.contracts.runtime_rig import (
    DEADLINE_S,
    Rig,
    dead_helpers,
    eventually,
    expect,
    is_zombie,
    members,
    namespace,
    read_all,
    read_lines,
)


def check_create(rig: Rig) -> None:
    spec = rig.spec()
    container = rig.runtime.create(spec)
    try:
        assert container.id == spec.id
        assert members(container) == [container.pid]
        assert spec.id in rig.runtime.list()
    finally:
        rig.runtime.destroy(spec.id)
    assert spec.id not in rig.runtime.list()


def check_destroy_leaves_nothing(rig: Rig) -> None:
    """Processes that detached, ignore signals or were never waited for, their cgroup, mounts and network helper: all
    gone."""
    before = _host_mounts(rig)
    with rig.container(network=Network.BRIDGE) as container:
        stubborn = "trap '' TERM INT HUP; while :; do sleep 1000; done"
        for script in (f'setsid sh -c "{stubborn}" & exit 0', stubborn, "exit 0"):
            process = rig.start(container, "sh", "-c", script)
            os.close(process.stdout_fd)
            os.close(process.stderr_fd)
        pids, net = members(container), namespace(container.pid, "net")
        directories = _cgroup_directories(container)
        assert len(pids) >= 3
        assert directories
        rig.runtime.destroy(container.id)
        _assert_gone(container, pids, net, directories)
    assert _host_mounts(rig) == before


def _assert_gone(container: Container, pids: Sequence[int], net: str, directories: Sequence[Path]) -> None:
    for pid in (container.pid, *pids):
        assert not os.path.exists(f"/proc/{pid}"), Path(f"/proc/{pid}/status").read_text()
    assert [directory for directory in directories if directory.exists()] == []
    holders = [pid for pid in os.listdir("/proc") if pid.isdigit() and _net_of(pid) == net]
    assert holders == [], [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in holders]
    text = b"\0".join(_command_line(pid) for pid in os.listdir("/proc") if pid.isdigit())
    assert container.id.encode() not in text
    assert f"/proc/{container.pid}/ns/net".encode() not in text


def _net_of(pid: str) -> str | None:
    try:
        return namespace(pid, "net")
    except OSError:
        return None


def _command_line(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _host_mounts(rig: Rig) -> list[bytes]:
    """The mounts on the host that can only be the driver's."""
    return sorted(m.point for m in mounts.read_mountinfo() if m.point.startswith(rig.places))


def _open_files() -> list[str]:
    """What this process has open, but sockets: an engine's client keeps up to 25 connections for later."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(target for target in targets if not target.startswith("socket:"))


def _cgroup_directories(container: Container) -> list[Path]:
    paths = {line.split(":", 2)[2] for line in Path(f"/proc/{container.pid}/cgroup").read_text().splitlines()}
    points = [Path(os.fsdecode(m.point)) for m in mounts.read_mountinfo() if m.fs_type in ("cgroup", "cgroup2")]
    found = {point / path.lstrip("/") for point in points for path in paths if container.id in path or len(path) > 60}
    return sorted(directory for directory in found if directory.is_dir())


def check_destroy_is_idempotent(rig: Rig) -> None:
    with rig.container() as container:
        for _ in range(3):
            rig.runtime.destroy(container.id)
    rig.runtime.destroy(ContainerID(new_id()))


def check_destroy_by_several_threads(rig: Rig) -> None:
    """All removals of one container at the same time succeed, also while commands are being started in it."""
    with rig.container() as container, ThreadPoolExecutor(8) as pool:

        def start() -> None:
            try:
                process = rig.start(container, "sleep", "1000")
            except SandboxFailed:
                return
            os.close(process.stdout_fd)
            os.close(process.stderr_fd)

        rig.shell(container, "true")
        work = [pool.submit(start) for _ in range(4)] + [
            pool.submit(rig.runtime.destroy, container.id) for _ in range(4)
        ]
        for future in work:
            future.result(DEADLINE_S)
        rig.runtime.destroy(container.id)
        assert container.id not in rig.runtime.list()
        eventually(lambda: _is_gone(container.pid), "its init is still there")
    assert dead_helpers() == []


def _is_gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")


def check_destroy_frozen(rig: Rig) -> None:
    """A container that a crash left frozen can be removed at once."""
    with rig.container() as container:
        process = rig.start(container, "sleep", "1000")
        cgroup.of_process(container.pid).freeze()
        begin = time.monotonic()
        rig.runtime.destroy(container.id)
        assert time.monotonic() - begin < 8
        assert process.wait(DEADLINE_S) == 137
        os.close(process.stdout_fd)
        os.close(process.stderr_fd)


def check_destroy_ends_commands(rig: Rig) -> None:
    """Whoever waits for a command of a destroyed container gets 137 and the end of its output."""
    with rig.container() as container:
        process = rig.start(container, "sh", "-c", "echo before; exec sleep 1000")
        with ThreadPoolExecutor(1) as pool:
            assert read_lines(process.stdout_fd, 1) == b"before\n"
            waiter = pool.submit(process.wait, DEADLINE_S)
            rig.runtime.destroy(container.id)
            assert waiter.result(DEADLINE_S) == 137
        assert read_all([process.stdout_fd, process.stderr_fd]) == [b"", b""]
        os.close(process.stdout_fd)
        os.close(process.stderr_fd)


def check_dead_container(rig: Rig) -> None:
    """When its init is gone, a command is refused as SandboxFailed, the container is still listed, and it can be
    destroyed."""
    with rig.container() as container:
        os.kill(container.pid, signal.SIGKILL)
        eventually(
            lambda: not os.path.exists(f"/proc/{container.pid}/ns/mnt") or is_zombie(container.pid), "init does not die"
        )
        expect(SandboxFailed, lambda: rig.start(container, "true"), "command in a dead container")
        assert container.id in rig.runtime.list()
        rig.runtime.destroy(container.id)
        assert container.id not in rig.runtime.list()
        expect(SandboxFailed, lambda: rig.start(container, "true"), "command in a destroyed container")


def check_failed_create_leaves_nothing(rig: Rig) -> None:
    before = _host_mounts(rig), rig.runtime.list(), _open_files()
    broken = rig.work / "broken-share"
    (broken / "lib").mkdir(parents=True)
    for content, mode in ((b"", 0o755), (b"not a program", 0o755), (b"\x7fELF", 0o755), (b"", 0o644)):
        (broken / "init").write_bytes(content)
        (broken / "init").chmod(mode)
        spec = rig.spec()
        spec = ContainerSpec(spec.id, spec.run_dir, broken, spec.limits, spec.network)
        expect(SandboxFailed, lambda spec=spec: rig.runtime.create(spec), (content, mode))  # type: ignore[misc]
        after = _host_mounts(rig), rig.runtime.list(), _open_files()
        assert after == before, (before, after)
        assert [p for p in os.listdir("/proc") if p.isdigit() and spec.id.encode() in _command_line(p)] == []
    shutil.rmtree(broken)


def check_concurrent_lifecycles(rig: Rig) -> None:
    """Containers made and destroyed at the same time do not disturb each other."""

    def one(number: int) -> str:
        with rig.container() as container:
            return rig.shell(container, f"echo {number} > /mine; cat /mine")

    with ThreadPoolExecutor(4) as pool:
        count = long.size(5, 8)
        assert list(pool.map(one, range(count))) == [f"{number}\n" for number in range(count)]


def check_logging_never_hurts(rig: Rig) -> None:
    with rig.container() as container:
        for data in (b"", b"line\n", b"x" * (1 << 20), bytes(range(256))):
            rig.runtime.log(container, data)
    rig.runtime.log(container, b"gone\n")


CHECKS: tuple[Callable[[Rig], None], ...] = tuple(
    value for name, value in sorted(globals().items()) if name.startswith("check_")
)
