"""Snapshots do not change what programs do: a real project's test suite has the same outcomes with and without them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from snapshotd.client import Snapshotd
from snapshotd.types import new_id
from tests import long
from tests.e2e.demo_project import files_of_tests, prepare
from tests.e2e.support import Snap

PYTEST = ("python3", "-m", "pytest", "-q", "-rA", "--tb=no", "--color=no")
OUTCOMES = ("PASSED ", "FAILED ", "ERROR ", "SKIPPED ", "XFAIL ", "XPASS ")
ENVIRONMENT = (
    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME=/root",
    "LANG=C.UTF-8",
    "TERM=dumb",
)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's project with its planted bug, so that failures are compared too."""
    target = tmp_path_factory.mktemp("project") / "sqlparse"
    prepare(target)
    return target


def outcomes(output: str) -> list[str]:
    """`PASSED tests/test_x.py::test_y` and so on, one entry per test, in the order of their names."""
    return sorted(line for line in output.splitlines() if line.startswith(OUTCOMES))


@pytest.fixture(scope="module")
def expected(snap: Snap, project: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The outcomes in a plain `runc run` on an ordinary directory: no overlay, no pivot, no daemon."""
    directory = tmp_path_factory.mktemp("plain")
    root = directory / "root"
    trajectory, snapshot = snap.create("--runtime", "runc", "--workspace", project)
    snap("restore", snapshot, "--to", root)
    snap("rm", "--force", trajectory)
    root.chmod(0o755)
    loop = f"cd /workspace && for file in {' '.join(files_of_tests(project))}; do {' '.join(PYTEST)} $file; [ $? -le 1 ] || exit 3; done"
    subprocess.run(["runc", "spec"], cwd=directory, check=True, timeout=60)
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    config["root"] = {"path": str(root), "readonly": False}
    config["process"] |= {"terminal": False, "args": ["/bin/sh", "-c", loop], "env": list(ENVIRONMENT)}
    (directory / "config.json").write_text(json.dumps(config))
    with open(directory / "output", "wb") as output:
        command = ["runc", "run", f"snapshotd-plain-{new_id()[:12]}"]
        subprocess.run(command, cwd=directory, stdin=subprocess.DEVNULL, stdout=output, check=True, timeout=300)
    subprocess.run(["rm", "-rf", root], check=True)
    found = outcomes((directory / "output").read_text())
    assert len(found) > long.size(60, 400)
    assert sum(line.startswith("FAILED ") for line in found) == 2, "the planted bug fails two tests"
    return found


@pytest.mark.long  # the runs of `make demo`; e2e/test_fidelity.py
def test_the_suite_has_the_same_outcomes_with_a_snapshot_after_each_file(
    snap: Snap, runtime: str, project: Path, expected: list[str]
) -> None:
    """Every test file is a tool call. They leave bytecode and pytest's cache behind, so each snapshot has changes."""
    trajectory, _ = snap.create("--runtime", runtime, "--workspace", project)
    files = files_of_tests(project)
    output = ""
    for file in files:
        done = snap.json("exec", trajectory, "--", *PYTEST, file, code=None)
        assert done["exit_code"] in (0, 1), done["stderr"]
        output += done["stdout"]
    Snapshotd(state_dir=snap.state_dir, autostart=False).flush(trajectory)  # so that all changes are counted
    log = snap.json("log", trajectory)[1:]
    assert [entry["tool"]["arguments"]["argv"][-1] for entry in log] == files
    assert all(entry["files"]["added"] + entry["files"]["changed"] > 0 for entry in log)
    snap("rm", "--force", trajectory)
    assert outcomes(output) == expected
