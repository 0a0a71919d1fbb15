"""Fixtures of the contract tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import s3_service
from tests.loop_disk import memory_disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with memory_disk(tmp_path, "2m") as path:
        yield path


@pytest.fixture(scope="module")
def s3_bucket() -> Iterator[tuple[str, str]]:
    """The address of a service, and a bucket in it."""
    with s3_service.running() as endpoint:
        yield endpoint, s3_service.make_bucket(endpoint)
