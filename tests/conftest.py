"""Fixtures and rules for all tests. What a test needs of the machine is said by its markers `runc` and `docker`."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import core, settings

from snapshotd.kernel import syscalls
from tests import dockerd, long, root_tree, way
from tests.both_clients import asynchronous
from tests.capabilities import require
from tests.kept import CACHE
from tests.unit.daemon import process

if TYPE_CHECKING:
    from tests.e2e.support import Snap
    from tests.postgres_server import PostgresServer

sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
"""Compiling is half of the time of a process that starts, and of loading the tests."""
if not way.WAY:
    os.environ["SNAPSHOTD_IMAGE_BUILDS"] = str(CACHE / "builds")
"""No test leaves anything in the machine's own folder."""
gc.disable()
"""Until the tests are collected, nearly everything that is made stays: each collection of garbage would look at all of
it again."""
settings.register_profile("short", derandomize=True, max_examples=50)
settings.register_profile("long", print_blob=True)
settings.load_profile("long" if long.LONG else "short")
core.global_force_seed = long.SEED if long.LONG else None

FIRST = (
    "system/test_old_kernels.py",
    "system/test_rootless.py",
    "e2e/test_agents_doc.py",
    "system/test_images.py",
    "system/test_ways.py",
    "e2e/test_deployed.py",
    "crash/test_storage_kill.py",
    "e2e/test_survive.py",
    "e2e/test_damage.py",
    "e2e/test_share.py",
    "model/test_engine_machine.py",
    "system/test_disk_full.py",
    "e2e/test_pipes.py",
    "e2e/test_fidelity.py",
    "e2e/test_fork.py",
    "e2e/test_scale.py",
    "e2e/test_kills.py",
    "contract/test_runtime.py",
    "e2e/test_ports.py",
    "e2e/test_gateway.py",
    "e2e/test_storage.py",
    "e2e/test_crash.py",
    "e2e/test_replay.py",
    "e2e/test_rewind.py",
    "system/test_power_cut.py",
    "e2e/test_secrets.py",
)
"""What takes longest. The first six build images that other files wait for, if `make setup` has not."""


def pytest_configure() -> None:
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            # A suite started in the background of a shell, or by nohup, inherits this, and so would every command that
            # a test ends by it.
            signal.signal(number, usual)
    if "PYTEST_XDIST_WORKER" in os.environ and os.geteuid() == 0:
        # What one process mounts would be held by every daemon that another one starts.
        with suppress(PermissionError):  # who may not do this may not mount anything either
            syscalls.call("unshare", syscalls.CLONE_NEWNS)
            syscalls.call("mount", "none", "/", None, syscalls.MS_REC | syscalls.MS_SLAVE, None)


def pytest_report_header() -> str:
    return f"{'all tests' if long.LONG else 'the short set of tests'}, random ones from SNAPSHOTD_SEED={long.SEED} on (see tests/long.py)"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests had to say (`record_property("told", ...)`), from whichever process they ran in."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "told":
                terminalreporter.write_line(str(value))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only the long set has: tests marked `long`, and those over Docker that are not marked
    `each_runtime`, or run with the asynchronous client, and with that client those that are marked `same_verbs`. Files
    that take long come first, and those that take seconds last, so that all processes end at the same time."""
    items.sort(key=lambda item: _turn(item.path))
    if way.WAY:
        way.leave_out(items)
    if long.LONG:
        return
    left_out = [
        item for item in items if item.get_closest_marker("long") or _runs_over_another(item) or _is_same_verb(item)
    ]
    items[:] = [item for item in items if item not in set(left_out)]
    config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """Thousands of tests and all of their modules stay until the end: no collection of garbage looks at them again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@cache
def _turn(path: Path) -> int:
    """Its place in `FIRST`; after those the other tests of whole parts, and the unit tests at the end."""
    name = f"{path.parent.name}/{path.name}"
    return FIRST.index(name) if name in FIRST else len(FIRST) + path.is_relative_to(Path(__file__).with_name("unit"))


def _runs_over_another(item: pytest.Item) -> bool:
    """Whether the same test runs over runc too, and the driver makes no difference; or it makes one, and the client makes
    another."""
    call = getattr(item, "callspec", None)
    return (
        call is not None
        and call.params.get("runtime") == "docker"
        and (item.get_closest_marker("each_runtime") is None or call.params.get("both_clients") == "asyncio")
    )


def _is_same_verb(item: pytest.Item) -> bool:
    """Whether the same test runs with the client for threads too, and asks for verbs that are one function in both."""
    call = getattr(item, "callspec", None)
    return (
        call is not None
        and call.params.get("both_clients") == "asyncio"
        and item.get_closest_marker("same_verbs") is not None
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, or fail where CI demands it, tests whose markers name a capability that this machine lacks."""
    if item.get_closest_marker("runc"):
        require(*([] if way.WAY else ["root"]), "runc")
    if item.get_closest_marker("docker"):
        require("root", "docker")


@pytest.fixture(params=["threads", "asyncio"])
def both_clients(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module's tests run with each client (`tests/both_clients.py`)."""
    if request.param == "threads":
        yield
        return
    with asynchronous(monkeypatch, request.module, process):
        yield


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this run share."""
    if way.WAY:
        return way.shared_folder()
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def docker_daemon() -> Iterator[dockerd.Engine]:
    """A Docker engine, with DOCKER_HOST set to it: the one that answers, else a private one for this session."""
    require("root", "docker")
    with dockerd.engine() as engine:
        yield engine


@pytest.fixture(scope="session")
def docker_engine(docker_daemon: dockerd.Engine) -> str:
    """The value for DOCKER_HOST."""
    return docker_daemon.host


@pytest.fixture(scope="module")
def nobody_adopts_orphans() -> None:
    """The drivers' own tests made this process a child subreaper. For those that kill daemons it must not be one: what a
    killed daemon leaves would become its children, which it never reaps, while on a real machine they go to the first
    process."""
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 0)


@pytest.fixture(scope="module")
def empty_snap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Snap]:
    """A daemon of the module's own, without an image: hooks need none."""
    from tests.e2e.support import Snap  # most tests have no daemon
    from tests.leftovers import nothing_left

    found = Snap(tmp_path_factory.mktemp("h") / "state")
    found("ls")
    yield found
    found.stop_daemon()
    nothing_left(found.state_dir, running=False)


@pytest.fixture(scope="session")
def small_root() -> Iterator[Path]:
    """A root file system with a shell, small tools and perl. Shared: do not change it."""
    root = Path(tempfile.mkdtemp(prefix="snapshotd-root-", dir="/var/tmp"))
    try:
        root_tree.build(root)
        yield root
    finally:
        shutil.rmtree(root)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A server for all tests of this process. It syncs nothing: a test that kills it starts its own."""
    require("postgres")
    from tests.postgres_server import PostgresServer  # few tests need the driver

    with closing(PostgresServer()) as server:
        yield server


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> Iterator[str]:
    """The address of a database of the session's server, without tables."""
    yield postgres.url
    postgres.ask("DROP SCHEMA IF EXISTS snapshotd CASCADE")
