"""Fixtures that several tests of the engine share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.engine.engine import Engine
from tests.small_engine import small_engine
from tests.unit.engine.bundles import World


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with small_engine() as opened:
        yield opened


@pytest.fixture
def worlds(tmp_path: Path) -> Iterator[tuple[World, World]]:
    """Where a bundle comes from, and where it goes to."""
    (tmp_path / "root").mkdir()
    here, there = World(tmp_path / "here"), World(tmp_path / "there")
    yield here, there
    here.close()
    there.close()
