"""Sandboxes of ours as NeMo Gym's, as it comes from PyPI: a rollout, what was taken of it in another process, and its fence."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests import long
from tests.capabilities import python312
from tests.e2e.model_rig import INSTALL_TIMEOUT_S
from tests.e2e.plug_rig import ROOT
from tests.e2e.support import Snap, processes_with, wait_until
from tests.kept import CACHE, cached

PIN = "nemo-gym==0.4.0"
PROGRAM = Path(__file__).with_name("programs") / "gym_rollout.py"
pytestmark = [pytest.mark.runc, pytest.mark.usefixtures("plugged"), pytest.mark.timeout(300, func_only=True)]


@pytest.fixture(scope="module")
def python() -> Path:
    """Python 3.12 with NeMo Gym: its sandboxes need nothing of what it depends on, which are 1.4 GB."""
    base = python312()
    if not long.LONG and not (CACHE / "venv-nemo-gym.lock").exists():
        pytest.skip(f"{PIN} is not installed; the long set downloads it")

    def install(folder: Path) -> None:
        subprocess.run([base, "-m", "venv", folder], check=True)
        pip = [folder / "bin" / "python", "-m", "pip", "install", "-q", "--no-deps", PIN]
        subprocess.run(pip, check=True, timeout=INSTALL_TIMEOUT_S)

    return cached("venv-nemo-gym", PIN, install) / "bin" / "python"


def installed(place: Path) -> Path:
    """A folder that has the entry points of this checkout, as an installation of it would."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    folder = place / "snapshotd-0.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: snapshotd\nVersion: 0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in those.items())
        for group, those in points.items()
    ]
    (folder / "entry_points.txt").write_text("\n".join(lines))
    return place


def run(python: Path, snap: Snap, place: Path, *words: str) -> dict[str, Any]:
    done = begun(python, snap, place, *words)
    said, errors = done.communicate(timeout=120)
    assert done.returncode == 0, said + errors
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def begun(python: Path, snap: Snap, place: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [python, PROGRAM, *words],
        env={**snap.env, "PYTHONPATH": os.pathsep.join((str(installed(place)), str(ROOT))), "HOME": str(place)},
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_rollout_is_cloned_and_restored_under_a_fence(python: Path, plugged: Snap, tmp_path: Path) -> None:
    told = run(python, plugged, tmp_path, "rollout")
    assert "snapshotd" in told["providers"]
    assert (told["fetched"], told["slow"], told["status"]) == ("1\n2\n3\n", ["begun\n", 125, "timeout"], "running")
    box = told["taken"][0]["sandbox_id"]
    assert [step["tool"]["name"] for step in plugged.json("log", box)].count("exec") == 4, (
        "one snapshot for each command"
    )
    logs = [plugged("cat", f"{one['snapshot']}:/work/log").stdout for one in told["taken"]]
    assert logs == ["1\n", "1\n2\n", "1\n2\n3\n"]

    found = run(python, plugged, tmp_path, "goes on", json.dumps(told["taken"][1]))
    assert found == {
        "now": "1 2 3",
        "clones": ["1 2 clone", "1 2"],
        "restores": ["SandboxHandle", "StaleHandleError"],
        "restored": "1 2",
        "stale": ["StaleHandleError"] * 5,
        "statuses": ["stopped", "running"],
        "retired": "StaleHandleError",
    }
    statuses = {one["id"]: one["status"] for one in plugged.json("ls")}
    assert len(statuses) == 4, "the restore that was too late left nothing"
    assert statuses[box] == "stopped", "a restore stops the earlier sandbox"


def test_a_daemon_that_dies_within_a_command_is_told_and_the_rollout_is_restored(
    python: Path, plugged: Snap, tmp_path: Path
) -> None:
    running = begun(python, plugged, tmp_path, "cut off")
    sleeps = "sleep 6062"
    wait_until(lambda: sleeps in [line.strip() for _, line in processes_with(sleeps)], "the command has written")
    plugged.kill_daemon()
    said, errors = running.communicate(timeout=120)
    assert running.returncode == 0, said + errors
    told = json.loads(said.splitlines()[-1])
    assert told["answer"] == [125, "sandbox"]
    plugged("ls")  # starts the next daemon, for which the rollout's Python lacks the packages
    assert run(python, plugged, tmp_path, "restored", json.dumps(told["taken"])) == {"restored": "1 again"}


def test_what_cannot_be_is_nemo_gyms_own_error(python: Path, plugged: Snap, tmp_path: Path) -> None:
    assert run(python, plugged, tmp_path, "errors") == {
        "refused": ["SandboxCreateError", "SandboxCreateError", "ValueError", "SandboxCreateError", "FileNotFoundError"]
        + ["SandboxCreateError"] * 2,
        "answers": [[125, "sandbox"]] * 2,
        "status": "unknown",
    }
    assert plugged.json("ls") == []
