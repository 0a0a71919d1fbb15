"""DeepAgents in a sandbox of ours: the suite of LangChain's standard tests, and a real agent with a scripted model whose thread
goes back, forks and is killed together with its files."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.plug_rig import packages, run_program, run_suite
from tests.e2e.support import Snap

PINS = ("langchain-tests==1.1.9", "deepagents==0.7.32", "langgraph==1.2.24")
pytestmark = [pytest.mark.runc, pytest.mark.usefixtures("plugged"), pytest.mark.timeout(300, func_only=True)]
UPSTREAM = {
    # deepagents 0.7.32 answers absolute paths, where the suite 1.1.9 still wants relative ones
    "test_glob",
    "test_glob_basic_pattern",
    "test_glob_with_directories",
    "test_glob_hidden_files_explicitly",
    "test_glob_with_character_class",
    "test_glob_with_question_mark",
    # `BaseSandbox.write` of deepagents 0.7.32 overwrites by its own documentation, where the suite wants an error
    "test_write_existing_file_fails",
}


@pytest.fixture(scope="module")
def folder() -> Path:
    return packages("langchain_tests", *PINS)


@pytest.mark.long
def test_the_suite_of_langchain(
    folder: Path, plugged: Snap, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    passed, failed = run_suite(
        "deepagents_suite.py", PINS[0], folder, plugged, tmp_path / "report.xml", record_property
    )
    assert (passed, failed) == (79, UPSTREAM)


def run(folder: Path, snap: Snap, place: Path, *words: object, code: int = 0) -> str:
    return run_program("deepagents_agent.py", folder, snap, place, place / "agent.db", *words, code=code)


def test_a_thread_goes_back_and_forks_with_its_sandbox(folder: Path, plugged: Snap, tmp_path: Path) -> None:
    box, _ = plugged.create()
    said = run(folder, plugged, tmp_path, box, "travel")
    assert said.splitlines() == ["1 2 3 4", "after 2: 1 2", "again: 1 2 3 4", "fork: 1 2 3 4", "first: 1 2 3 4"]
    tools: list[Any] = [step["tool"]["name"] for step in plugged.json("log", "--all", box)]
    assert tools.count("exec") == 4 + 2
    assert tools.count("rewind") >= 1


@pytest.mark.parametrize("point", ["before", "after"])
def test_a_killed_agent_goes_on(folder: Path, plugged: Snap, tmp_path: Path, point: str) -> None:
    box, _ = plugged.create()
    run(folder, plugged, tmp_path, box, point, 3, code=-signal.SIGKILL)
    assert run(folder, plugged, tmp_path, box, "never", 0) == "1 2 3 4\n"


def test_what_cannot_be_is_deepagents_own_word(folder: Path, plugged: Snap, tmp_path: Path) -> None:
    box, _ = plugged.create()
    said = run(folder, plugged, tmp_path, box, "errors")
    assert said.splitlines() == [
        "file_not_found is_directory invalid_path None",
        "None invalid_path b'1'",
        "3 124 127",
        "gone",
    ]
