"""What the tests of the integrations share: a daemon without Docker, and the programs of their pages."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests import long
from tests.e2e.model_rig import from_pip
from tests.e2e.prepared import NO_ENGINE, daemon_on
from tests.e2e.support import Snap
from tests.kept import CACHE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def plug_daemon(minimal_state: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Snap]:
    """It may be killed and stopped. It finds no Docker, so that sandboxes are runc's."""
    with daemon_on(minimal_state, tmp_path_factory.mktemp("p") / "state", NO_ENGINE) as snap:
        yield snap


@pytest.fixture
def plugged(plug_daemon: Snap, monkeypatch: pytest.MonkeyPatch) -> Iterator[Snap]:
    """The default daemon of clients that the test makes. Its trajectories go at the end."""
    monkeypatch.setenv("SNAPSHOTD_STATE_DIR", str(plug_daemon.state_dir))
    yield plug_daemon
    for one in reversed(plug_daemon.json("ls")):
        plug_daemon("rm", "--force", one["id"])


def check_page(page: str, snap: Snap, folder: Path, env: Mapping[str, str] | None = None) -> None:
    """Every program of a page prints what the page shows, each in turn."""
    blocks = re.findall(r"```console\n(.*?)```", (ROOT / "docs" / "integrations" / page).read_text(), re.DOTALL)
    runs = [run for block in blocks for run in re.findall(r"^\$ python3 (\S+)\n((?:[^$].*\n)*)", block, re.MULTILINE)]
    assert runs, "the page shows no program"
    for name, shown in runs:
        done = subprocess.run(
            [sys.executable, ROOT / "docs" / "examples" / "integrations" / name],
            env={**snap.env, "PYTHONPATH": str(ROOT), **(env or {})},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (done.returncode, done.stdout) == (0, shown), done.stderr


def packages(name: str, *pins: str) -> Path:
    """A folder with the packages of a framework, behind all others of this process. Downloaded in the long set alone."""
    if find_spec(name) is None:
        cached_already = (CACHE / f"pip-{pins[0].partition('==')[0]}.lock").exists()
        if not (long.LONG or cached_already):
            pytest.skip(f"{pins[0]} is not installed; the long set downloads it")
        folder = from_pip(pins[0].partition("==")[0], pins)
        sys.path.append(str(folder))
        return folder
    return Path(next(iter(find_spec(name).submodule_search_locations or ()))).parent  # type: ignore[union-attr]


def run_suite(
    suite: str, name: str, folder: Path, snap: Snap, report: Path, record: Callable[[str, object], None]
) -> tuple[int, set[str]]:
    """Run a framework's own suite, a file in `programs`, with its packages; returns how many tests passed, and the others.
    `name`: of the suite, with its version. `record`: pytest's `record_property`; the run prints the count at its end."""
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-c",
                "/dev/null",
                "-p",
                "pytest_asyncio",
                "-p",
                "no:cacheprovider",
            ),
            *("-o", "asyncio_mode=auto", "--rootdir", str(report.parent), f"--junitxml={report}"),
            str(Path(__file__).with_name("programs") / suite),
        ],
        env={**snap.env, "PYTHONPATH": f"{folder}:{ROOT}"},
        cwd=report.parent,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert report.exists(), done.stdout + done.stderr
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = {case.attrib["name"] for case in cases if len(case) and case[0].tag in ("failure", "error", "skipped")}
    others = f", all but {', '.join(sorted(failed))}" if failed else ""
    record("told", f"{name}: {len(cases) - len(failed)} of {len(cases)} passed{others}")
    return len(cases) - len(failed), failed


def run_program(
    name: str,
    folder: Path,
    snap: Snap,
    place: Path,
    *words: object,
    code: int = 0,
    env: Mapping[str, str] | None = None,
) -> str:
    """Run a program of `programs` in the folder `place`, with a framework's packages, to its end with this exit code; what
    it printed."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("programs") / name, *map(str, words)],
        env={**snap.env, "PYTHONPATH": f"{folder}:{ROOT}", **(env or {})},
        cwd=place,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout
