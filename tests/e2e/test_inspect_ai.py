"""Inspect AI in sandboxes of ours: its own self check, and an evaluation whose log names the snapshot of every call."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.plug_rig import packages, run_program, run_suite
from tests.e2e.support import Snap

PINS = ("inspect-ai==0.3.285", "pytest-asyncio==1.5.0", "pytest==9.2.0")
pytestmark = [pytest.mark.runc, pytest.mark.usefixtures("plugged"), pytest.mark.timeout(300, func_only=True)]


@pytest.fixture(scope="module")
def folder() -> Path:
    return packages("inspect_ai", *PINS)


@pytest.mark.long
def test_the_self_check(
    folder: Path, plugged: Snap, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    passed, failed = run_suite("inspect_suite.py", PINS[0], folder, plugged, tmp_path / "report.xml", record_property)
    assert (passed, failed) == (44, set())


def run(folder: Path, snap: Snap, place: Path, *words: object) -> dict[str, Any]:
    said = run_program("inspect_agent.py", folder, snap, place, place / "logs", *words, env={"HOME": str(place)})
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def test_a_samples_log_names_the_snapshot_of_every_call(folder: Path, plugged: Snap, tmp_path: Path) -> None:
    first = run(folder, plugged, tmp_path)
    calls = [one for one in first["told"] if one["call"] == "exec" and _log_at(plugged, one) is not None]
    assert [_log_at(plugged, one) for one in calls] == ["1\n", "1\n2\n", "1\n2\n3\n"]
    (box,) = {one["trajectory"] for one in first["told"]}
    (info,) = plugged.json("ls")
    assert (info["id"], info["status"]) == (box, "stopped")
    assert info["name"].startswith("inspect-")
    told = {one["snapshot"] for one in first["told"]}
    assert {step["id"] for step in plugged.json("log", "--all", box)} == told, "every snapshot is in the log"

    again = run(folder, plugged, tmp_path, calls[1]["snapshot"])
    assert [text for text in again["outputs"] if text.startswith("1\n")][-1].strip() == "1\n2\n1\n2\n3"
    assert _log_at(plugged, {"snapshot": box}) == "1\n2\n3\n", "the sample that it was forked from is as it was"


def _log_at(snap: Snap, told: dict[str, Any]) -> str | None:
    found = snap("cat", f"{told['snapshot']}:/workspace/log", code=None)
    return found.stdout if found.returncode == 0 else None
