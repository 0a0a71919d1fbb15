"""The list of allowed system calls against what Docker and Podman allow; `seccomp_defaults.json` has their names and
every difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from snapshotd.runtime import seccomp

_DEFAULTS: dict[str, Any] = json.loads((Path(__file__).parent / "seccomp_defaults.json").read_text())
_ENGINES = "docker", "podman"


def _names(side: str) -> set[str]:
    return {name for entry in _DEFAULTS["differences"][side] for name in entry["names"]}


def _ours() -> set[str]:
    return {
        name for rule in seccomp.profile()["syscalls"] if rule["action"] == "SCMP_ACT_ALLOW" for name in rule["names"]
    }


@pytest.mark.parametrize("engine", _ENGINES)
def test_each_difference_from_an_engine_has_its_reason(engine: str) -> None:
    theirs = set(_DEFAULTS[engine]["allowed"])
    assert theirs - _ours() - _names("refused here") == set()
    assert _ours() - theirs - _names("allowed here") == set()


def test_no_reason_is_left_over() -> None:
    engines = [set(_DEFAULTS[engine]["allowed"]) for engine in _ENGINES]
    assert _names("refused here") <= set.union(*engines) - _ours()
    assert _names("allowed here") <= _ours() - set.intersection(*engines)
    assert all(entry["reason"] for side in _DEFAULTS["differences"].values() for entry in side)
