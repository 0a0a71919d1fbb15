"""The `docker` driver: containers of a Docker engine on this machine, 20.10 or newer. The only owner of the docker SDK.

A container is made from a stub image (empty directories; imported once, no registry) that carries the name of what will run in it, so
that `docker ps`, `docker logs`, `docker exec` and `docker stats` show sandboxes as people expect:
    name `snapshotd-<short id>`, image `snapshotd/<image name>`, labels snapshotd.instance and snapshotd.container.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import re
import socket
import stat
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import docker.errors
import requests.exceptions

from snapshotd.errors import SandboxFailed, SnapshotdError, Unsupported
from snapshotd.kernel import cgroup
from snapshotd.runtime import failure
from snapshotd.runtime._checks import check_exec, check_ids, check_share_dir
from snapshotd.runtime._docker_exec import DockerProcess, Pump, open_stream
from snapshotd.runtime._oci import INIT_ARGV, STUB_DIRS
from snapshotd.runtime._process import wait_for_execve
from snapshotd.runtime.base import CAPABILITIES, RUN_DIR, SHARE_DIR, Container, ContainerSpec, ExecSpec, Process, Runtime
from snapshotd.types import ContainerID, IdMap, Network, short

_STUB_TAG = "snapshotd/stub:1"
"""The number changes with the content of the stub image."""
_INSTANCE_LABEL, _CONTAINER_LABEL = "snapshotd.instance", "snapshotd.container"
_OLDEST_API = (1, 41)
"""Docker 20.10."""
_WHOLE_ID_RANGE = 2**32 - 1
_START_DEADLINE_S = 60.0
_REMOVE_DEADLINE_S = 30.0
_PAUSED_RETRY_S = 0.01
"""A sandbox is frozen for milliseconds."""
_POOL_SIZE = 64

ClientFactory = Callable[[], docker.DockerClient]


def _from_env() -> docker.DockerClient:
    return docker.from_env(version="auto", max_pool_size=_POOL_SIZE)


class DockerRuntime(Runtime):
    """Containers through the Docker engine that DOCKER_HOST names, else the local default one. See the module's text."""

    name = "docker"

    def __init__(self, instance: str, client: ClientFactory = _from_env) -> None:
        """Nothing is connected before the first use. `client` makes the SDK's client."""
        self._instance = instance
        self._make_client = client
        self._client: docker.DockerClient | None = None
        self._lock = threading.Lock()
        self._image_lock = threading.Lock()
        self._processes: dict[ContainerID, builtins.list[DockerProcess]] = {}
        self._names: dict[ContainerID, str] = {}

    # -- the contract --------------------------------------------------------------------------------------------------------

    def unavailable(self) -> str | None:
        if os.geteuid() != 0:
            return "sandboxes in Docker containers need root: start the daemon as root (`sudo snapshotd daemon`)"
        path = socket_path()
        if path is None:
            return f"DOCKER_HOST={os.environ.get('DOCKER_HOST')} is not a unix socket: snapshotd needs an engine on this machine"
        reason = _socket_problem(path)
        if reason is not None:
            return reason
        try:
            version = self._api().version()
        except (docker.errors.DockerException, requests.exceptions.RequestException) as exc:
            return f"the Docker engine at {path} does not answer: {failure.shorten(str(exc))}; see `journalctl -u docker`"
        if tuple(int(part) for part in str(version["ApiVersion"]).split(".")) < _OLDEST_API:
            return f"the Docker engine at {path} is version {version['Version']}; 20.10 or newer is needed: upgrade it"
        return None

    def nameserver(self, network: Network) -> str | None:
        """Always None: the engine mounts a resolv.conf of its own into the container."""
        del network
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

    def exec(self, container: Container, spec: ExecSpec) -> Process:
        check_exec(spec)
        check_ids(spec, container.id_map)
        with _engine(f"a command could not be started in container {short(container.id)}"):
            process = self._start_command(container, spec)
        with self._lock:
            known = self._processes.setdefault(container.id, [])
            known[:] = [p for p in known if not p.ended]
            known.append(process)
        return process

    def destroy(self, container_id: ContainerID) -> None:
        with self._lock:
            processes = self._processes.pop(container_id, [])
            self._names.pop(container_id, None)
        for record in self._find(container_id):
            with _engine(f"container {short(container_id)} could not be removed"):
                self._remove(record["Id"], processes)

    def list(self) -> list[ContainerID]:
        with _engine("the containers could not be listed"):
            records = self._api().containers(all=True, filters={"label": f"{_INSTANCE_LABEL}={self._instance}"})
        return sorted(ContainerID(record["Labels"][_CONTAINER_LABEL]) for record in records)

    def log(self, container: Container, data: bytes) -> None:
        try:
            directory = os.open(f"/proc/{container.pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return  # the container is gone
        try:
            # Through one descriptor of the process's directory: a process that got the same number later is not meant.
            if not self._is_init(directory, container.id):
                return
            output = os.open("fd/1", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
            try:
                if stat.S_ISFIFO(os.fstat(output).st_mode):
                    os.write(output, data)
            finally:
                os.close(output)
        except OSError:
            pass  # the engine reads too slowly or is gone: logs are best effort
        finally:
            os.close(directory)

    # -- pieces --------------------------------------------------------------------------------------------------------------

    def _api(self) -> Any:
        """The SDK's low-level client; one for all threads (its connection pool is thread-safe)."""
        with self._lock:
            if self._client is None:
                self._client = self._make_client()
            return self._client.api

    def _find(self, container_id: ContainerID) -> builtins.list[dict[str, Any]]:
        labels = [f"{_INSTANCE_LABEL}={self._instance}", f"{_CONTAINER_LABEL}={container_id}"]
        with _engine(f"container {short(container_id)} could not be looked up"):
            found: builtins.list[dict[str, Any]] = self._api().containers(all=True, filters={"label": labels})
            return found

    def _docker_id(self, container_id: ContainerID) -> str:
        with self._lock:
            known = self._names.get(container_id)
        if known is not None:
            return known
        for record in self._find(container_id):
            with self._lock:
                return self._names.setdefault(container_id, record["Id"])
        raise SandboxFailed(f"container {short(container_id)} is gone")

    def _start(self, spec: ContainerSpec) -> Container:
        api = self._api()
        host_config = api.create_host_config(
            binds=[f"{spec.run_dir}:{RUN_DIR}:ro", f"{spec.share_dir}:{SHARE_DIR}:ro"], cap_drop=["ALL"], cap_add=list(CAPABILITIES),
            security_opt=["no-new-privileges"], mem_limit=spec.limits.memory_bytes, memswap_limit=spec.limits.memory_bytes,
            nano_cpus=int(spec.limits.cpus * 1e9), pids_limit=spec.limits.pids, network_mode=str(spec.network.value), read_only=True,
            restart_policy={"Name": "no"}, init=False, cgroupns="private",
        )  # fmt: skip
        docker_id = api.create_container(
            self._image(spec.image_name), name=f"snapshotd-{short(spec.id)}", entrypoint=[*INIT_ARGV], hostname=spec.hostname,
            labels={_INSTANCE_LABEL: self._instance, _CONTAINER_LABEL: spec.id}, host_config=host_config, user="0:0", working_dir="/",
        )["Id"]  # fmt: skip
        api.start(docker_id)
        pid = int(api.inspect_container(docker_id)["State"]["Pid"])
        if not pid or not wait_for_execve(pid, _START_DEADLINE_S) or not api.inspect_container(docker_id)["State"]["Running"]:
            raise SandboxFailed(
                f"container {short(spec.id)} could not be started: {spec.share_dir / 'init'} does not run; it must be a static program"
            )
        with self._lock:
            self._names[spec.id] = docker_id
        try:
            return Container(spec.id, pid, _id_map(pid))
        except FileNotFoundError as exc:
            raise SandboxFailed(f"process {pid} of container {short(spec.id)} is not here: the engine runs on another machine") from exc

    def _image(self, name: str) -> str:
        """A tag of the stub image that says `name`, made where missing."""
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

    def _start_command(self, container: Container, spec: ExecSpec) -> DockerProcess:
        """The running command. Waits while the container is frozen, which the engine itself refuses to do."""
        api = self._api()
        deadline = time.monotonic() + _START_DEADLINE_S
        while True:
            exec_id = api.exec_create(
                self._docker_id(container.id), list(spec.argv), environment=_environment(spec), workdir=spec.cwd,
                user=f"{spec.user}:{spec.group}", stdout=True, stderr=True, stdin=False, tty=False,
            )["Id"]  # fmt: skip
            pump = Pump(*open_stream(socket_path() or "", api.api_version, exec_id))
            try:
                return self._started(exec_id, pump, spec)
            except BaseException as exc:
                pump.abandon()
                if not isinstance(exc, SandboxFailed) or not failure.is_paused(exc.message) or time.monotonic() > deadline:
                    raise
            time.sleep(_PAUSED_RETRY_S)

    def _started(self, exec_id: str, pump: Pump, spec: ExecSpec) -> DockerProcess:
        """The running command; raises the error that says why it does not run."""
        inspect = self._inspector(exec_id)
        deadline = time.monotonic() + _START_DEADLINE_S
        delay = 0.001
        while True:
            record = inspect()
            if record is None:
                raise SandboxFailed("the container is gone")
            if record["Pid"] or record["ExitCode"] is not None:
                break
            if time.monotonic() > deadline:
                raise SandboxFailed(f"the Docker engine did not start the command within {_START_DEADLINE_S:.0f} s")
            time.sleep(delay)
            delay = min(delay * 2, 0.02)
        pid = int(record["Pid"] or 0)
        if pid == 0 or not wait_for_execve(pid, _START_DEADLINE_S) or _failed_unseen(pump, inspect, pid):
            pump.ended(_REMOVE_DEADLINE_S)
            raise failure.command_failure(pump.first_words(), spec.argv[0], spec.cwd)
        return DockerProcess(pid, pump, inspect)

    def _inspector(self, exec_id: str) -> Callable[[], dict[str, Any] | None]:
        def inspect() -> dict[str, Any] | None:
            try:
                with _engine("the state of a command could not be read"):
                    record: dict[str, Any] = self._api().exec_inspect(exec_id)
                    return record
            except _Gone:
                return None

        return inspect

    def _remove(self, docker_id: str, processes: builtins.list[DockerProcess]) -> None:
        api = self._api()
        try:
            pid = int(api.inspect_container(docker_id)["State"]["Pid"])
            if pid:
                _thaw(pid)
                api.kill(docker_id)
        except docker.errors.APIError as exc:
            if exc.status_code not in (404, 409):  # gone, or not running
                raise
        deadline = time.monotonic() + _REMOVE_DEADLINE_S
        for process in processes:  # the engine forgets exit codes together with the container
            process.finish(max(0.0, deadline - time.monotonic()))
        while True:
            try:
                api.remove_container(docker_id, force=True, v=True)
            except docker.errors.NotFound:
                return
            except docker.errors.APIError as exc:
                if exc.status_code != 409 or time.monotonic() > deadline:  # 409: another removal is under way
                    raise
                time.sleep(0.02)

    def _is_init(self, proc_fd: int, container_id: ContainerID) -> bool:
        """Whether a /proc/PID directory belongs to the container: the engine's id is in the path of its cgroup."""
        with self._lock:
            docker_id = self._names.get(container_id)
        fd = os.open("cgroup", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc_fd)
        with open(fd, "rb") as f:
            return docker_id is not None and docker_id.encode() in f.read()


class _Gone(SandboxFailed):
    """The engine does not know the thing."""


@contextlib.contextmanager
def _engine(what: str) -> Iterator[None]:
    """Turn the SDK's errors into SandboxFailed with the engine's own reason."""
    try:
        yield
    except docker.errors.NotFound as exc:
        raise _Gone(f"{what}: {failure.shorten(exc.explanation or str(exc))}") from exc
    except docker.errors.APIError as exc:
        raise SandboxFailed(f"{what}: {failure.shorten(exc.explanation or str(exc))}") from exc
    except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as exc:
        raise SandboxFailed(f"{what}: the Docker engine does not answer ({failure.shorten(str(exc))})") from exc


def socket_path() -> str | None:
    """The engine's unix socket as DOCKER_HOST names it; None when it names something else."""
    host = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    return host.removeprefix("unix://") if host.startswith("unix://") else None


def _socket_problem(path: str) -> str | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.settimeout(5)
            probe.connect(path)
        except FileNotFoundError:
            return f"no Docker engine: {path} does not exist; `apt install docker.io`, `systemctl start docker`, or set DOCKER_HOST"
        except PermissionError:
            return f"no permission for the Docker engine's socket {path}: run as root or join the group `docker`"
        except ConnectionRefusedError:
            return f"nothing answers at the Docker engine's socket {path}: `systemctl restart docker`"
        except OSError as exc:
            return f"the Docker engine's socket {path} cannot be used: {exc}; `systemctl restart docker`"
    return None


def _stub_tar() -> bytes:
    """The stub image: the directories that a container's mounts need."""
    names = sorted({"/".join(name.split("/")[: depth + 1]) for name in STUB_DIRS for depth in range(len(name.split("/")))})
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in names:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
    return buffer.getvalue()


def _environment(spec: ExecSpec) -> dict[str, str | None]:
    """The environment and nothing else: the engine adds PATH and HOSTNAME of its own, unless they are named without a value."""
    return {"PATH": None, "HOSTNAME": None, **spec.env}


def _id_map(pid: int) -> IdMap | None:
    """The container's id map; None when it has no user namespace of its own."""
    lines = Path(f"/proc/{pid}/uid_map").read_text().split()
    inside, outside, count = (int(word) for word in lines[:3])
    if (inside, outside) == (0, 0) and count == _WHOLE_ID_RANGE:
        return None
    if inside != 0 or len(lines) != 3:
        raise SandboxFailed("the Docker engine maps user ids in several pieces; snapshotd needs one contiguous range")
    return IdMap(outside, count)


def _thaw(pid: int) -> None:
    try:
        cgroup.of_process(pid).thaw()
    except SnapshotdError:
        pass  # it is gone already


def _failed_unseen(pump: Pump, inspect: Callable[[], dict[str, Any] | None], pid: int) -> bool:
    """Whether the command failed in execve(2) and was reaped by the engine before it could be looked at.

    It looks like a command that ended with code 1 and one line of runc's on its standard error.
    """
    if os.path.exists(f"/proc/{pid}"):
        return False
    record = inspect()
    return record is not None and record["ExitCode"] == 1 and failure.is_execve_text(pump.first_words())
