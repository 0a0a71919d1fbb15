"""A Docker engine for the tests: the one that answers, else a private one with its own socket, data, bridge and
containerd."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import docker
import docker.errors

TRIMMED_RUNTIME = "trimmed"
"""The private engine's runtime for privileged containers where the machine itself does not hold every capability."""
_START_DEADLINE_S = 60.0
_STOP_DEADLINE_S = 40.0
_LOG_TAIL_CHARS = 3000


@dataclass(frozen=True, slots=True)
class Engine:
    """`host` is the value for DOCKER_HOST; `data_root` and `exec_root` are where the engine mounts things."""

    host: str
    data_root: Path
    exec_root: Path
    private: bool


def answers() -> bool:
    """Whether an engine answers at DOCKER_HOST or the default socket."""
    try:
        client = docker.from_env(timeout=5)
    except docker.errors.DockerException:
        return False
    try:
        return bool(client.ping())
    except (docker.errors.DockerException, OSError):
        return False
    finally:
        client.close()


@contextlib.contextmanager
def engine() -> Iterator[Engine]:
    """An engine, with DOCKER_HOST set to it; a private one is stopped and every trace of it removed at the end."""
    if answers():
        host = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        client = docker.from_env()
        data_root = Path(client.info()["DockerRootDir"])
        client.close()
        yield Engine(host, data_root, Path("/run/docker"), private=False)
        return
    directory = Path(tempfile.mkdtemp(prefix="snapshotd-dockerd-", dir="/var/tmp"))
    directory.chmod(0o711)
    before = os.environ.get("DOCKER_HOST")
    try:
        with _bridge() as bridge:
            found = Engine(f"unix://{directory}/docker.sock", directory / "data", directory / "exec", private=True)
            os.environ["DOCKER_HOST"] = found.host
            with _one_at_a_time():
                process = _start(found, directory, bridge)
            try:
                yield found
            finally:
                _stop(process)
    finally:
        if before is None:
            os.environ.pop("DOCKER_HOST", None)
        else:
            os.environ["DOCKER_HOST"] = before
        _unmount_below(directory)
        shutil.rmtree(directory)


@contextlib.contextmanager
def _bridge() -> Iterator[str]:
    """A bridge of our own: docker0 belongs to whichever engine started last on the machine."""
    address = free_address(213)
    name = f"sndtest{os.getpid() % 1_000_000}"
    # A bridge without an address of its own takes that of its lowest port, which is another one when a container begins
    # or ends. The other containers then send to the old one for half a minute.
    _ip("link", "add", "name", name, "address", _mac(os.getpid()), "type", "bridge")
    try:
        _ip("address", "add", f"{address}/24", "dev", name)
        _ip("link", "set", name, "up")
        yield name
    finally:
        _ip("link", "delete", name)
        _forget_rules(name)


def free_address(second: int) -> str:
    """10.`second`.N.1, which no bridge has, also none that a killed run has left: replies would go there."""
    shown = subprocess.run(["ip", "-4", "-o", "address"], check=True, capture_output=True, timeout=30, text=True).stdout
    candidates = (f"10.{second}.{one % 200}.1" for one in range(os.getpid(), os.getpid() + 200))
    return next(address for address in candidates if f" {address}/" not in shown)


def _mac(number: int) -> str:
    """A locally administered Ethernet address."""
    return ":".join(f"{byte:02x}" for byte in (0x02, 0x42, *number.to_bytes(4, "big")))


def _forget_rules(bridge: str) -> None:
    """The engine leaves the firewall rules of its bridge behind when it ends."""
    for table in ("nat", "filter"):
        listed = subprocess.run(
            ["iptables", "-w", "-t", table, "-S"],
            check=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=30,
            text=True,
        )
        for rule in listed.stdout.splitlines():
            if rule.startswith("-A ") and bridge in rule.split():
                arguments = ["iptables", "-w", "-t", table, "-D", *rule.split()[1:]]
                # Not checked: another engine that starts or ends makes its chains anew, so a rule may be gone.
                subprocess.run(arguments, check=False, capture_output=True, stdin=subprocess.DEVNULL, timeout=30)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=30)


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Two engines that set up their firewall rules at the same moment make each other fail."""
    with open("/run/lock/snapshotd-test-dockerd", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _start(found: Engine, directory: Path, bridge: str) -> subprocess.Popen[bytes]:
    """Returns when it answers at DOCKER_HOST."""
    argv = [
        "dockerd",
        "--host",
        found.host,
        "--data-root",
        str(found.data_root),
        "--exec-root",
        str(found.exec_root),
        "--pidfile",
        str(directory / "pid"),
        "--storage-driver",
        "overlay2",
        "--bridge",
        bridge,
        "--ip6tables=false",
        "--add-runtime",
        f"{TRIMMED_RUNTIME}={Path(__file__).with_name('trimmed_runc.py')}",
    ]
    with open(directory / "log", "wb") as log:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait_until_ready(process, directory)
    except BaseException:
        _stop(process)
        raise
    return process


def _wait_until_ready(process: subprocess.Popen[bytes], directory: Path) -> None:
    deadline = time.monotonic() + _START_DEADLINE_S
    while not answers():
        if process.poll() is not None or time.monotonic() > deadline:
            tail = (directory / "log").read_text("utf-8", "replace")[-_LOG_TAIL_CHARS:]
            raise RuntimeError(f"the private dockerd did not start (exit code {process.returncode}):\n{tail}")
        time.sleep(0.05)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM stops containers and containerd too; if that takes too long, the whole session is killed."""
    process.terminate()
    try:
        process.wait(_STOP_DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(_STOP_DEADLINE_S)


def _unmount_below(directory: Path) -> None:
    points = [line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for point in reversed([p for p in points if p.startswith(f"{directory}/")]):
        subprocess.run(
            ["umount", "--lazy", point], check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=30
        )
