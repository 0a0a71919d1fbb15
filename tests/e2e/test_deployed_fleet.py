"""The compose file of a fleet (docs/examples/deploy/fleet.yaml), started as it is shipped and used from outside: two nodes, PostgreSQL, and
a bucket in SeaweedFS."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import docker
import pytest

from snapshotd.client import Fleet, Sandbox, Snapshotd
from snapshotd.client.remote.logins import Login, save_login
from snapshotd.errors import Conflict, Unavailable
from tests.e2e import deployment
from tests.e2e.support import Snap, wait_until

pytestmark = [
    pytest.mark.docker,
    pytest.mark.long,
    pytest.mark.timeout(1200),
]  # the parts: test_deployed.py, crash/test_fleet_*.py
NODES = ("node-1", "node-2")
AGENT = ["sh", "-c", "test -e begun || echo begun > begun; while :; do sleep 0.1; done"]


class Project:
    """The running project. `address`: of each node, from outside."""

    def __init__(self, folder: Path) -> None:
        self._compose = [*deployment.compose_command(), "-p", f"snapshotd-fleet-{os.getpid()}", "-f", "fleet.yaml"]
        self._folder = deployment.stage(folder, "fleet,s3").parent
        ports = dict(zip(NODES, free_ports(len(NODES)), strict=True))
        self.address = {node: f"https://127.0.0.1:{port}" for node, port in ports.items()}
        self.password = secrets.token_hex(16)
        settings = {
            "BASE": deployment.BASE_IMAGE,
            "PASSWORD": self.password,
            "POSTGRES": deployment.SERVICES_IMAGE,
            "S3": deployment.SERVICES_IMAGE,
        }
        for number, node in enumerate(NODES, 1):
            settings |= {f"PORT_{number}": f"127.0.0.1:{ports[node]}", f"ADDRESS_{number}": self.address[node]}
        (self._folder / ".env").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        self._docker = docker.from_env()

    def compose(self, *words: str) -> str:
        done = subprocess.run(
            [*self._compose, *words],
            cwd=self._folder,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, (words, done.stdout[-3000:], done.stderr[-3000:])
        return done.stdout

    def inside(self, node: str, *words: str) -> str:
        """What a command of snapshotd prints in a node's container."""
        return self.compose("exec", "-T", node, "snapshotd", *words)

    def container(self, service: str) -> Any:
        (name,) = self.compose("ps", "-q", service).split()
        return self._docker.containers.get(name)

    def answers(self, node: str) -> bool:
        """Whether its daemon does: it has its lease before."""
        code: int = self.container(node).exec_run(["snapshotd", "daemon", "--status"]).exit_code
        return code == 0

    def database(self) -> str:
        """Its address, from this machine. The password is in the environment."""
        (network,) = self.container("database").attrs["NetworkSettings"]["Networks"].values()
        return f"postgresql://snapshotd@{network['IPAddress']}/snapshotd"

    def close(self) -> None:
        self._docker.close()
        self.compose("down", "--volumes", "--rmi", "local")


def free_ports(count: int) -> list[int]:
    """Of this machine, for docker to publish at."""
    opened = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [one.getsockname()[1] for one in opened]
    finally:
        for one in opened:
            one.close()


@pytest.fixture
def project(docker_engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    deployment.import_base()
    (tmp_path / "services").mkdir()
    deployment.make_services_image(tmp_path / "services")
    with closing(Project(tmp_path / "project")) as made:
        monkeypatch.setenv("PGPASSWORD", made.password)
        made.compose("up", "--build", "--detach")
        yield made


def client(project: Project, node: str) -> Snapshotd:
    """As a user who has logged in there."""
    token = json.loads(project.inside(node, "token", "create", "driver", "--scope", "admin", "--json"))["token"]
    fingerprint = json.loads(project.inside(node, "daemon", "--status", "--json"))["fingerprint"]
    save_login(project.address[node], Login(token, fingerprint))
    return Snapshotd(host=project.address[node], autostart=False)


def test_two_nodes_share_forks_and_one_goes_on_with_what_a_killed_one_had(
    project: Project, small_root: Path, tmp_path: Path
) -> None:
    snap = Snap(tmp_path / "no-state-here")

    def states() -> dict[str, str]:
        return {one["node"]: one["state"] for one in snap.json("fleet", "status", "--database", project.database())}

    wait_until(lambda: states() == dict.fromkeys(NODES, "leased"), "both nodes have joined", 120)
    wait_until(lambda: all(map(project.answers, NODES)), "both daemons answer", 120)
    clients = {node: client(project, node) for node in NODES}
    archive = tmp_path / "root.tar"
    subprocess.run(["tar", "-C", str(small_root), "-cf", str(archive), "."], check=True, timeout=60)
    subprocess.run(
        ["docker", "cp", str(archive), f"{project.container('node-1').id}:/root.tar"], check=True, timeout=60
    )
    project.inside("node-1", "image", "import", "/root.tar", "--name", "default")

    with Fleet.open(project.address["node-1"]) as fleet:
        task = Sandbox.create(client=clients["node-1"])
        task.files.write("task", "a task\n")
        branches = fleet.fork(task, 6, memory=16 << 20, per_node=3)
        assert {branch.node for branch in branches} == set(NODES)
        assert fleet.map(lambda branch: branch.exec("cat task", check=True).stdout, branches) == ["a task\n"] * 6

    agent = clients["node-1"].run(command=AGENT, detach=True)
    Sandbox.connect(agent.id, client=clients["node-1"]).snapshot()
    clients["node-1"].flush(agent.id, published=True)
    project.container("node-1").kill()

    def resumed() -> bool:
        try:
            clients["node-2"].resume(agent.id)
        except (Conflict, Unavailable):
            return False
        return True

    wait_until(resumed, "the other node may take it over", 120, pause_s=0.5)
    assert states() == {"node-1": "lost", "node-2": "leased"}
    moved = Sandbox.connect(agent.id, client=clients["node-2"])
    assert clients["node-2"].trajectory(agent.id).status == "running"
    assert moved.exec("cat begun").stdout == "begun\n"
