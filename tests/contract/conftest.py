"""Fixtures of the contract tests."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An empty file system of 2 MiB that is full after that."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "snapshotd-test-small", str(path)], check=True, timeout=30)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True, timeout=30)
