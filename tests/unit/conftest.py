"""What the tests of daemon, client and command line share: a daemon over a fake engine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.daemon.process import Daemon, start


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A folder whose sockets have short paths, which pytest's own does not promise."""
    with tempfile.TemporaryDirectory(prefix="sd-") as name:
        yield Path(name)


@pytest.fixture
def daemon(short_dir: Path) -> Iterator[Daemon]:
    running = start(short_dir / "state", short_dir / "s.sock")
    yield running
    running.close()


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[Daemon]:
    """One for many tests that leave it as it was, but for what they make under names of their own."""
    with tempfile.TemporaryDirectory(prefix="sd-") as name:
        running = start(Path(name) / "state", Path(name) / "s.sock")
        yield running
        running.close()
