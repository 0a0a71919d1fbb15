"""SWE-ReX in sandboxes of ours: its own tests of what runs commands, and a program that goes back, forks and is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.model_rig import INSTALL_TIMEOUT_S
from tests.e2e.plug_rig import ROOT, check_page, packages, run_program, run_suite
from tests.e2e.support import Snap
from tests.kept import cached

VERSION = "1.4.0"
PINS = (f"swe-rex=={VERSION}", "aiohttp==3.14.5", "pytest-asyncio==1.5.0", "pytest==9.2.0")
QUIET = {"SWE_REX_LOG_STREAM_LEVEL": "ERROR"}  # it logs to standard output
pytestmark = [pytest.mark.runc, pytest.mark.usefixtures("plugged"), pytest.mark.timeout(300, func_only=True)]
NOT_OURS = {
    # it wants the shell to say `Killed` of a pager that an interrupt ends, which here has been ended when its time was over
    "test_interrupt_pager"
}


@pytest.fixture(scope="module")
def folder() -> Path:
    return packages("swerex", *PINS)


def sources() -> Path:
    """SWE-ReX's source archive: its wheel has no tests."""

    def download(place: Path) -> None:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "--dest", place]
        subprocess.run([*pip, f"swe-rex=={VERSION}"], check=True, timeout=INSTALL_TIMEOUT_S)
        (archive,) = place.glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            opened.extractall(place, filter="data")

    return cached("swe-rex-sources", VERSION, download) / f"swe_rex-{VERSION}"


@pytest.mark.long
def test_its_own_suite(
    folder: Path,
    plugged: Snap,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(plugged.env, "SNAPSHOTD_TEST_REX", str(sources()))
    passed, failed = run_suite("rex_suite.py", PINS[0], folder, plugged, tmp_path / "report.xml", record_property)
    assert (passed, failed) == (49, NOT_OURS)


def run(folder: Path, snap: Snap, place: Path, *words: object, code: int = 0) -> str:
    return run_program("rex_agent.py", folder, snap, place, place / "notes.json", *words, code=code, env=QUIET)


def test_a_shell_goes_back_and_forks_with_its_files(folder: Path, plugged: Snap, tmp_path: Path) -> None:
    assert run(folder, plugged, tmp_path, "travel").splitlines() == [
        "1 2 3 4",
        "fork: 1 2 2 /srv/work",
        "back: 1 2 2 in /srv/work",
        "again: 1 2 3",
    ]
    (first,) = (one for one in plugged.json("ls") if one["forked_from"] is None)
    tools: list[Any] = [step["tool"]["name"] for step in plugged.json("log", "--all", first["id"])]
    assert tools == ["start", "exec", *["exec"] * 5, "rewind", "exec", "exec"], "one snapshot for each command"


@pytest.mark.parametrize("point", ["before", "within", "after"])
def test_a_killed_program_goes_on(folder: Path, plugged: Snap, tmp_path: Path, point: str) -> None:
    run(folder, plugged, tmp_path, "run", point, 3, code=-signal.SIGKILL)
    assert run(folder, plugged, tmp_path, "run", "never", 0) == "1 2 3 4\n"


def test_what_cannot_be_is_swe_rexs_own_word(folder: Path, plugged: Snap, tmp_path: Path) -> None:
    assert run(folder, plugged, tmp_path, "errors").split() == [
        *("not", "started", "True", "True"),
        *("SwerexException", "SwerexException", "FileNotFoundError", "False"),
    ]


def test_the_programs_of_the_page(folder: Path, plugged: Snap, tmp_path: Path) -> None:
    check_page("swe-rex.md", plugged, tmp_path, {"PYTHONPATH": f"{folder}:{ROOT}", **QUIET})
