"""Undoing a call in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from library_rig import PYTHON

from snapshotd.engine.history.effects import NOT_BEGUN
from tests.agent_daemon import FakeDaemon

PROGRAM = """
import json
from snapshotd.agent import message, tool
from SIBLING import WHERE

def cancel(call):
    assert tool(lambda: 5)() == 5       # not recorded: a part of the compensation
    with open(WHERE, "w") as out:
        json.dump([call, __name__], out)

@tool(side_effect="irreversible", compensate=cancel)
def order(n): return {"number": n}

if GUARD:
    order(3)
    message("user", "ordered")
"""
TOLD = {"name": "order", "arguments": {"n": 3}, "result": {"number": 3}, "key": "k"}


class Place:
    """A folder with the agent's file, and how to run things there."""

    def __init__(self, folder: Path, name: str, library: Path, socket_path: Path) -> None:
        self.file = folder / name
        self.package = name == "orders.py"
        self.told = folder.parent / "told"
        self.environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(library),
            "SNAPSHOTD_AGENT_SOCKET": str(socket_path),
        }
        folder.mkdir()
        (folder / "sibling.py").write_text(f"WHERE = {str(self.told)!r}\n")
        if self.package:
            (folder / "__init__.py").write_text("")

    def write(self, guard: str) -> None:
        self.file.write_text(
            PROGRAM.replace("SIBLING", ".sibling" if self.package else "sibling").replace("GUARD", guard)
        )

    def start(self) -> None:
        what = ["-m", "pack.orders"] if self.package else [str(self.file)]
        subprocess.run([PYTHON, *what], env=self.environment, cwd=self.file.parent.parent, check=True, timeout=60)

    def undo(self, argv: list[str]) -> subprocess.CompletedProcess[str]:
        environment = {**self.environment, "SNAPSHOTD_CALL": json.dumps(TOLD)}
        return subprocess.run(argv, env=environment, cwd="/", capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(
    params=[("pack", "orders.py"), ("my-folder", "my-orders.py"), ("other", "json.py")], ids=lambda param: param[1]
)
def place(request: Any, tmp_path: Path, library: Path, socket_path: Path) -> Place:
    folder, name = request.param
    return Place(tmp_path / folder, name, library, socket_path)


def test_a_function_undoes_its_call(place: Place, daemon: FakeDaemon, server: FakeDaemon) -> None:
    place.write("__name__ == '__main__'")
    if place.file.name == "json.py":  # as a script it would hide the real one from itself
        argv = [PYTHON, "-m", "snapshotd.agent.compensate", str(place.file), "cancel"]
    else:
        place.start()
        (begun,) = daemon.sent("call_begin")
        argv = begun["compensate"]["argv"]
        assert argv[1:] == ["-m", "snapshotd.agent.compensate", str(place.file), "cancel"]
    requests = len(daemon.requests)
    done = place.undo(argv)
    assert done.returncode == 0, done.stderr
    told, name = json.loads(place.told.read_text())
    assert told == TOLD
    assert (
        name == {"orders.py": "pack.orders", "my-orders.py": "_compensated", "json.py": "_compensated"}[place.file.name]
    )
    assert len(daemon.requests) == requests


def test_a_program_that_would_start_again_is_stopped(place: Place, daemon: FakeDaemon, server: FakeDaemon) -> None:
    place.write("True")
    done = place.undo([PYTHON, "-m", "snapshotd.agent.compensate", str(place.file), "cancel"])
    assert done.returncode == NOT_BEGUN
    assert "put the program's start under `if __name__" in done.stderr
    assert daemon.requests == []
    assert not place.told.exists()


def test_only_a_function_that_was_not_called_has_not_begun(place: Place, server: FakeDaemon) -> None:
    argv = [PYTHON, "-m", "snapshotd.agent.compensate", str(place.file), "cancel"]
    place.file.write_text("import sys\nsys.exit(0)\n")
    assert place.undo(argv).returncode == NOT_BEGUN
    place.file.write_text("def other(call): pass\n")
    assert place.undo(argv).returncode == NOT_BEGUN
    place.file.write_text("import no_such_module\n")
    assert place.undo(argv).returncode == NOT_BEGUN
    place.file.write_text(f"import sys\ndef cancel(call): sys.exit({NOT_BEGUN})\n")
    assert place.undo(argv).returncode == 1
    place.file.write_text("import sys\ndef cancel(call): sys.exit()\n")
    assert place.undo(argv).returncode == 0


def test_a_wrong_invocation_and_a_failing_function(place: Place, server: FakeDaemon) -> None:
    place.write("__name__ == '__main__'")
    assert place.undo([PYTHON, "-m", "snapshotd.agent.compensate", str(place.file)]).returncode == 2
    place.told.mkdir()  # so that cancel() fails
    done = place.undo([PYTHON, "-m", "snapshotd.agent.compensate", str(place.file), "cancel"])
    assert done.returncode == 1
    assert "IsADirectoryError" in done.stderr
