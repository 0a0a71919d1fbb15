"""docs/ci.md is true: its recipes and the actions run as a CI service runs them, and a changed byte ends the job."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as Xml
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e import forked_command
from tests.e2e.clean_container import CleanContainer
from tests.e2e.support import Snap, daemon_with
from tests.leftovers import nothing_left

pytestmark = pytest.mark.runc
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "ci.md").read_text()
TEST = """grep -q good state && printf '<testsuite><testcase name="good"/></testsuite>' > $SNAPSHOTD_JUNIT"""


@dataclass
class Runner:
    """A machine of a CI service: its own daemon, and the cache that it shares with others."""

    snap: Snap
    cache: Path
    folder: Path
    env: dict[str, str]
    """What its shell finds besides: this checkout's `snapshotd`."""

    def bash(self, script: str, code: int | None = 0, **env: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
            cwd=self.folder,
            env={**self.snap.env, **self.env, "CACHE": str(self.cache), "TEST": TEST, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
        )
        if code is not None:
            assert done.returncode == code, (script, done)
        return done


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bin")
    forked_command.install(folder)
    return folder


@pytest.fixture(scope="module")
def cache(small_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With an entry `linux-1` that another machine saved: a trajectory, its second snapshot tagged `known-good`. Its
    image is small, since every test takes it in."""
    cache = tmp_path_factory.mktemp("cache")
    with daemon_with(small_root, tmp_path_factory.mktemp("a") / "state") as snap:
        _fill(snap, cache)
        yield cache


def _fill(snap: Snap, cache: Path) -> None:
    trajectory, _ = snap.create("--runtime", "runc", "--name", "agent")
    good = snap.sh(trajectory, "echo good > state")["snapshot"]
    snap("tag", good, "known-good")
    snap.sh(trajectory, "echo better, good > state")
    snap("export", trajectory, "--trajectory", "--cache", cache, "--key", "linux-1")
    again = snap("export", trajectory, "--cache", cache, "--key", "linux-1")
    assert "has an entry" in again.stderr


@contextmanager
def machine(programs: Path, cache: Path, folder: Path) -> Iterator[Runner]:
    (folder / "checkout").mkdir()
    subprocess.run(["cp", "-al", cache, folder / "cache"], check=True)  # files of a cache never change
    snap = Snap(folder / "state")
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    yield Runner(snap, folder / "cache", folder / "checkout", env)
    if snap.state_dir.exists():  # a miss needs no daemon
        snap.stop_daemon()
        nothing_left(snap.state_dir, running=False)


@pytest.fixture
def runner(programs: Path, cache: Path, tmp_path: Path) -> Iterator[Runner]:
    with machine(programs, cache, tmp_path) as runner:
        yield runner


@pytest.fixture(scope="module")
def imported(programs: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """One that has the entry `linux-1`, for tests that change nothing of it."""
    with machine(programs, cache, tmp_path_factory.mktemp("imported")) as runner:
        runner.snap("import", "--cache", runner.cache, "--key", "linux-1")
        yield runner


def as_it_should(runner: Runner, key: str, *, restored: Path) -> None:
    """The job has tested, moved the tag to the trajectory's end, and saved that."""
    assert (restored / "state").read_text() == "good\n", "the known-good state of before"
    (case,) = Xml.parse(runner.folder / "junit.xml").iter("testcase")
    assert case.attrib == {"name": "good"}
    assert runner.snap("cat", "known-good:/workspace/state").stdout == "better, good\n"
    assert runner.snap.json("import", "--cache", runner.cache, "--key", key)["cache_hit"] is True


def recipes(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_job_of_the_page(runner: Runner) -> None:
    (job,) = recipes("bash")
    runner.bash(job, KEY="linux-2")
    as_it_should(runner, "linux-2", restored=runner.folder / "work")


@pytest.mark.long  # the same commands as in the job
def test_the_script(runner: Runner) -> None:
    runner.bash(str(ROOT / "docs/examples/ci/job.sh"), KEY="linux-3")
    as_it_should(runner, "linux-3", restored=runner.folder / "work")


@pytest.mark.long  # the same commands as in the script
def test_gitlab(runner: Runner) -> None:
    job = yaml.safe_load(recipes("yaml")[1])["test"]
    assert job["variables"]["TEST"].replace("$$", "$") in PAGE.replace("$$", "$")
    runner.bash("\n".join(job["script"]), CI_COMMIT_SHA="4")
    assert (runner.folder / job["artifacts"]["reports"]["junit"]).exists()
    as_it_should(runner, "linux-4", restored=runner.folder / "work")


# -- GitHub: the steps of a workflow and of its composite actions, with as much of its expressions as they use -----------


class Steps:
    """Runs steps; `outputs` are those of each that has an id."""

    def __init__(self, runner: Runner, known: dict[str, str]) -> None:
        self._runner, self._known = runner, known
        self.outputs: dict[str, dict[str, str]] = {}
        self.summary, self.said = "", ""

    def run(self, steps: list[dict[str, Any]], code: int = 0) -> None:
        for number, step in enumerate(steps):
            if step.get("uses", "").startswith("actions/checkout"):
                continue
            if "if" in step and not all(self._holds(term) for term in step["if"].split("&&")):
                continue
            if "uses" in step:
                self._action(step, code)
                continue
            done = self._step(step, code if number == len(steps) - 1 or code else 0)
            if done.returncode != 0:
                return

    def _step(self, step: dict[str, Any], code: int) -> subprocess.CompletedProcess[str]:
        places = {name: self._runner.folder.parent / name.lower() for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        env = {name: self._filled(value) for name, value in step.get("env", {}).items()}
        done = self._runner.bash(
            self._filled(step["run"]), None, **env, **{name: str(path) for name, path in places.items()}
        )
        assert done.returncode in (0, code), done
        self.said += done.stderr
        read = {name: path.read_text() if path.exists() else "" for name, path in places.items()}
        for path in places.values():
            path.unlink(missing_ok=True)
        self.summary += read["GITHUB_STEP_SUMMARY"]
        found = re.findall(r"^([\w-]+)<<(end-\w+)\n(.*?)\n?\2\n", read["GITHUB_OUTPUT"], re.MULTILINE | re.DOTALL)
        self.outputs[step.get("id", "last")] = {name: value for name, _, value in found}
        return done

    def _action(self, step: dict[str, Any], code: int) -> None:
        action = yaml.safe_load((ROOT / step["uses"] / "action.yml").read_text())
        inputs = {name: str(item.get("default", "")) for name, item in action["inputs"].items()}
        given = {name: self._filled(str(value)) for name, value in step["with"].items()}
        assert given.keys() <= inputs.keys()
        assert {name for name, item in action["inputs"].items() if item.get("required")} <= given.keys()
        inputs.update(given)
        inner = Steps(self._runner, {f"inputs.{name}": value for name, value in inputs.items()})
        inner.run(action["runs"]["steps"], code)
        self.said += inner.said
        values = {name: inner._filled(item["value"]) for name, item in action["outputs"].items()}
        self.outputs[step.get("id", "last")] = values

    def _holds(self, term: str) -> bool:
        left, right = (self._value(side) for side in term.split("!="))
        return left != right

    def _filled(self, text: str) -> str:
        return re.sub(r"\$\{\{(.*?)\}\}", lambda found: self._value(found[1]), text)

    def _value(self, expression: str) -> str:
        """The first of `a || b` that is not empty."""
        for term in map(str.strip, expression.split("||")):
            if term.startswith("'"):
                value = term.strip("'")
            elif term.startswith("steps."):
                _, step, _, name = term.split(".")
                value = self.outputs[step].get(name, "")
            else:
                value = self._known[term]
            if value:
                return value
        return ""


def test_github(runner: Runner, tmp_path: Path) -> None:
    workflow = yaml.safe_load(recipes("yaml")[0].replace("/srv/cache", str(runner.cache)))
    job = workflow["jobs"]["test"]
    steps = Steps(runner, {"github.sha": "5", "runner.temp": str(tmp_path)})
    steps.run(job["steps"])
    assert steps.outputs["state"]["cache-hit"] == "false"
    assert steps.outputs["state"]["cache-matched-key"].startswith("linux-")
    assert steps.outputs["state"]["trajectory"] == runner.snap.json("ls")[0]["id"]
    assert "1 passed, 0 failed" in steps.summary
    as_it_should(runner, "linux-5", restored=tmp_path / "work")


@pytest.mark.long  # what it is told: unit/cli/test_github.py
def test_github_is_told_of_failures(imported: Runner) -> None:
    runner = imported
    report = '<testsuite><testcase classname="t" name="a" file="t.py" line="7"><failure message="1 &lt; 2"/></testcase></testsuite>'
    fails = f"printf '{report}' > $SNAPSHOTD_JUNIT; exit 3"
    steps = Steps(runner, {})
    command = f"snapshotd exec --github --snapshot known-good --junit junit.xml -- sh -c {json.dumps(fails)}"
    steps.run([{"run": command.replace("$", "\\$").replace("`", "\\`")}], code=3)
    assert steps.outputs["last"] == {"exit-code": "3", "passed": "0", "failed": "1", "skipped": "0"}
    assert "::error title=t%3A%3Aa,file=t.py,line=7::1 < 2" in steps.said
    steps.run([{"run": "snapshotd tag --github --if false agent known-good"}], code=1)
    assert steps.outputs["last"]["tagged"] == "false"
    assert "::error title=known-good::the tag known-good stays" in steps.said


def test_a_miss_ends_the_job_only_if_told_to(runner: Runner) -> None:
    use = {"uses": "./.github/actions/restore", "with": {"cache": str(runner.cache), "key": "mac-1", "to": "work"}}
    steps = Steps(runner, {})
    steps.run([use])
    assert steps.outputs["last"] == {"cache-hit": "false", "cache-matched-key": "", "trajectory": ""}
    assert not (runner.folder / "work").exists()
    use["with"] = {**use["with"], "fail-on-cache-miss": "true"}  # type: ignore[dict-item]
    steps.run([use], code=1)
    assert "has no entry for mac-1" in steps.said


# -- in a clean container ------------------------------------------------------------------------------------------------

INSTALL = """
python3 -m venv /opt/snapshotd
/opt/snapshotd/bin/pip install --quiet --no-index --find-links /wheelhouse snapshotd
"""
CLEAN_JOB = """
trap 'code=$?; snapshotd daemon --stop || true; exit $code' EXIT
mkdir -p /build && cd /build
/job.sh
"""


@pytest.mark.long
@pytest.mark.timeout(1200)  # the first time, the base is bootstrapped
def test_a_job_in_a_clean_container(runner: Runner, tmp_path: Path) -> None:
    """It installs snapshotd from a wheel, imports, restores, tests, moves the tag and exports; then a byte is flipped."""
    root = tmp_path / "root"
    root.mkdir()
    clean = CleanContainer(root, runner.cache)
    shutil.copy(ROOT / "docs/examples/ci/job.sh", root / "job.sh")
    env = {"CACHE": "/cache", "TEST": TEST, "PATH": "/opt/snapshotd/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    done = clean.bash(INSTALL + CLEAN_JOB, {**env, "KEY": "linux-2"})
    assert done.returncode == 0, done
    nothing_left(clean.state_dir, running=False)
    shutil.copytree(root / "build", runner.folder, dirs_exist_ok=True)
    runner.bash("snapshotd import --cache $CACHE --key linux-2")  # on another machine
    as_it_should(runner, "linux-2", restored=root / "build/work")

    shutil.rmtree(clean.state_dir)
    shutil.rmtree(root / "build")
    clean.cache = damaged(runner.cache, tmp_path / "own cache")
    done = clean.bash(
        CLEAN_JOB.replace("/job.sh", "/job.sh || { code=$?; snapshotd ls --json; exit $code; }"),
        {**env, "KEY": "linux-9"},
    )
    assert done.returncode == 20, done
    assert "is not what was saved; nothing was taken" in done.stderr
    assert json.loads(done.stdout.splitlines()[0]) == []
    assert list((root / "build").iterdir()) == []
    nothing_left(clean.state_dir, running=False)


# -- what must not happen ------------------------------------------------------------------------------------------------


def damaged(cache: Path, copy: Path) -> Path:
    """A copy of the cache, with a flipped bit in the entry that has the most data, and without the others."""
    subprocess.run(["cp", "-a", cache, copy], check=True)
    part = max((copy / "parts").rglob("0*"), key=lambda path: path.stat().st_size)
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    for entry in (copy / "entries").iterdir():
        if json.loads(entry.read_text())["data"] != part.parent.name:
            entry.unlink()
    return copy


def test_a_changed_byte_ends_the_job_and_nothing_is_restored(runner: Runner, tmp_path: Path) -> None:
    own = damaged(runner.cache, tmp_path / "own cache")
    done = runner.bash(str(ROOT / "docs/examples/ci/job.sh"), 20, KEY="linux-9", CACHE=str(own))
    assert "is not what was saved; nothing was taken" in done.stderr
    assert runner.snap.json("ls") == []
    assert list(runner.folder.iterdir()) == []


@pytest.mark.long  # damage before it: the test above
def test_damage_behind_the_import_leaves_nothing_in_the_folder(runner: Runner) -> None:
    """The daemon's own store is damaged after the import: restore reads every byte."""
    snap = runner.snap
    (trajectory,) = snap.json("import", "--cache", runner.cache, "--key", "linux-1", "--wait", "stored")["trajectories"]
    snap.stop_daemon()
    pack = max((snap.state_dir / "repo/store/packs").rglob("*"), key=lambda path: path.is_file() * path.stat().st_size)
    data = bytearray(pack.read_bytes())
    for at in range(1000, len(data), 5000):
        data[at] ^= 0x10
    pack.write_bytes(data)
    done = runner.bash(f"snapshotd restore {trajectory} --to all", 20)
    assert "cannot be read because" in done.stderr, "which word of a frame is hit depends on its bytes"
    assert list(runner.folder.iterdir()) == []


@pytest.mark.long  # what is sealed: unit/client/test_sealing.py
def test_encrypted_on_its_way(imported: Runner, tmp_path: Path) -> None:
    snap, key = imported.snap, tmp_path / "ci.key"
    key.write_text("a key of at least sixteen bytes")
    snap("export", "known-good", "--encrypt", key, "-o", tmp_path / "sealed")
    snap("export", "known-good", "--encrypt", key, "--cache", tmp_path / "sealed cache", "--key", "k")
    files = [path for path in (tmp_path / "sealed cache").rglob("*") if path.is_file()]
    for path in (tmp_path / "sealed", *files):
        assert b"known-good" not in path.read_bytes()
    other = tmp_path / "other.key"
    other.write_text("another key of sixteen bytes")
    for source in ([tmp_path / "sealed"], ["--cache", tmp_path / "sealed cache", "--key", "k"]):
        assert "is encrypted" in snap("import", *source, code=2).stderr
        assert "another key" in snap("import", *source, "--decrypt", other, code=20).stderr
        assert "here already" in snap("import", *source, "--decrypt", key).stderr


@pytest.mark.long  # reports of tests: test_the_job_of_the_page, unit/test_junit.py
def test_a_report_is_there_whatever_the_command_does(imported: Runner) -> None:
    snap, report = imported.snap, imported.folder / "report.xml"

    def run(script: str, code: int) -> tuple[str, Xml.Element]:
        done = snap("exec", "--snapshot", "known-good", "--junit", report, "--", "sh", "-c", script, code=code)
        (case,) = Xml.parse(report).iter("testcase")
        return done.stdout, case

    said, case = run("echo hello; cat state", 0)
    assert said == "hello\ngood\n"
    assert [child.tag for child in case] == ["system-out"]
    assert case[0].text == "hello\ngood\n"
    said, case = run("printf 'a\\001b\\377'; exit 5", 5)
    failure = case.find("failure")
    assert failure is not None
    assert failure.attrib == {"message": "exit code 5"}
    said, case = run("echo x > $SNAPSHOTD_JUNIT; echo done", 0)
    assert said == "done\n"
    error = case.find("error")
    assert error is not None
    assert "is no XML" in error.attrib["message"]
    assert snap("exec", "--snapshot", "known-good", "--junit", report, "--", "no-such-program", code=127).stdout == ""
    refused = snap("exec", "--junit", report, "agent", "--", "true", code=125)
    assert "snapshotd cp" in refused.stderr
