"""What the tests of daemon, client and command line share: a small daemon. A module that names another one as
`start_daemon` gets that."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.engine.host import integrations
from tests.in_memory import disk_path, temporary_files_in_memory, tmp_path_factory  # noqa: F401 - fixtures
from tests.unit.daemon.process import Daemon, start


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A folder whose sockets have short paths, which pytest's own does not promise."""
    with tempfile.TemporaryDirectory(prefix="sd-") as name:
        yield Path(name)


@pytest.fixture
def daemon(request: pytest.FixtureRequest, short_dir: Path) -> Iterator[Daemon]:
    running = getattr(request.module, "start_daemon", start)(short_dir / "state", short_dir / "s.sock")
    yield running
    running.close()


@pytest.fixture
def no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """`doctor` loads every integration that is installed, 4 s of CPU: engine/test_integrations.py does so once. Here it
    finds those that are not."""
    try_all = integrations.try_all
    monkeypatch.setattr(integrations, "try_all", lambda found: try_all([one for one in found if one.version() is None]))


@pytest.fixture(scope="module")
def shared_daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """One for many tests that leave it as it was, but for what they make under names of their own."""
    with tempfile.TemporaryDirectory(prefix="sd-") as name:
        running = getattr(request.module, "start_daemon", start)(Path(name) / "state", Path(name) / "s.sock")
        yield running
        running.close()


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811 - the fixture
    """A folder for sandboxes to begin with."""
    made = tmp_path_factory.mktemp("workspace")
    (made / "a.txt").write_text("hello\n")
    os.symlink(b"a\xff", bytes(made / "link"))
    return made
