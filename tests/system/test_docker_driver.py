"""What only the Docker driver does: how sandboxes look to people who use docker, and an engine that is missing, dead or
too old."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.errors import SandboxFailed, Unsupported
from snapshotd.runtime.base import DEFAULT_PATH, ExecSpec
from snapshotd.runtime.docker import DockerRuntime, find_runc
from snapshotd.runtime.keeper import KeeperClient
from snapshotd.runtime.starter import Starter
from snapshotd.types import new_id, short
from tests import rigs
from tests.contracts.runtime import Rig, eventually
from tests.dockerd import Engine

pytestmark = pytest.mark.docker


@pytest.fixture
def rig(small_root: Path, docker_daemon: Engine) -> Iterator[Rig]:
    with rigs.work_directory() as directory:
        rig = rigs.docker(f"test-{new_id()[:8]}", directory, small_root, docker_daemon)
        yield rig
        assert rig.runtime.list() == []
        rig.keeper.close()


def _docker(*arguments: str) -> str:
    result = subprocess.run(
        ["docker", *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, check=False
    )
    assert result.returncode == 0, result
    return result.stdout


def test_docker_ps_tells_what_it_is(rig: Rig) -> None:
    spec = rig.spec()
    container = rig.runtime.create(spec)
    try:
        line = _docker(
            "ps", "--filter", f"label=snapshotd.container={spec.id}", "--format", "{{.Names}} {{.Image}}"
        ).split()
        assert line == [f"snapshotd-{short(spec.id)}", "snapshotd/contract"]
    finally:
        rig.runtime.destroy(container.id)
    assert _docker("ps", "--all", "--quiet", "--filter", f"label=snapshotd.container={spec.id}") == ""


def test_docker_exec_and_top_work(rig: Rig) -> None:
    with rig.container() as container:
        name = f"snapshotd-{short(container.id)}"
        rig.shell(container, "echo from-driver > /workspace/file")
        assert _docker("exec", name, "cat", "/workspace/file") == "from-driver\n"
        process = rig.start(container, "sleep", "4321")
        assert "sleep 4321" in _docker("top", name)
        process.kill()
        os.close(process.stdout_fd)
        os.close(process.stderr_fd)


def test_log_appears_in_docker_logs(rig: Rig) -> None:
    with rig.container() as container:
        rig.runtime.log(container, b"first line\nsecond line\n")
        name = f"snapshotd-{short(container.id)}"
        eventually(lambda: _docker("logs", name) == "first line\nsecond line\n", "the log is not there")


def test_a_restarted_daemon_finds_and_removes_everything(rig: Rig) -> None:
    with rig.container() as container:
        old = rig.runtime
        assert isinstance(old, DockerRuntime)
        again = DockerRuntime(old._instance, old._host, rig.work / "docker", rig.keeper, Starter())
        assert again.list() == [container.id]
        again.log(container, b"unknown container: nothing is written\n")
        process = again.exec(container, ExecSpec(["echo", "ok"], cwd="/", env={"PATH": DEFAULT_PATH}))
        assert os.read(process.stdout_fd, 10) == b"ok\n"
        third = DockerRuntime(old._instance, old._host, rig.work / "docker", rig.keeper, Starter())
        assert third.attach(container.id) == container
        assert process.wait(60) == 0
        os.close(process.stdout_fd)
        os.close(process.stderr_fd)
        again.destroy(container.id)
        assert again.list() == []


def test_containers_of_others_are_not_listed(rig: Rig, docker_daemon: Engine) -> None:
    with rig.container() as container:
        other = DockerRuntime(f"test-{new_id()[:8]}", docker_daemon.host, rig.work / "other", rig.keeper, Starter())
        assert other.list() == []
        other.destroy(container.id)
        assert rig.runtime.list() == [container.id]


def _driver(host: str, directory: Path) -> DockerRuntime:
    return DockerRuntime("test", host, directory / "run", KeeperClient(directory / "keeper.sock"), Starter())


def test_missing_and_dead_sockets_are_named(tmp_path: Path) -> None:
    def runtime(host: str) -> DockerRuntime:
        return _driver(host, tmp_path)

    assert "does not exist" in (runtime(f"unix://{tmp_path}/none.sock").unavailable() or "")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{tmp_path}/dead.sock")
    assert "nothing answers" in (runtime(f"unix://{tmp_path}/dead.sock").unavailable() or "")
    elsewhere = runtime("tcp://127.0.0.1:1")
    assert "not a unix socket" in (elsewhere.unavailable() or "")
    with pytest.raises(Unsupported, match="not a unix socket"):
        elsewhere.create(None)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b'{"Version":"19.03.15","ApiVersion":"1.40","MinAPIVersion":"1.12"}', "19.03.15; 20.10 or newer"),
        (None, "does not answer"),
    ],
)
def test_old_and_broken_engines_are_named(tmp_path: Path, answer: bytes | None, words: str) -> None:
    """A server on the socket that says what an old engine says, or hangs up."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{tmp_path}/old.sock")
        server.listen()

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.settimeout(60)
                    if connection.recv(1 << 16) and answer is not None:
                        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
                        connection.sendall(head % len(answer) + answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            assert words in (_driver(f"unix://{tmp_path}/old.sock", tmp_path).unavailable() or "")
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(60)
    assert not thread.is_alive()


def test_an_engine_without_runc_is_named() -> None:
    with pytest.raises(SandboxFailed, match="whose runtime is runc"):
        find_runc("0" * 64, os.getpid())
