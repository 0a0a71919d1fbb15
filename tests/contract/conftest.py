"""Fixtures of the contract tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.loop_disk import memory_disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with memory_disk(tmp_path, "2m") as path:
        yield path
