"""The daemon as the container of docs/examples/deploy, driven from outside as its users do; killed, started again,
taken down."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import docker
import pytest
from docker.models.containers import Container
from pytest_docker.plugin import Services

from tests import trimmed_runc
from tests.dockerd import TRIMMED_RUNTIME, Engine
from tests.e2e import deployment
from tests.e2e.support import Snap, wait_until
from tests.leftovers import cgroups

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1200)]  # the first time, the base image is bootstrapped


# -- pytest-docker's fixtures ------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def docker_compose_command() -> str:
    return " ".join(deployment.compose_command())


@pytest.fixture(scope="session")
def docker_compose_project_name() -> str:
    return f"snapshotd-test-{os.getpid()}"


@pytest.fixture(scope="session")
def docker_compose_file(
    docker_compose_command: str,
    docker_compose_project_name: str,
    docker_engine: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[str]:
    """The shipped compose file in a staged copy of the project, with what is peculiar to a test on top."""
    directory = tmp_path_factory.mktemp("d")
    with ThreadPoolExecutor() as pool:
        staged, base = pool.submit(deployment.stage, directory), pool.submit(deployment.import_base)
        compose = staged.result()
        base.result()
    (compose.parent / ".env").write_text(f"BASE={deployment.BASE_IMAGE}\n")
    service = {"image": f"{docker_compose_project_name}:latest"}
    override = compose.with_name("test.json")  # JSON is YAML
    override.write_text(json.dumps({"services": {"snapshotd": service}}))
    return [str(compose), str(override)]


@pytest.fixture(scope="session")
def docker_setup() -> list[str]:
    return ["up --build --detach"]  # Debian's docker-compose has no --wait


@pytest.fixture(scope="session")
def docker_cleanup() -> list[str]:
    return ["down --volumes --rmi all"]


# -- the deployment ----------------------------------------------------------------------------------------------------


class Deployment:
    """The running project, from outside: the command line over the socket, and the engine's view of the container."""

    def __init__(self, services: Services, project: str, folder: Path) -> None:
        self.services = services
        self.project = project
        self.data = folder / "data"
        self.socket = folder / "run" / "snapshotd.sock"
        self.snap = Snap(folder / "no-state-here")
        self.snap.env["SNAPSHOTD_SOCKET"] = str(self.socket)
        self._docker = docker.from_env()

    def close(self) -> None:
        self._docker.close()

    @property
    def container(self) -> Container:
        """As it is now."""
        (found,) = self._of_project(self._docker.containers, all=True)
        return found

    def answers(self) -> bool:
        """Whether the daemon does. Starts none, unlike other commands."""
        return self.snap("daemon", "--status", "--socket", self.socket, code=None).returncode == 0

    def wait(self) -> None:
        self.services.wait_until_responsive(self.answers, timeout=60, pause=0.1)

    def state_volume(self) -> Path:
        (volume,) = self._of_project(self._docker.volumes)
        return Path(volume.attrs["Mountpoint"])

    def left(self) -> list[str]:
        """What the engine still has of the project."""
        kinds = (self._docker.containers, {"all": True}), (self._docker.volumes, {}), (self._docker.networks, {})
        return [repr(item) for kind, options in kinds for item in self._of_project(kind, **options)]

    def _of_project(self, collection: Any, **options: Any) -> list[Any]:
        found: list[Any] = collection.list(filters={"label": f"com.docker.compose.project={self.project}"}, **options)
        return found


@pytest.fixture(scope="module")
def deployed(
    docker_services: Services, docker_compose_file: list[str], docker_compose_project_name: str, small_root: Path
) -> Iterator[Deployment]:
    """The deployment with a small image imported. Taken down at the end of the module, and then nothing may be left of
    it."""
    deployment = Deployment(docker_services, docker_compose_project_name, Path(docker_compose_file[0]).parent)
    try:
        deployment.wait()
        archive = deployment.data / "root.tar"
        subprocess.run(["tar", "-C", str(small_root), "-cf", str(archive), "."], check=True, timeout=60)
        deployment.snap("image", "import", "/data/root.tar", "--name", "default")
        yield deployment
        traces = Traces(deployment)
        docker_services._docker_compose.execute("down --volumes")
        assert deployment.left() == []
        wait_until(lambda: traces.found() == [], f"nothing is left: {traces.found()}")
        assert not deployment.snap.state_dir.exists(), "a command started a daemon of its own"
    finally:
        deployment.close()


