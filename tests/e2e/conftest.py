"""One daemon for the whole session, driven through the command line; a second one for tests that kill it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd import images
from snapshotd.images.recipes import load_recipe, shipped
from snapshotd.kernel import syscalls
from tests import long
from tests.e2e.kept import cached
from tests.e2e.support import Snap
from tests.leftovers import nothing_left

BUILD_TIMEOUT_S = 1200
"""Packages come over the network, and other tests have the processors."""


@pytest.fixture(
    scope="session",
    params=[pytest.param("runc", marks=pytest.mark.runc), pytest.param("docker", marks=pytest.mark.docker)],
)
def runtime(request: pytest.FixtureRequest) -> str:
    """Each test runs over both drivers."""
    request.getfixturevalue(f"{request.param}_ready")
    return str(request.param)


@pytest.fixture(autouse=True)
def nobody_adopts_orphans() -> None:
    """The drivers' own tests made this process a child subreaper. Here it must not be one: what a killed daemon leaves
    would become its children, which it never reaps, while on a real machine they go to the first process."""
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 0)


@pytest.fixture(scope="session")
def runc_ready() -> None:
    """Nothing to start; the tests of the runtime contract say clearly what is missing."""


@pytest.fixture(scope="session")
def docker_ready(docker_engine: str) -> str:
    return docker_engine


@pytest.fixture(scope="session")
def engine_env(docker_engine: str) -> dict[str, str]:
    """What every daemon of the tests is started with, so that it finds the private engine."""
    return {"DOCKER_HOST": docker_engine}


@pytest.fixture(scope="session")
def snap(root_tar: Path, tmp_path_factory: pytest.TempPathFactory, engine_env: dict[str, str]) -> Iterator[Snap]:
    """The session's daemon, with the default image."""
    snap = Snap(tmp_path_factory.mktemp("s") / "state", engine_env)
    snap("image", "import", root_tar, "--name", "default")
    yield snap
    snap.stop_daemon()
    nothing_left(snap.state_dir, running=False)


@pytest.fixture(scope="session")
def root_tar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default image as an archive. Building it from its recipe takes most of a minute: it is done once for all
    processes of a run, and in the short set of tests again only if the recipe or the module that builds it has
    changed."""

    def make(archive: Path) -> None:
        snap = Snap(tmp_path_factory.mktemp("b") / "state")
        snap.timeout_s = BUILD_TIMEOUT_S
        snap("image", "build", "default")
        _archive(snap, tmp_path_factory.mktemp("root"), archive)
        snap.stop_daemon()
        nothing_left(snap.state_dir, running=False)
        shutil.rmtree(snap.state_dir)

    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    made_of = "".join(path.read_text() for path in sorted(Path(images.__file__).parent.glob("*.py")))
    made_of += (
        load_recipe(shipped()["default"]).source_id + Path(__file__).read_text() + (str(shared) if long.LONG else "")
    )
    with open(shared / "default.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return cached("default.tar", made_of, make)


def _archive(snap: Snap, folder: Path, archive: Path) -> None:
    """Write what `docker save` would: the files, and what the recipe says of environment and working directory."""
    _, first = snap.create("--runtime", "runc")
    snap("restore", first, "--to", folder / "root")
    (folder / "root").chmod(0o755)  # what is restored is closed to others, for the setuid programs in it
    layer = folder / "layer.tar"
    subprocess.run(["tar", "-C", folder / "root", "--xattrs", "-cf", layer, "."], check=True)
    with open(layer, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    recipe = load_recipe(shipped()["default"])
    config = {"Env": [f"{name}={value}" for name, value in recipe.env], "WorkingDir": recipe.workdir}
    machine = {"os": "linux", "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]}
    data = json.dumps(
        {**machine, "config": config, "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]}}
    ).encode()
    name = f"{hashlib.sha256(data).hexdigest()}.json"
    (folder / name).write_bytes(data)
    (folder / "manifest.json").write_text(json.dumps([{"Config": name, "Layers": ["layer.tar"]}]))
    subprocess.run(["tar", "-C", folder, "-cf", archive, "manifest.json", name, "layer.tar"], check=True)
    subprocess.run(["rm", "-rf", folder], check=True)


@pytest.fixture(scope="module")
def own_snap(root_tar: Path, tmp_path_factory: pytest.TempPathFactory, engine_env: dict[str, str]) -> Iterator[Snap]:
    """A daemon that the module's tests may kill and stop."""
    snap = Snap(tmp_path_factory.mktemp("o") / "state", engine_env)
    snap("image", "import", root_tar, "--name", "default")
    yield snap
    snap.stop_daemon()
    nothing_left(snap.state_dir, running=False)
