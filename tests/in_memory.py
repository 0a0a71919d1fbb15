"""Folders of tests that are not about a disk: in memory, where this machine has room.

ext4 takes no inode again that was removed within the last minutes, and looks at each of those before it takes another
(`recently_deleted` in fs/ext4/ialloc.c): after thousands of tests that is a third of all CPU. And there a sync is free.
A `conftest.py` imports the fixtures.
"""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

_MEMORY = Path("/dev/shm")
_PREFIX = "sd-tests-"
_ROOM_BYTES = 4 << 30


@cache
def _has_room() -> bool:
    """Whether files in memory are like those of a disk here: programs and sockets, attributes of a user, room."""
    try:
        found = os.statvfs(_MEMORY)
        with tempfile.NamedTemporaryFile(dir=_MEMORY) as file:
            os.setxattr(file.name, "user.test", b"")
    except OSError:
        return False
    return not found.f_flag & (os.ST_NOEXEC | os.ST_NODEV) and found.f_bavail * found.f_frsize >= _ROOM_BYTES


@pytest.fixture(scope="session")
def tmp_path_factory(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[pytest.TempPathFactory]:
    """pytest's own, in memory. A run in which a test has failed leaves it to the next run, as pytest does."""
    if not _has_room():
        yield tmp_path_factory
        return
    for left in _MEMORY.glob(f"{_PREFIX}*-*"):
        with contextlib.suppress(FileNotFoundError):  # another process of this run removes them, too
            if left.lstat().st_uid == os.geteuid() and not Path("/proc", left.name.split("-")[2]).exists():
                shutil.rmtree(left, ignore_errors=True)
    made = copy.copy(tmp_path_factory)
    made._basetemp = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_MEMORY))
    yield made
    if not request.session.testsfailed:
        shutil.rmtree(made._basetemp, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def temporary_files_in_memory() -> Iterator[None]:
    """The folders that this process makes by `tempfile`."""
    before = tempfile.tempdir
    if _has_room():
        tempfile.tempdir = str(_MEMORY)
    try:
        yield
    finally:
        tempfile.tempdir = before


@pytest.fixture
def disk_path() -> Iterator[Path]:
    """A folder on a disk, whatever `tmp_path` is."""
    with tempfile.TemporaryDirectory(prefix="sd-", dir="/var/tmp") as name:
        yield Path(name)
