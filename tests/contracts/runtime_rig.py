"""What the checks of the runtime contract share: real containers of one driver, each with a real root, and ways to look
at them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from snapshotd.errors import SnapshotdError
from snapshotd.kernel import files, mounts, namespaces
from snapshotd.kernel import syscalls as sc
from snapshotd.runtime.base import DEFAULT_PATH, Container, ContainerSpec, ExecSpec, Process, Runtime
from snapshotd.runtime.keeper import KeeperClient
from snapshotd.runtime.starter import Starter
from snapshotd.types import ContainerID, Limits, Network, new_id
from tests import capabilities

_NS_GET_OWNER_UID = 0xB704
DEADLINE_S = 60.0
_LIMITS = Limits(memory_bytes=256 << 20, cpus=0.5, pids=64)


@dataclass(frozen=True, slots=True)
class Output:
    """What a command did."""

    code: int | None
    stdout: bytes
    stderr: bytes


class Rig:
    """Containers of one driver. `work` is an empty directory that everybody may search; `tree` a root file system with
    `sh`, the usual small tools and perl; `init` the static init program; `places` are directories of the runtime below
    which mounts are its own."""

    def __init__(
        self,
        runtime: Runtime,
        work: Path,
        tree: Path,
        init: Path,
        places: Sequence[Path] = (),
        *,
        keeper: KeeperClient,
        starter: Starter,
        with_user_namespaces: bool = False,
    ) -> None:
        """`keeper` and `starter` are the driver's. `with_user_namespaces`: its containers have their own."""
        self.with_user_namespaces = with_user_namespaces
        self._starter = starter
        self._used: Container | None = None
        self.runtime = runtime
        self.keeper = keeper
        self.places = tuple(os.fsencode(place) + b"/" for place in (work, *places))
        self.work = work
        self.tree = tree
        self.share = work / "share"
        (self.share / "lib").mkdir(parents=True)
        shutil.copy(init, self.share / "init")
        for directory in (work, self.share, self.share / "lib", self.share / "init"):
            directory.chmod(0o755)

    @contextlib.contextmanager
    def by_runc(self) -> Iterator[None]:
        """Commands are started by `runc exec`, and containers by `runc run`."""
        self._starter.used = False
        try:
            yield
        finally:
            self._starter.used = True

    def forget(self, container: Container) -> None:
        """Its next command gets a new resident."""
        self._starter.forget(container.id)

    def spec(self, *, limits: Limits = _LIMITS, network: Network = Network.NONE) -> ContainerSpec:
        """A spec with a fresh id and run directory."""
        container_id = ContainerID(new_id())
        run_dir = self.work / "run" / container_id
        run_dir.mkdir(parents=True)
        for directory in (self.work / "run", run_dir):
            directory.chmod(0o711)
        return ContainerSpec(container_id, run_dir, self.share, limits, network, image_name="contract")

    @contextlib.contextmanager
    def container(self, *, limits: Limits = _LIMITS, network: Network = Network.NONE) -> Iterator[Container]:
        """A container with a real root; destroyed at the end."""
        spec = self.spec(limits=limits, network=network)
        container = self.runtime.create(spec)
        try:
            self.give_root(container)
            yield container
        finally:
            self.runtime.destroy(spec.id)

    @contextlib.contextmanager
    def used_container(self) -> Iterator[Container]:
        """The container that other checks run commands in too: with a fresh root, and no process but its init. For
        checks that leave it as it was."""
        if self._used is None:
            self._used = self.runtime.create(self.spec())
        container = self._used
        try:
            self.give_root(container, new_id())
            yield container
            self._end_commands(container)
        except BaseException:
            self.destroy_used()
            raise

    def destroy_used(self) -> None:
        """Destroy the container that checks shared, if there is one."""
        if self._used is not None:
            self.runtime.destroy(self._used.id)
            self._used = None

    def _end_commands(self, container: Container) -> None:
        def ended() -> bool:
            others = [pid for pid in members(container) if pid != container.pid]
            for pid in others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not others

        eventually(ended, "what a check started does not end")

    def give_root(self, container: Container, name: str = "") -> None:
        """Pivot the container into a fresh overlay over the tree. `name`: of its layer; "" is the container's id."""
        layer = self.work / "layers" / (name or container.id)
        for part in ("upper", "work"):
            (layer / part).mkdir(parents=True)
            (layer / part).chmod(0o755)
        give_root(container, self.tree, layer)

    def start(self, container: Container, *argv: str, **options: object) -> Process:
        """`exec` with root's PATH, in / unless told otherwise."""
        return self.runtime.exec(container, _exec_spec(argv, options))

    def start_kept(self, container: Container, key: str, *argv: str, **options: object) -> Process:
        """The same as a kept command."""
        return self.runtime.exec(container, _exec_spec(argv, options), keep=key)

    def run(self, container: Container, *argv: str, **options: object) -> Output:
        """Run a command to its end, both streams read to theirs."""
        process = self.start(container, *argv, **options)
        try:
            stdout, stderr = read_all([process.stdout_fd, process.stderr_fd])
        finally:
            os.close(process.stdout_fd)
            os.close(process.stderr_fd)
        return Output(process.wait(DEADLINE_S), stdout, stderr)

    def shell(self, container: Container, script: str, **options: object) -> str:
        """Standard output of a shell script that must succeed."""
        output = self.run(container, "sh", "-c", script, **options)
        assert output.code == 0, output
        return output.stdout.decode()


