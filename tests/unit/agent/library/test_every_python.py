"""The library under every Python that an image may have: each feature once, live and in a replay."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from test_mind import STORE, TASKS
from test_models import PROGRAM as MODELS
from test_replay import OUTCOMES, STEPS

from tests.agent_daemon import FakeDaemon

OLDEST = (3, 8)


def pythons() -> list[Path]:
    """The one that runs this, and one of every other version that pyenv has, from the oldest that the library supports."""
    found = {sys.version_info[:2]: Path(sys.executable)}
    for path in sorted((Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions").glob("3.*.*/bin/python3")):
        major, minor = path.parts[-3].split(".")[:2]
        if minor.isdigit() and (int(major), int(minor)) >= OLDEST:
            found.setdefault((int(major), int(minor)), path)
    return [found[version] for version in sorted(found)]


PROGRAMS = {"outcomes": OUTCOMES, "steps": STEPS.replace("LAST", "3"), "models": MODELS, "tasks": TASKS, "store": STORE}


@pytest.fixture(params=pythons(), ids=lambda path: path.parts[-3] if "versions" in path.parts else "this")
def python(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def run(python: Path, library: Path, socket_path: Path, *command: str) -> str:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(library), "SNAPSHOTD_AGENT_SOCKET": str(socket_path), "PYTHONWARNINGS": "error"}
    folder = socket_path.parent
    done = subprocess.run([str(python), *command], env=env, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_the_same_outcomes_live_and_in_a_replay(program: str, python: Path, library: Path, socket_path: Path) -> None:
    file = socket_path.parent / "agent.py"
    file.write_text(textwrap.dedent(program))
    first = FakeDaemon()
    with first.serving(socket_path):
        run(python, library, socket_path, str(file))
    assert None not in [call["status"] for call in first.calls.values()]
    second = first.resumed()
    second.values = {}
    with second.serving(socket_path):
        run(python, library, socket_path, str(file))
    assert second.old_journal == []
    assert {request["call"] for request in second.sent("call_end")} <= set(second.calls)
    assert not [call for call in second.calls.values() if call["kind"] != "task"]  # tasks that did not complete run; nothing else does


def test_the_command(python: Path, library: Path, socket_path: Path) -> None:
    daemon = FakeDaemon()
    agent = ("-m", "snapshotd.agent")
    with daemon.serving(socket_path):
        call = run(python, library, socket_path, *agent, "begin", "work", "--arguments", "[1]").strip()
        assert run(python, library, socket_path, *agent, "end", call, "--result", "2") == f"{1:032x}\n"
        said = run(python, library, socket_path, *agent, "run", "say", "--key", "k", "--", "sh", "-c", "echo --key; echo $SNAPSHOTD_KEY")
        assert said == "--key\nk\n"
        run(python, library, socket_path, *agent, "state", "set", "a", "1")
    assert [(call["name"], call["status"]) for call in daemon.calls.values()] == [("work", "done"), ("say", "done")]
    assert daemon.state == {"a": 1}
