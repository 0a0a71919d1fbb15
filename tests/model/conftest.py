"""A folder on a disk for the overlay tests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from overlay_world import need_root


@pytest.fixture
def base() -> Iterator[Path]:
    need_root()
    path = Path(
        tempfile.mkdtemp(prefix="snapshotd-model-", dir="/var/tmp")
    )  # a disk: tmpfs has no user.* attributes on older kernels
    yield path
    shutil.rmtree(path)
