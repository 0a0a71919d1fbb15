"""The digest of a tool's code: the same for the same tool, whatever stands around it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from snapshotd.agent.code import MAX_VALUES, digest

ROOT = Path(__file__).parents[4]
PROGRAM = """
import functools, os

LIMIT = 3
TABLE = {"a": [1, {2, 3}], "b": None}
client = object()

def helper(value):
    return value + LIMIT

class Worker:
    size = 1

    def run(self, value):
        return self.other(value)

    def other(self, value):
        return value

def decorated(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper

@decorated
def tool(value, more=2):
    return [helper(one) for one in range(value) if one in {"x", "y", "zz"} and TABLE and client]

def recursive(value):
    return recursive(value - 1)
"""


def made(program: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(program, "program.py", "exec"), names)
    return names


def tool(names: dict[str, Any]) -> Any:
    return names["tool"]


def method(names: dict[str, Any]) -> Any:
    return names["Worker"].run


@pytest.mark.parametrize("which", [tool, method])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("import functools", "# a comment\n\nimport functools"),
        ("def recursive", "print(end='')\ndef another"),
        ("", ""),
    ],
)
def test_the_same(which: Callable[[dict[str, Any]], Any], old: str, new: str) -> None:
    assert digest(which(made(PROGRAM))) == digest(which(made(PROGRAM.replace(old, new, 1))))


@pytest.mark.parametrize(
    ("old", "new", "which"),
    [
        ("more=2", "more=3", tool),
        ("range(value)", "range(value + 1)", tool),
        ('"zz"', '"z"', tool),
        ("value + LIMIT", "value - LIMIT", tool),
        ("LIMIT = 3", "LIMIT = 4", tool),
        ("{2, 3}", "{2, 4}", tool),
        ("        return value\n", "        return value + 1\n", method),
        ("size = 1", "size = 2", method),
    ],
)
def test_another(old: str, new: str, which: Callable[[dict[str, Any]], Any]) -> None:
    assert old in PROGRAM
    assert digest(which(made(PROGRAM))) != digest(which(made(PROGRAM.replace(old, new, 1))))


def test_it_does_not_depend_on_the_process() -> None:
    """The order of a set does."""
    script = "from tests.unit.agent.library.test_code import *; print(digest(tool(made(PROGRAM))))"
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_what_cannot_be_told() -> None:
    names = made(PROGRAM)
    assert digest(names["recursive"]) is not None
    assert digest(len) is not None
    names["TABLE"].update(dict.fromkeys(range(MAX_VALUES)))
    assert digest(tool(names)) is None
