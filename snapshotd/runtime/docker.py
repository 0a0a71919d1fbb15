"""The `docker` driver: containers of a Docker engine on this machine, 20.10 or newer. The only owner of the docker SDK.

A container is made from a stub image (empty directories; imported once, no registry) that carries the name of the image
that will run in it, so that `docker ps`, `docker logs`, `docker exec` and `docker stats` show sandboxes as people
expect:
    name `snapshotd-<short id>`, image `snapshotd/<image name>`, labels snapshotd.instance and snapshotd.container.
The engine makes and removes containers; commands are started through its runc (see `_exec.py` for why). The SDK is
imported where it is used: it is a tenth of the daemon's start, and many a machine has no engine.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import os
import re
import shutil
import socket
import stat
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snapshotd.egress.resolver import RESOLV_CONF, write_resolver
from snapshotd.errors import SandboxFailed, Unsupported
from snapshotd.kernel.files import closing_fd
from snapshotd.kernel.holding import cgroup
from snapshotd.kernel.holding.attempts import attempts
from snapshotd.kernel.namespaces import set_hostname
from snapshotd.runtime import failure
from snapshotd.runtime._checks import check_share_dir, find_container, id_map_of
from snapshotd.runtime._exec import ContainerCommands, RuncContainer
from snapshotd.runtime._oci import INIT_ARGV, STUB_DIRS
from snapshotd.runtime._process import CHILDREN, wait_for_execve
from snapshotd.runtime._teardown import end_all, remove_files
from snapshotd.runtime.base import (
    CAPABILITIES,
    FIRST_HOSTNAME,
    RUN_DIR,
    SHARE_DIR,
    Container,
    ContainerSpec,
    ExecSpec,
    Process,
    Runtime,
)
from snapshotd.runtime.keeper import KeeperClient
from snapshotd.runtime.starter import Starter
from snapshotd.types import ContainerID, short

if TYPE_CHECKING:
    import docker

_STUB_TAG = "snapshotd/stub:1"
"""The number changes with the content of the stub image."""
_INSTANCE_LABEL, _CONTAINER_LABEL = "snapshotd.instance", "snapshotd.container"
_OLDEST_API = (1, 41)
"""Docker 20.10."""
_START_DEADLINE_S = 60.0
_REMOVE_DEADLINE_S = 30.0
_POOL_SIZE = 64


class DockerRuntime(Runtime):
    """Containers through one Docker engine. See the module's text."""

    name = "docker"

    def __init__(self, instance: str, host: str, run_dir: Path, keeper: KeeperClient, starter: Starter) -> None:
        """Nothing is connected or made before the first use. `host` is the engine's address, as in DOCKER_HOST; `run_dir` is
        for short-lived files; `keeper` is the parent of commands that are to outlive the daemon, `starter` starts the others
        where it can."""
        self._instance, self._run_dir, self._host = instance, run_dir, host
        self._starter = starter
        self._commands = ContainerCommands(keeper, starter)
        self._client: docker.DockerClient | None = None
        self._lock = threading.Lock()
        self._image_lock = threading.Lock()
        self._known: dict[ContainerID, RuncContainer] = {}
        self._host_files: dict[ContainerID, tuple[Path, ...]] = {}
        """The engine's files that a container which was not renamed yet sees as /etc/hostname and /etc/hosts."""

    # -- the contract --------------------------------------------------------------------------------------------------

    def unavailable(self) -> str | None:
        path = self._host.removeprefix("unix://")
        if path == self._host:
            return f"DOCKER_HOST={self._host} is not a unix socket: snapshotd needs an engine on this machine"
        reason = _socket_problem(path)
        if reason is not None:
            return reason
        import docker.errors
        import requests.exceptions

        try:
            version = self._api().version()
        except (docker.errors.DockerException, requests.exceptions.RequestException) as exc:
            return (
                f"the Docker engine at {path} does not answer: {failure.shorten(str(exc))}; see `journalctl -u docker`"
            )
        if tuple(int(part) for part in str(version["ApiVersion"]).split(".")) < _OLDEST_API:
            return f"the Docker engine at {path} is version {version['Version']}; 20.10 or newer is needed: upgrade it"
        if shutil.which("runc") is None:
            return "runc, which starts commands in Docker containers, is not on the PATH: `snapshotd setup` installs it"
        return None

    def create(self, spec: ContainerSpec) -> Container:
        reason = self.unavailable()
        if reason is not None:
            raise Unsupported(reason)
        if self._find(spec.id):
            raise SandboxFailed(f"container {short(spec.id)} exists already")
        check_share_dir(spec)
        try:
            with _engine(f"container {short(spec.id)} could not be started"):
                return self._start(spec)
        except BaseException:
            self.destroy(spec.id)
            raise

    def exec(self, container: Container, spec: ExecSpec, *, keep: str | None = None) -> Process:
        known_as = self._runc_container(container.id)
        return self._commands.start(container, known_as, self._run_dir / container.id, spec, keep)

    def prepare(self, container: Container) -> None:
        with contextlib.suppress(SandboxFailed):  # it is gone
            self._commands.prepare(container, self._runc_container(container.id))

    def rename(self, container: Container, hostname: str) -> None:
        set_hostname(container.pid, hostname)
        with self._lock:
            paths = self._host_files.pop(container.id, ())
        for path in paths:
            _replace_word(path, FIRST_HOSTNAME, hostname)

    def attach(self, container_id: ContainerID) -> Container | None:
        with contextlib.suppress(_GoneError):
            return find_container(container_id, self._look_up(container_id)[1])
        return None

    def destroy(self, container_id: ContainerID) -> None:
        for record in self._find(container_id):
            with _engine(f"container {short(container_id)} could not be removed"):
                self._remove(container_id, record["Id"])
        CHILDREN.reap_all(container_id)  # where its init had ended, nothing else does
        with self._lock:
            self._known.pop(container_id, None)
            self._host_files.pop(container_id, None)
        self._starter.forget(container_id)
        remove_files(self._run_dir / container_id)
        with contextlib.suppress(OSError):  # another container's files are in it
            self._run_dir.rmdir()

    def close(self) -> None:
        self._starter.close()

    def list(self) -> list[ContainerID]:
        with _engine("the containers could not be listed"):
            records = self._api().containers(all=True, filters={"label": f"{_INSTANCE_LABEL}={self._instance}"})
        return sorted(ContainerID(record["Labels"][_CONTAINER_LABEL]) for record in records)

    def log(self, container: Container, data: bytes) -> None:
        with self._lock:
            known = self._known.get(container.id)
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
        with (
            contextlib.suppress(OSError),  # it is gone, or the engine reads too slowly: logs are best effort
            closing_fd(os.open(f"/proc/{container.pid}/fd/1", flags)) as output,
        ):
            # Looked at once it is open: its number may have been another process's.
            if known and _groups(known.name, container.pid) and stat.S_ISFIFO(os.fstat(output).st_mode):
                os.write(output, data)

    # -- pieces --------------------------------------------------------------------------------------------------------

    def _api(self) -> Any:
        """The SDK's low-level client; one for all threads (its connection pool is thread-safe)."""
        import docker

        with self._lock:
            if self._client is None:
                self._client = docker.DockerClient(self._host, version="auto", max_pool_size=_POOL_SIZE)
            return self._client.api

    def _find(self, container_id: ContainerID) -> builtins.list[dict[str, Any]]:
        labels = [f"{_INSTANCE_LABEL}={self._instance}", f"{_CONTAINER_LABEL}={container_id}"]
        with _engine(f"container {short(container_id)} could not be looked up"):
            found: builtins.list[dict[str, Any]] = self._api().containers(all=True, filters={"label": labels})
            return found

    def _runc_container(self, container_id: ContainerID) -> RuncContainer:
        """The container as runc knows it. SandboxFailed when it is gone."""
        with self._lock:
            known = self._known.get(container_id)
        return known or self._look_up(container_id)[0]

    def _look_up(self, container_id: ContainerID) -> tuple[RuncContainer, int]:
        """The container as runc knows it, and its init, asked of the engine. _GoneError, SandboxFailed."""
        for record in self._find(container_id):
            with _engine(f"container {short(container_id)} could not be looked up"):
                pid = int(self._api().inspect_container(record["Id"])["State"]["Pid"])
            if pid and _groups(record["Id"], pid):
                try:
                    return self._learn(container_id, record["Id"], pid), pid
                except SandboxFailed:
                    if _groups(record["Id"], pid):
                        raise
                    # else its init ended meanwhile, and runc has forgotten it before the engine has
        raise _GoneError(f"container {short(container_id)} is gone")

    def _learn(self, container_id: ContainerID, docker_id: str, pid: int) -> RuncContainer:
        known = find_runc(docker_id, pid)
        # for short-lived files of commands
        (self._run_dir / container_id).mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._lock:
            return self._known.setdefault(container_id, known)

    def _start(self, spec: ContainerSpec) -> Container:
        api, resolver = self._api(), []
        if spec.network.allows_names:  # for the others the engine writes one
            resolver.append(f"{write_resolver(spec.run_dir, spec.network)}:/etc/{RESOLV_CONF}:ro")
        host_config = api.create_host_config(
            binds=[f"{spec.run_dir}:{RUN_DIR}:ro", f"{spec.share_dir}:{SHARE_DIR}:ro", *resolver],
            cap_drop=["ALL"],
            cap_add=list(CAPABILITIES),
            security_opt=["no-new-privileges"],
            mem_limit=spec.limits.memory_bytes,
            memswap_limit=spec.limits.memory_bytes,
            nano_cpus=int(spec.limits.cpus * 1e9),
            pids_limit=spec.limits.pids,
            network_mode="none" if spec.network.allows_names else str(spec.network),
            read_only=True,
            restart_policy={"Name": "no"},
            init=False,
            cgroupns="private",
        )
        docker_id = api.create_container(
            self._image(spec.image_name),
            name=f"snapshotd-{short(spec.id)}",
            entrypoint=[*INIT_ARGV],
            hostname=FIRST_HOSTNAME,
            labels={_INSTANCE_LABEL: self._instance, _CONTAINER_LABEL: spec.id},
            host_config=host_config,
            user="0:0",
            working_dir="/",
        )["Id"]
        api.start(docker_id)
        made = api.inspect_container(docker_id)
        pid = int(made["State"]["Pid"])
        if (
            not pid
            or not wait_for_execve(pid, _START_DEADLINE_S)
            or not api.inspect_container(docker_id)["State"]["Running"]
        ):
            raise SandboxFailed(
                f"container {short(spec.id)} could not be started: {spec.share_dir / 'init'} does not run; it must be a static program"
            )
        if not os.path.exists(f"/proc/{pid}"):
            raise SandboxFailed(
                f"process {pid} of container {short(spec.id)} is not here: the engine runs on another machine"
            )
        self._learn(spec.id, docker_id, pid)
        with self._lock:
            self._host_files[spec.id] = tuple(Path(made[key]) for key in ("HostnamePath", "HostsPath") if made[key])
        return Container(spec.id, pid, id_map_of(pid))

    def _image(self, name: str) -> str:
        """A tag of the stub image that says `name`, made where missing."""
        import docker.errors

        clean = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:64] or "sandbox"
        api = self._api()
        with self._image_lock:
            try:
                api.inspect_image(_STUB_TAG)
            except docker.errors.ImageNotFound:
                repository, _, tag = _STUB_TAG.partition(":")
                api.import_image_from_data(_stub_tar(), repository=repository, tag=tag)
            api.tag(_STUB_TAG, f"snapshotd/{clean}", tag="latest")
        return f"snapshotd/{clean}"

    def _remove(self, container_id: ContainerID, docker_id: str) -> None:
        """Kill everything first: the engine's own kill would wait for commands that only this process can reap."""
        import docker.errors

        api = self._api()
        try:
            pid = int(api.inspect_container(docker_id)["State"]["Pid"])
        except docker.errors.NotFound:
            return
        if pid:
            _end_init(container_id, docker_id, pid)
        for _ in attempts(_REMOVE_DEADLINE_S, 0.02, 0.02):
            try:
                api.remove_container(docker_id, force=True, v=True)
            except docker.errors.NotFound:
                return
            except docker.errors.APIError as exc:
                if not failure.removal_may_work_again(exc.status_code, exc.explanation or str(exc)):
                    raise
        raise SandboxFailed(f"container {short(container_id)} could not be removed: the engine keeps it; try again")


