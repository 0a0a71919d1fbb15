"""The tests of the product, run by an ordinary user: with a range of further user ids, and with one id."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.built_images import minimal_archive
from tests.e2e.kills import reachable_address
from tests.ordinary_user import ROOT, OrdinaryUser, interpreter, ordinary_users

pytestmark = [pytest.mark.runc, pytest.mark.long, pytest.mark.timeout(1800)]
_DEVICES = """
mount -t tmpfs -o mode=755 none /mnt
mknod -m 666 /mnt/fuse c 10 229; mknod -m 666 /mnt/tun c 10 200
mount --bind /mnt/fuse /dev/fuse; mount --bind /mnt/tun /dev/net/tun
"""
"""Distributions open these to all users."""
FILES = (
    "crash/test_storage_kill.py",
    "e2e/test_approvals.py",
    "e2e/test_background.py",
    "e2e/test_branches.py",
    "e2e/test_crash.py",
    "e2e/test_exec.py",
    "e2e/test_experiment.py",
    "e2e/test_files.py",
    "e2e/test_fork.py",
    "e2e/test_kills.py",
    "e2e/test_langgraph.py",
    "e2e/test_live_processes.py",
    "e2e/test_merge.py",
    "e2e/test_mind.py",
    "e2e/test_network.py",
    "e2e/test_pipes.py",
    "e2e/test_ports.py",
    "e2e/test_promote.py",
    "e2e/test_replay.py",
    "e2e/test_restart.py",
    "e2e/test_reuse.py",
    "e2e/test_rewind.py",
    "e2e/test_run.py",
    "e2e/test_secrets.py",
    "e2e/test_share.py",
    "e2e/test_shell.py",
    "e2e/test_snapshot.py",
    "e2e/test_storage.py",
    "e2e/test_survive.py",
    "model/test_engine_machine.py",
    "system/test_uncommitted.py",
)


@pytest.fixture(scope="module", params=["range", "one-id"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def user(way: str, run_folder: Path) -> Iterator[OrdinaryUser]:
    with ordinary_users(ids=[way == "range"], host=_DEVICES) as (found,), reachable_address() as address:
        found.env |= {
            "SNAPSHOTD_TEST_AS": way,
            "SNAPSHOTD_TEST_IMAGE": str(found.give(minimal_archive(run_folder), "image.tar")),
            "SNAPSHOTD_TEST_ADDRESS": address,
        }
        yield found


@pytest.mark.parametrize("file", FILES)
def test_as_an_ordinary_user(user: OrdinaryUser, file: str) -> None:
    folder = user.home / "tmp"
    argv = [
        interpreter(),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--basetemp={folder}",
        ROOT / "tests" / file,
    ]
    try:
        done = user.run(*argv, code=None, timeout=1800)
        assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5000:]
        user.nothing_left()
    finally:  # or the next file would fail because of this one
        user.end()
        shutil.rmtree(folder, ignore_errors=True)
