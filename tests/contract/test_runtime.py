"""The runtime contract over every driver: runc with and without user namespace, and Docker."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshotd.types import new_id
from tests import rigs
from tests.capabilities import require
from tests.contracts.runtime import CHECKS, Rig
from tests.contracts.runtime_rig import eventually
from tests.leftovers import cgroups


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("runc-userns", marks=pytest.mark.runc),
        pytest.param("runc", marks=[pytest.mark.runc, pytest.mark.long]),
        pytest.param("docker", marks=pytest.mark.docker),
    ],
)
def rig(request: pytest.FixtureRequest, small_root: Path) -> Iterator[Rig]:
    instance = f"test-{new_id()[:8]}"
    with rigs.work_directory() as directory:
        if request.param == "docker":
            rig = rigs.docker(instance, directory, small_root, request.getfixturevalue("docker_daemon"))
        else:
            rig = rigs.runc(instance, directory, small_root, rigs.ID_MAP if request.param == "runc-userns" else None)
        yield rig
        rig.destroy_used()
        assert rig.keeper.keys() == set()
        rig.keeper.close()
        assert not (directory / "keeper/keeper.sock").exists()
        _assert_clean(rig, instance, directory)


def _assert_clean(rig: Rig, instance: str, directory: Path) -> None:
    assert rig.runtime.list() == []
    assert cgroups(f"snapshotd-{instance}") == []
    assert not list(directory.glob("docker/*"))
    assert not list(directory.glob("runc/bundles/*"))
    assert not list(directory.glob("runc/state/*"))


@pytest.mark.parametrize("check", CHECKS, ids=[check.__name__.removeprefix("check_") for check in CHECKS])
def test_contract(rig: Rig, check: Callable[[Rig], None]) -> None:
    assert rig.runtime.unavailable() is None
    if "network" in check.__name__ or check.__name__ == "check_destroy_leaves_nothing":
        require("slirp4netns")
    threads = len(os.listdir("/proc/self/task"))
    check(rig)
    eventually(
        lambda: len(os.listdir("/proc/self/task")) <= threads + 2, "threads pile up"
    )  # those of a pool may just be ending
