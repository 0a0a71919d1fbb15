"""One daemon for the whole session, driven through the command line; a second one for tests that kill it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.kernel import syscalls
from tests.e2e.support import Snap
from tests.leftovers import nothing_left


@pytest.fixture(scope="session", params=[pytest.param("runc", marks=pytest.mark.runc), pytest.param("docker", marks=pytest.mark.docker)])
def runtime(request: pytest.FixtureRequest) -> str:
    """Each test runs over both drivers."""
    request.getfixturevalue(f"{request.param}_ready")
    return str(request.param)


@pytest.fixture(autouse=True)
def nobody_adopts_orphans() -> None:
    """The drivers' own tests made this process a child subreaper. Here it must not be one: what a killed daemon leaves would become its
    children, which it never reaps, while on a real machine they go to the first process."""
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
def snap(tmp_path_factory: pytest.TempPathFactory, engine_env: dict[str, str]) -> Iterator[Snap]:
    """The session's daemon, with the default image built from its recipe."""
    snap = Snap(tmp_path_factory.mktemp("s") / "state", engine_env)
    snap("image", "build", "default")
    yield snap
    snap.stop_daemon()
    nothing_left(snap.state_dir, running=False)


@pytest.fixture(scope="session")
def root_tar(snap: Snap, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default image's files as an archive, so that further daemons need not build it again."""
    trajectory, first = snap.create("--runtime", "runc")
    folder = tmp_path_factory.mktemp("root")
    snap("restore", first, "--to", folder / "root")
    snap("rm", "--force", trajectory)
    subprocess.run(["tar", "-C", folder / "root", "--xattrs", "-cf", folder / "root.tar", "."], check=True)
    subprocess.run(["rm", "-rf", folder / "root"], check=True)
    return folder / "root.tar"


@pytest.fixture(scope="module")
def own_snap(root_tar: Path, tmp_path_factory: pytest.TempPathFactory, engine_env: dict[str, str]) -> Iterator[Snap]:
    """A daemon that the module's tests may kill and stop."""
    snap = Snap(tmp_path_factory.mktemp("o") / "state", engine_env)
    snap("image", "import", root_tar, "--name", "default")
    yield snap
    snap.stop_daemon()
    nothing_left(snap.state_dir, running=False)
