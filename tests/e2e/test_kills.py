"""Kill the agent, its sandbox or the daemon at any time: after `resume` all is as if nothing had been, and no effect
happened twice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotd import failpoints
from tests import long
from tests.e2e.kills import CALLS, Rig, reachable_address
from tests.e2e.support import Snap

RUNS = long.size(1, 20)
"""Of each runtime."""
SEED = long.SEED
ON_THE_WAY = [
    name
    for name in failpoints.NAMES
    if name.startswith(("engine.step.", "engine.journal.begun", "engine.resume.", "engine.start."))
]
"""Failpoints that a run or its resume passes. (The end of a model's call, of which it has none: test_survive.py.)"""
WITH_A_MOUNT = ("engine.start.pivoted",)
"""Those that a plain folder does not pass."""
SHORT = ("engine.step.sealed", "engine.step.outputs_saved", "engine.resume.")
"""Those of the short set, which dies at the others in test_survive.py and in tests/crash/test_storage_kill.py."""


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    with reachable_address() as address:
        yield address


@pytest.fixture
def rig(own_snap: Snap, runtime: str, tmp_path: Path, host: str) -> Rig:
    return Rig(own_snap, runtime, tmp_path, host)


@pytest.fixture
def folder_rig(own_snap: Snap, tmp_path: Path, host: str) -> Rig:
    """The same without isolation, where everything ends with the daemon."""
    return Rig(own_snap, "none", tmp_path, host)


@pytest.fixture(scope="module")
def calm() -> dict[str, tuple[dict[str, Any], float]]:
    """What an undisturbed run comes to, by runtime."""
    return {}


def _calm(rig: Rig, calm: dict[str, tuple[dict[str, Any], float]]) -> tuple[dict[str, Any], float]:
    if rig.runtime not in calm:
        found, took = rig.undisturbed()
        assert found["effects"] == [
            ((kind, number), 1) for kind, rest in (("charge", 0), ("put", 1)) for number in range(rest, CALLS, 3)
        ]
        assert len(found["journal"]) == CALLS
        calm[rig.runtime] = found, took
    return calm[rig.runtime]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("run", range(RUNS))
def test_killed_at_random_times(rig: Rig, calm: dict[str, tuple[dict[str, Any], float]], run: int) -> None:
    expected, took = _calm(rig, calm)
    found, kills = rig.disturbed(random.Random(f"{SEED}-{rig.runtime}-{run}"), took)
    assert found == expected, f"seed {SEED}, run {run}, killed: {kills}"


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("run", range(RUNS))
def test_killed_at_random_times_without_isolation(
    folder_rig: Rig, calm: dict[str, tuple[dict[str, Any], float]], run: int
) -> None:
    test_killed_at_random_times(folder_rig, calm, run)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["runc", pytest.param("none", marks=pytest.mark.long)])
def test_killed_at_all_failpoints_one_after_the_other(
    own_snap: Snap, tmp_path: Path, host: str, calm: dict[str, tuple[dict[str, Any], float]], kind: str
) -> None:
    rig = Rig(own_snap, kind, tmp_path, host)
    expected, _ = _calm(rig, calm)
    passed = [name for name in ON_THE_WAY if kind == "runc" or name not in WITH_A_MOUNT]
    if not long.LONG:
        passed = [name for name in passed if name.startswith(SHORT)]
    in_turn = sorted(
        passed, key=lambda name: name == "engine.step.outputs_saved"
    )  # only the end of the run has outputs
    log = own_snap.state_dir / "daemon.log"
    before = log.stat().st_size
    assert rig.at_failpoints(f"armed-{kind}", *in_turn) == expected
    said = log.read_bytes()[before:].decode(errors="replace")
    assert [name for name in passed if f"failpoint {name} reached" not in said] == []


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("failpoint", ON_THE_WAY)
def test_killed_at_every_failpoint(
    own_snap: Snap, tmp_path: Path, host: str, calm: dict[str, tuple[dict[str, Any], float]], failpoint: str
) -> None:
    rig = Rig(own_snap, "runc", tmp_path, host)
    expected, _ = _calm(rig, calm)
    assert rig.at_failpoints(f"armed-{failpoint}", *(f"{failpoint}:{hit}" for hit in (1, 2, 5, 9))) == expected
