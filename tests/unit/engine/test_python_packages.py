"""The requirement lines of a sandbox."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from snapshotd.api.trajectories import CreateRequest
from snapshotd.engine.runs.python_packages import read_requirements
from snapshotd.errors import UsageError


def test_a_folder_in_the_place_of_the_file_is_refused_and_left_closed(tmp_path: Path) -> None:
    for _ in range(3):
        with pytest.raises(UsageError, match="cannot be read"):
            read_requirements(CreateRequest(requirements=str(tmp_path)), None, os.getpid())
    opened = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{fd}")
    ]
    assert str(tmp_path) not in opened
