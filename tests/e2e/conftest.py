"""One daemon for the whole session, driven through the command line; a second one for tests that kill it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import built_images, forked, way
from tests.e2e.default_image import default_archive
from tests.e2e.model_rig import Agents
from tests.e2e.page_rig import chromium, person  # noqa: F401 - fixtures
from tests.e2e.plug_rig import plug_daemon, plugged  # noqa: F401 - fixtures
from tests.e2e.prepared import NO_ENGINE, daemon_on, state_with
from tests.e2e.support import Snap


@pytest.fixture(
    scope="session",
    params=[pytest.param("runc", marks=pytest.mark.runc), pytest.param("docker", marks=pytest.mark.docker)],
)
def runtime(request: pytest.FixtureRequest) -> str:
    """Each test runs over both drivers."""
    request.getfixturevalue(f"{request.param}_ready")
    return str(request.param)


@pytest.fixture(autouse=True, scope="module")
def forked_daemons(nobody_adopts_orphans: None) -> Iterator[None]:
    """A daemon that a test's own client starts is forked, as those are that commands start."""
    with forked.daemons():
        yield


@pytest.fixture(scope="session")
def runc_ready() -> None:
    """Nothing to start; the tests of the runtime contract say clearly what is missing."""


@pytest.fixture(scope="session")
def docker_ready(docker_engine: str) -> str:
    return docker_engine


@pytest.fixture(scope="session")
def engine_env(request: pytest.FixtureRequest) -> dict[str, str]:
    """What every daemon of the tests is started with, so that it finds the private engine."""
    return NO_ENGINE if way.WAY else {"DOCKER_HOST": request.getfixturevalue("docker_engine")}


@pytest.fixture(scope="session")
def snap(minimal_state: Path, tmp_path_factory: pytest.TempPathFactory, engine_env: dict[str, str]) -> Iterator[Snap]:
    """The session's daemon. Its default image is the minimal one."""
    with daemon_on(minimal_state, tmp_path_factory.mktemp("s") / "state", engine_env) as snap:
        yield snap


@pytest.fixture(scope="session")
def root_tar(run_folder: Path) -> Path:
    """The minimal image as an archive."""
    return way.minimal_archive() or built_images.minimal_archive(run_folder)


@pytest.fixture(scope="session")
def minimal_state(root_tar: Path, run_folder: Path) -> Path:
    """A state directory for `daemon_on`, with the minimal image, which has a third of the default one's files and
    bytes."""
    return state_with(root_tar, run_folder)


@pytest.fixture(scope="session")
def default_tar(run_folder: Path) -> Path:
    """The default image as an archive."""
    return default_archive(run_folder)


@pytest.fixture(scope="session")
def default_state(default_tar: Path, run_folder: Path) -> Path:
    """A state directory for `daemon_on`, with the image that a user's daemon has."""
    return state_with(default_tar, run_folder)


@pytest.fixture(scope="session")
def full_image(snap: Snap, default_tar: Path) -> str:
    """The name of the shipped default image, which has pip and pytest, at the session's daemon."""
    snap("image", "import", default_tar, "--name", "full")
    return "full"


@pytest.fixture(scope="module")
def own_snap(
    minimal_state: Path, tmp_path_factory: pytest.TempPathFactory, engine_env: dict[str, str]
) -> Iterator[Snap]:
    """A daemon that the module's tests may kill and stop."""
    with daemon_on(minimal_state, tmp_path_factory.mktemp("o") / "state", engine_env) as snap:
        yield snap


@pytest.fixture
def agents(snap: Snap, runc_ready: None) -> Agents:
    """Agents behind the gateway of the session's daemon."""
    return Agents(snap, "runc")


@pytest.fixture
def box(snap: Snap, runtime: str) -> Iterator[str]:
    """A sandbox of the test's own."""
    trajectory, _ = snap.create("--runtime", runtime)
    yield trajectory
    snap("rm", "--force", trajectory)