def _replace_word(path: Path, old: str, new: str) -> None:
    """In a file of the engine, in place: it is mounted in the container. OSError."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(fd, "r+", encoding="utf-8") as f:
        changed = re.sub(rf"(?<!\S){re.escape(old)}(?!\S)", new, f.read())
        f.seek(0)
        f.truncate()
        f.write(changed)


class _GoneError(SandboxFailed):
    """The engine does not know the thing."""


@contextlib.contextmanager
def _engine(what: str) -> Iterator[None]:
    """Turn the SDK's errors into SandboxFailed with the engine's own reason."""
    import docker.errors
    import requests.exceptions

    try:
        yield
    except docker.errors.NotFound as exc:
        raise _GoneError(f"{what}: {failure.shorten(exc.explanation or str(exc))}") from exc
    except docker.errors.APIError as exc:
        raise SandboxFailed(f"{what}: {failure.shorten(exc.explanation or str(exc))}") from exc
    except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as exc:
        raise SandboxFailed(f"{what}: the Docker engine does not answer ({failure.shorten(str(exc))})") from exc


def _socket_problem(path: str) -> str | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.settimeout(5)
            probe.connect(path)
        except FileNotFoundError:
            return (
                f"no Docker engine: {path} does not exist; install Docker, `systemctl start docker`, or set DOCKER_HOST"
            )
        except PermissionError:
            return f"no permission for the Docker engine's socket {path}: run as root or join the group `docker`"
        except ConnectionRefusedError:
            return f"nothing answers at the Docker engine's socket {path}: `systemctl restart docker`"
        except OSError as exc:
            return f"the Docker engine's socket {path} cannot be used: {exc}; `systemctl restart docker`"
    return None


def _stub_tar() -> bytes:
    """The stub image: the directories that a container's mounts need."""
    names = sorted(
        {"/".join(name.split("/")[: depth + 1]) for name in STUB_DIRS for depth in range(len(name.split("/")))}
    )
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in names:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
    return buffer.getvalue()


