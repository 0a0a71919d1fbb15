"""Fixtures of the tests of the page's server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.page.server import PageServer
from tests.unit.page.browser import Browser, serving


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with serving(PageServer(str(tmp_path / "daemon.sock"))) as browser:
        yield browser