class Traces:
    """What the host has of the container, noted while it runs."""

    def __init__(self, deployment: Deployment) -> None:
        container = deployment.container
        self._id = str(container.id)
        self._places = (str(deployment.state_volume()), container.attrs["GraphDriver"]["Data"]["MergedDir"])
        assert not (deployment.state_volume() / "layers.img").exists(), "it has no loop device"
        assert {line.split()[0] for line in self.found()} >= {"mount", "cgroup", "process"}, "the check sees nothing"

    def found(self) -> list[str]:
        """Mounts, cgroups and processes of it. Sandboxes are in its cgroup, whatever their namespaces."""
        found = []
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        found += [f"mount {line}" for line in mounts if any(place in line for place in self._places)]
        found += [f"cgroup {path}" for path in cgroups(self._id)]
        for cgroup in Path("/proc").glob("[0-9]*/cgroup"):
            try:
                found += [f"process {cgroup.parent.name}"] if self._id in cgroup.read_text() else []
            except OSError:
                continue  # ended meanwhile
        return found


# -- tests -------------------------------------------------------------------------------------------------------------


def read(snap: Snap, snapshot: str, path: str) -> str:
    return snap("cat", f"{snapshot}:{path}").stdout


def snapshots(snap: Snap, trajectory: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = snap.json("log", trajectory)
    return found


def test_a_client_outside_does_everything(deployed: Deployment) -> None:
    """With the least that the daemon needs of a container."""
    tour(deployed.snap, deployed.data)


def tour(snap: Snap, data: Path) -> None:
    """Steps by a pivot and by a copy, forks, and the way back. `data` is /data there."""
    trajectory, first = snap.create("--name", "box")
    one = snap.sh(trajectory, "echo one > note; echo gone > doomed")["snapshot"]
    two = snap.sh(trajectory, "echo two > note; rm doomed")["snapshot"]
    assert [s["id"] for s in snapshots(snap, "box")] == [first, one, two]

    left, right = snap.json("fork", one, "--n", "2")["trajectories"]
    assert snap.sh(left, "echo left >> note; cat note")["stdout"] == "one\nleft\n"
    assert snap.sh(right, "cat note doomed")["stdout"] == "one\ngone\n"
    assert read(snap, two, "note") == "two\n"
    assert read(snap, one, "/workspace/doomed") == "gone\n"

    changes = {change["path"]: change["change"] for change in snap.json("diff", one, two)}
    assert changes == {"/workspace/note": "changed", "/workspace/doomed": "deleted"}

    snap("restore", two, "--path", "/workspace", "--to", "/data/out")
    assert (data / "out" / "note").read_text() == "two\n"
    assert not (data / "out" / "doomed").exists()
    shutil.rmtree(data / "out")

    snap("exec", "--detach", "box", "--", "sh", "-c", "exec 3>held; while :; do echo x >&3; sleep 0.1; done")
    assert snap.sh(trajectory, "mkdir -p a/b; mv a c; cat note")["stdout"] == "two\n"
    assert {snap.json("show", line["id"])["method"] for line in snapshots(snap, "box")} >= {"pivot", "copy"}
    snap("rewind", "box", one)
    assert snap.sh(trajectory, "cat note doomed; ls")["stdout"] == "one\ngone\ndoomed\nnote\n"
    assert snap("check").returncode == 0


def test_sandboxes_are_as_isolated_as_outside_of_a_container(deployed: Deployment) -> None:
    trajectory, _ = deployed.snap.create("--network", "bridge")
    said = deployed.snap.sh(
        trajectory, "cat /proc/self/uid_map; cat /proc/net/dev; cat /run/snapshotd-api/* || echo no socket"
    )["stdout"]
    assert said.split()[:3] == ["0", "1700000000", "65536"]
    assert "tap0:" in said, "slirp4netns gives the network"
    assert "no socket" in said
    assert deployed.snap.json("daemon", "--status")["layer_kind"] in ("plain", "reflink")


def test_compose_sees_a_healthy_daemon_that_lacks_nothing(deployed: Deployment) -> None:
    wait_until(
        lambda: deployed.container.attrs["State"]["Health"]["Status"] == "healthy", "the health check passes", 60
    )
    code, output = deployed.container.exec_run(["snapshotd", "doctor", "--json"])
    assert code == 0, output.decode()


def test_killed_and_started_again(deployed: Deployment) -> None:
    snap = deployed.snap
    trajectory, _ = snap.create()
    last = snap.sh(trajectory, "echo kept > note")["snapshot"]
    before = {t["id"]: [s["id"] for s in snapshots(snap, t["id"])] for t in snap.json("ls")}
    # a snapshot that is not stored yet is lost with the container, as with the machine (docs/limits.md)
    states = lambda: {s["state"] for ids in before for s in snapshots(snap, ids)}  # noqa: E731
    wait_until(lambda: states() == {"stored"}, "all snapshots are stored")
    instance = snap.json("daemon", "--status")["instance"]

    deployed.container.kill()
    deployed.container.start()
    deployed.wait()

    assert snap.json("daemon", "--status")["instance"] == instance
    assert {t["id"]: [s["id"] for s in snapshots(snap, t["id"])] for t in snap.json("ls")} == before
    assert states() == {"stored"}
    assert read(snap, last, "note") == "kept\n"
    assert snap.sh(trajectory, "cat note; echo more >> note")["stdout"] == "kept\n"


@pytest.mark.long  # killed and started again: above
def test_a_daemon_that_dies_comes_back_by_itself(deployed: Deployment) -> None:
    snap = deployed.snap
    trajectory, _ = snap.create()
    snap("exec", "--wait", "stored", trajectory, "--", "sh", "-c", "echo kept > note")
    restarts = deployed.container.attrs["RestartCount"]
    pid = snap.json("daemon", "--status")["pid"]
    assert deployed.container.exec_run(["sh", "-c", f"kill -9 {pid}"]).exit_code == 0
    wait_until(lambda: deployed.container.attrs["RestartCount"] == restarts + 1, "the engine starts it again")
    deployed.wait()
    assert snap.sh(trajectory, "cat note")["stdout"] == "kept\n"


@pytest.mark.long  # a stop takes a last snapshot: test_run.py
def test_a_clean_stop_keeps_what_came_after_the_last_tool_call(deployed: Deployment) -> None:
    snap = deployed.snap
    trajectory, _ = snap.create()
    taken = snap.sh(trajectory, "(sleep 2; echo late > late; sleep 1000) >/dev/null 2>&1 &")["snapshot"]
    assert snap("cat", f"{taken}:late", code=None).returncode != 0
    look = [
        "sh",
        "-c",
        "ls /proc/[0-9]*/root/workspace/late",
    ]  # from the daemon's side: a tool call would take a snapshot
    wait_until(lambda: deployed.container.exec_run(look).output.startswith(b"/proc"), "it was written", pause_s=0.3)

    deployed.container.stop(timeout=120)
    assert deployed.container.attrs["State"]["ExitCode"] == 0
    deployed.container.start()
    deployed.wait()
    (found,) = [t for t in snap.json("ls") if t["id"] == trajectory]
    assert found["status"] == "stopped"
    assert read(snap, found["head"], "late") == "late\n"


# -- other containers --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def container(deployed: Deployment, folder: Path, **options: Any) -> Iterator[Container]:
    """A container of the same image, with a volume and the folders that it serves at. Removed at the end, with all of
    it."""
    client = docker.from_env()
    (folder / "run").mkdir(parents=True)
    (folder / "data").mkdir()
    volume = client.volumes.create()
    places = {
        volume.name: "/var/lib/snapshotd",
        str(folder / "run"): "/run/snapshotd-api",
        str(folder / "data"): "/data",
    }
    binds = {source: {"bind": target} for source, target in places.items()}
    made = client.containers.create(
        str(deployed.container.image.id),
        ["snapshotd", "daemon", "--foreground"],
        volumes=binds,
        tmpfs={"/run/snapshotd": "exec,mode=711"},
        **options,
    )
    try:
        made.start()
        yield made
    finally:
        made.stop(timeout=60)
        made.remove()
        volume.remove()
        client.close()


def has_loop_device(image: Path) -> bool:
    """Whether one holds this file, under whatever path a container knows it."""
    st = image.stat()
    wanted = f"{st.st_ino} {os.major(st.st_dev)}:{os.minor(st.st_dev)}"
    command = ["losetup", "--list", "--noheadings", "--output", "BACK-INO,BACK-MAJ:MIN"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    return any(" ".join(line.split()) == wanted for line in found)


LEAST = {"cap_add": ["SYS_ADMIN", "SYS_PTRACE", "SYS_NICE"], "security_opt": ["seccomp=unconfined"]}
"""This machine has no AppArmor."""


def client(made: Container, folder: Path) -> Snap:
    """The command line outside, when the daemon answers."""
    snap = Snap(folder / "no-state-here")
    snap.env["SNAPSHOTD_SOCKET"] = str(folder / "run" / "snapshotd.sock")

    def answers() -> bool:
        made.reload()
        assert made.status == "running", made.logs().decode()
        return snap("daemon", "--status", code=None).returncode == 0

    wait_until(answers, "it answers", 60)
    return snap


@pytest.mark.long  # its rights are those of the compose file: above
@pytest.mark.parametrize(
    "devices",
    [
        pytest.param([], id="no device"),
        pytest.param(["/dev/loop-control"], id="no loop device, but their control", marks=pytest.mark.long),
    ],
)
def test_a_container_with_the_least_and_no_device(deployed: Deployment, tmp_path: Path, devices: list[str]) -> None:
    """The layers lie in a plain directory, and no image of them is left behind. What needs a device says so."""
    with container(deployed, tmp_path, devices=devices, **LEAST) as made:
        snap = client(made, tmp_path)
        shutil.copy(deployed.data / "root.tar", tmp_path / "data")
        snap("image", "import", "/data/root.tar", "--name", "default")
        tour(snap, tmp_path / "data")
        assert snap.json("daemon", "--status")["layer_kind"] in ("plain", "reflink")
        assert "layers.img" not in made.exec_run(["ls", "/var/lib/snapshotd"]).output.decode()
        assert "give a container that device" in snap("create", "--network", "bridge", code=125).stderr


@pytest.mark.long
def test_a_privileged_container(deployed: Deployment, docker_daemon: Engine, tmp_path: Path) -> None:
    """It has loop devices, so its layers share extents."""
    options: dict[str, Any] = {"privileged": True}
    if docker_daemon.private and not trimmed_runc.holds_all():
        options["runtime"] = TRIMMED_RUNTIME
    with container(deployed, tmp_path, **options) as made:
        snap = client(made, tmp_path)
        shutil.copy(deployed.data / "root.tar", tmp_path / "data")
        snap("image", "import", "/data/root.tar", "--name", "default")
        tour(snap, tmp_path / "data")
        assert snap.json("daemon", "--status")["layer_kind"] in ("loop-xfs", "reflink")
        (state,) = (each["Source"] for each in made.attrs["Mounts"] if each["Destination"] == "/var/lib/snapshotd")
        image = Path(state, "layers.img")
        had_one = image.exists()
        assert has_loop_device(image) if had_one else True
        made.stop(timeout=60)
        made.reload()
        assert made.attrs["State"]["ExitCode"] == 0
        assert not (had_one and has_loop_device(image))


NO_MOUNTS = "the daemon cannot have mounts of its own (unshare: Operation not permitted)"


@pytest.mark.long  # abilities that are missing: system/test_missing_abilities.py
@pytest.mark.parametrize(
    ("options", "says"),
    [
        pytest.param({}, NO_MOUNTS, id="plain"),
        pytest.param({"security_opt": ["seccomp=unconfined"]}, NO_MOUNTS, id="no capabilities", marks=pytest.mark.long),
        pytest.param(
            {"cap_add": LEAST["cap_add"]},
            "mounts: pivot_root: Operation not permitted",
            id="filter",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {**LEAST, "cap_add": ["SYS_ADMIN", "SYS_NICE"]},
            "looks: Permission denied",
            id="no SYS_PTRACE",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {**LEAST, "cap_add": ["SYS_ADMIN", "SYS_PTRACE"]},
            "priorities: Permission denied",
            id="no SYS_NICE",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_container_with_less_is_told_what_it_lacks(
    deployed: Deployment, tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    with container(deployed, tmp_path, **options) as made:
        assert made.wait(timeout=60)["StatusCode"] == 7, made.logs().decode()
        assert says in made.logs().decode()