def _groups(docker_id: str, pid: int) -> list[cgroup.Cgroup]:
    """The cgroups of a container's init: the engine's id is in their paths. Empty: it has ended, and its number may be
    another process's."""
    try:
        return [group for group in cgroup.all_of_process(pid) if docker_id in group.path]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _end_init(container_id: ContainerID, docker_id: str, pid: int) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return  # ended already; the engine has not noticed yet
    with closing_fd(pidfd):
        if groups := _groups(docker_id, pid):
            end_all(container_id, groups, pidfd)


def find_runc(docker_id: str, pid: int) -> RuncContainer:
    """The runc container of a Docker container whose init is `pid`: the working directory of containerd's shim, the
    init's parent, names it.

    Source: containerd's runtime v2; `options.json` holds runc's root and program, the directory above is named after
    the namespace. Raises SandboxFailed when no state of runc is found: the engine uses another OCI runtime.
    """
    candidates = [(Path(root, "docker/runtime-runc/moby"), "runc") for root in ("/run", "/var/run")]
    try:
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        parent = next(line.split()[1] for line in status if line.startswith("PPid:"))
        bundle = Path(os.readlink(f"/proc/{parent}/cwd"))
        options = json.loads((bundle / "options.json").read_text())
        root = Path(options.get("root") or "/run/containerd/runc")
        candidates.insert(0, (root / bundle.parent.name, options.get("binary_name") or "runc"))
    except (OSError, ValueError):
        pass  # another version of containerd: the usual places are left
    for state_dir, program in candidates:
        found = RuncContainer(program, state_dir, docker_id)
        if found.is_known and shutil.which(program):
            return found
    raise SandboxFailed(
        f"runc's state of Docker container {short(docker_id)} is in none of {[str(c[0]) for c in candidates]}; snapshotd needs an engine "
        "whose runtime is runc, and runc on the PATH (`snapshotd setup`)"
    )
