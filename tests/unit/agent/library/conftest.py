"""The library against a fake daemon that follows docs/agent-protocol.md."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent_daemon import FakeDaemon


@pytest.fixture
def daemon() -> FakeDaemon:
    return FakeDaemon()


@pytest.fixture
def recorder(daemon: FakeDaemon) -> FakeDaemon:
    return daemon


@pytest.fixture
def server(daemon: FakeDaemon, socket_path: Path) -> Iterator[FakeDaemon]:
    before = threading.active_count()
    with daemon.serving(socket_path):
        yield daemon
    assert threading.active_count() <= before, threading.enumerate()
