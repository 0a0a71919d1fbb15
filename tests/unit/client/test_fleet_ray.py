"""One program over the nodes of a Ray cluster on this machine, as Ray comes from PyPI."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import long
from tests.kept import CACHE, cached
from tests.unit.client.fleet_rig import SAID, Nodes, environment, example

PIN = "ray==2.60.0"
PROGRAM = Path(__file__).with_name("ray_program.py")
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def python() -> Path:
    """An interpreter with Ray: 285 MB."""
    if not long.LONG and not (CACHE / "venv-ray.lock").exists():
        pytest.skip(f"{PIN} is not installed; the long set downloads it")

    def install(folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "-q", PIN], check=True, timeout=600)

    return cached("venv-ray", PIN, install) / "bin" / "python"


@pytest.fixture
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    nodes = Nodes()
    nodes.start(2)
    yield [str(daemon.socket_path) for daemon in nodes.daemons.values()]
    nodes.close()


def in_cluster(python: Path, folder: Path, *words: str) -> Any:
    (folder / "markers").mkdir()
    done = subprocess.run(
        [python, PROGRAM, *words],
        env=environment(MARKERS=str(folder / "markers"), RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_the_script_of_one_machine_runs_over_a_cluster(python: Path, sockets: list[str], tmp_path: Path) -> None:
    _, script = example(tmp_path, 'FLEET = "ray"\n')
    told = in_cluster(python, tmp_path, "run", script, "--", *sockets)
    assert (told["out"].splitlines(), told["code"]) == ([*SAID, "2 node(s)"], 0), told["err"]


@pytest.mark.long
def test_functions_run_beside_their_branches_and_outlive_workers_and_nodes(
    python: Path, sockets: list[str], tmp_path: Path
) -> None:
    told = in_cluster(python, tmp_path, "check", *sockets)
    assert (told["nodes"], told["at_home"]) == (2, 8)
    assert told["where"] == [[True, "a task\n"]] * 16
    assert told["failed"] == ["KeyError"] * 2
    assert told["worker"] == ["once\n"] * 2, "Ray ran it again, and the command was not"
    assert told["worker_without_token"] == ["DaemonUnavailable"]
    assert (told["grouped_on"], told["grouped"]) == ([True], [[True, "a task\n"]] * 4)
    assert told["moved"] == [[True, "a task\n"]] * 8
    assert told["moved_to_home"]