def _exec_spec(argv: Sequence[str], options: Mapping[str, object]) -> ExecSpec:
    given = {"cwd": "/", "env": {"PATH": DEFAULT_PATH, "HOME": "/root"}, **options}
    return ExecSpec(argv, **given)  # type: ignore[arg-type]


def give_root(container: Container, tree: Path, layer: Path) -> None:
    """Pivot `container` into an overlay of `layer` (upper, work) over `tree`. What the engine does with layers, without
    its store."""
    with contextlib.ExitStack() as opened:

        def hold(fd: int) -> int:
            opened.callback(os.close, fd)
            return fd

        def directory(path: Path) -> int:
            fd = hold(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
            if container.id_map is None:
                return fd
            userns = hold(namespaces.user_namespace(container.id_map))
            clone = hold(mounts.id_mapped_clone(fd, userns))
            if capabilities.layer_naming() is not mounts.LayerNaming.DESCRIPTOR:
                place = tempfile.mkdtemp(dir=layer)  # these kernels take no layer of a mount that is nowhere
                mounts.attach(clone, hold(os.open(place, os.O_PATH | os.O_CLOEXEC)))
                opened.callback(os.rmdir, place)
                opened.callback(mounts.detach, place)
            return clone

        parent = directory(layer)
        upper, work = (
            hold(os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)) for part in ("upper", "work")
        )
        new_root = hold(mounts.overlay([directory(tree)], upper, work, capabilities.layer_naming()))
        namespace = hold(os.open(f"/proc/{container.pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC))
        points = [m.point for m in mounts.read_mountinfo(container.pid) if m.point != b"/"]
        top = [p for p in dict.fromkeys(points) if not any(p.startswith(q + b"/") for q in points)]
        namespaces.in_mount_namespace(namespace, lambda: _switch(new_root, top))


def _switch(new_root: int, points: Sequence[bytes]) -> None:
    os.chdir("/")
    trees = [(point, mounts.clone(sc.AT_FDCWD, point, recursive=True)) for point in points]
    spot = os.open("/proc", os.O_PATH)
    mounts.attach(new_root, spot)
    os.close(spot)
    for point, tree in trees:
        spot = files.open_beneath(new_root, point[1:], os.O_PATH)
        mounts.attach(tree, spot)
        os.close(spot)
        os.close(tree)
    os.fchdir(new_root)
    sc.call("pivot_root", b".", b".")
    mounts.detach(b".")


def read_all(fds: Sequence[int]) -> list[bytes]:
    """Read several descriptors to their ends at once. AssertionError after the deadline."""
    parts: dict[int, list[bytes]] = {fd: [] for fd in fds}
    deadline = time.monotonic() + DEADLINE_S
    with selectors.DefaultSelector() as selector:
        for fd in fds:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(deadline - time.monotonic())
            assert ready, "no end of file within the deadline"
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                parts[key.fd].append(data)
                if not data:
                    selector.unregister(key.fd)
    return [b"".join(parts[fd]) for fd in fds]


def eventually(true: Callable[[], bool], what: str) -> None:
    """Wait until something holds; AssertionError after the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:.0f} s: {what}"
        time.sleep(0.005)


def namespace(pid: int | str, kind: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/{kind}")


def namespace_owner(pid: int) -> int:
    """The user of the host to whom a process's user namespace belongs."""
    fd, owner = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC), bytearray(4)
    try:
        fcntl.ioctl(fd, _NS_GET_OWNER_UID, owner)
    finally:
        os.close(fd)
    return int.from_bytes(owner, sys.byteorder)


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def members(container: Container) -> list[int]:
    """Every process in the container's pid namespace, as the host numbers them; zombies included."""
    own, found = namespace(container.pid, "pid"), []
    for pid in os.listdir("/proc"):
        if pid.isdigit():
            try:
                if namespace(pid, "pid") == own:
                    found.append(int(pid))
            except OSError:
                continue  # ended
    return sorted(found)


def expect(error: type[SnapshotdError], action: Callable[[], object], what: object) -> SnapshotdError:
    try:
        outcome: object = action()
    except SnapshotdError as exc:
        outcome = exc
    assert isinstance(outcome, error), f"{what}: {outcome!r} instead of {error.__name__}"
    assert len(outcome.message) < 1000, f"{what}: {outcome}"
    assert "\n" not in outcome.message, f"{what}: {outcome}"
    return outcome


def dead_helpers() -> list[str]:
    """Zombies of the runtime's own programs among this process's children: each would stay for as long as the daemon
    runs."""
    children = [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
    return [
        name
        for pid in children
        if is_zombie(int(pid)) and (name := Path(f"/proc/{pid}/comm").read_text()).startswith("runc")
    ]


def read_lines(fd: int, lines: int) -> bytes:
    data = b""
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while data.count(b"\n") < lines:
            assert selector.select(DEADLINE_S), f"only {data!r} came"
            part = os.read(fd, 4096)
            assert part, f"ended after {data!r}"
            data += part
    return data
