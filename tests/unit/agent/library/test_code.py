"""The digest of a tool's code: the same for the same tool, whatever stands around it."""

from __future__ import annotations

import subprocess
import sys
import types
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


OF_ANOTHER_FILE = """
import functools

def bare(times):
    def around(function):
        def inside(*args):
            return [function(*args) for _ in range(times)]
        return inside
    return around

def wrapping(function):
    @functools.wraps(function)
    def inside(*args):
        return function(*args)
    return inside

class Held:
    def __init__(self, function):
        self.kept = function
    def __call__(self, *args):
        return self.kept(*args)
"""
BODY = "def body(value):\n    return value + 1\n"

CASES = {
    "wrapper with wraps": (
        BODY + "def deco(f):\n    @functools.wraps(f)\n    def w(*a):\n        return f(*a)\n    return w\ntool = deco(body)",
        "return f(*a)", "return f(*a) * 2",
    ),
    "wrapper with wraps is put around": (BODY + "tool = body", "tool = body", "tool = functools.wraps(body)(lambda v: body(v) * 2)"),
    "two wrappers": (
        BODY + "def deco(f):\n    @functools.wraps(f)\n    def w(*a):\n        return f(*a)\n    return w\ntool = deco(deco(body))",
        "deco(deco(body))", "deco(body)",
    ),
    "wrapped by another file's": (BODY + "tool = other.wrapping(body)", "value + 1", "value + 2"),
    "another file's, without wraps": (BODY + "tool = other.bare(3)(body)", "value + 1", "value + 2"),
    "its argument": (BODY + "tool = other.bare(3)(body)", "bare(3)", "bare(4)"),
    "another file's object": (BODY + "tool = other.Held(body)", "value + 1", "value + 2"),
    "partial": (BODY + "tool = functools.partial(body, 1)", "body, 1", "body, 2"),
    "function of a partial": (BODY + "tool = functools.partial(body, 1)", "value + 1", "value + 2"),
    "lru_cache": (BODY + "tool = functools.lru_cache(maxsize=None)(body)", "value + 1", "value + 2"),
    "singledispatch": (
        BODY + "tool = functools.singledispatch(body)\n@tool.register(int)\ndef of_int(value):\n    return 1", "return 1", "return 2",
    ),
    "default of a wrapper": (
        BODY + "def deco(f):\n    @functools.wraps(f)\n    def w(v, n=1):\n        return f(v) * n\n    return w\ntool = deco(body)",
        "n=1", "n=2",
    ),
    "closure of a wrapper": (
        BODY + "def deco(n):\n    def over(f):\n        @functools.wraps(f)\n"
        "        def w(v):\n            return f(v) * n\n        return w\n"
        "    return over\ntool = deco(3)(body)",
        "deco(3)", "deco(4)",
    ),
    "object that is called": (
        BODY + "class Deco:\n    def __init__(self, f, n):\n        self.f, self.n = f, n\n    def __call__(self, v):\n"
        "        return self.f(v) * self.n\ntool = Deco(body, 3)",
        "Deco(body, 3)", "Deco(body, 4)",
    ),
    "function in such an object": (
        BODY + "class Deco:\n    def __init__(self, f):\n        functools.update_wrapper(self, f)\n        self.f = f\n"
        "    def __call__(self, v):\n        return self.f(v)\ntool = Deco(body)",
        "return self.f(v)", "return self.f(v) * 2",
    ),
    "object of a bound method": (
        "class Worker:\n    def __init__(self, n):\n        self.n = n\n    def run(self, v):\n        return v * self.n\n"
        "tool = Worker(3).run",
        "Worker(3)", "Worker(4)",
    ),
    "object with slots": (
        "class Limit:\n    __slots__ = ('n',)\n    def __init__(self, n):\n        self.n = n\nL = Limit(3)\n"
        "def tool(v):\n    return v * L.n",
        "Limit(3)", "Limit(4)",
    ),
    "object of a class": (
        "class Limit:\n    def __init__(self, n):\n        self.n = n\nL = Limit(3)\n"
        "def tool(v):\n    return v * L.n", "Limit(3)", "Limit(4)",
    ),
    "enum": ("import enum\nclass E(str, enum.Enum):\n    A = 'a'\ndef tool(v):\n    return E.A", "'a'", "'b'"),
    "text of a class": ("class T(str):\n    pass\nX = T('a')\ndef tool(v):\n    return X", "T('a')", "T('b')"),
    "cached property": (
        "class W:\n    @functools.cached_property\n    def n(self):\n        return 1\n"
        "def tool(v):\n    return W().n", "return 1", "return 2",
    ),
    "partialmethod": (
        "class W:\n    def n(self, a):\n        return a\n    m = functools.partialmethod(n, 1)\n"
        "def tool(v):\n    return W().m()", "n, 1", "n, 2",
    ),
    "decorated method": (
        "class W:\n    @staticmethod\n    @other.wrapping\n    def n(a):\n        return a\n"
        "def tool(v):\n    return W.n(v)", "return a", "return a, a",
    ),
    "pattern": ("import re\nP = re.compile('a')\ndef tool(v):\n    return P.match(v)", "'a'", "'b'"),
    "path": ("import pathlib\nP = pathlib.Path('a')\ndef tool(v):\n    return P", "'a'", "'b'"),
    "time": ("import datetime\nP = datetime.timedelta(1)\ndef tool(v):\n    return P", "(1)", "(2)"),
    "range": ("P = range(1)\ndef tool(v):\n    return P", "(1)", "(2)"),
    "deque": ("import collections\nP = collections.deque([1])\ndef tool(v):\n    return P", "[1]", "[2]"),
    "namespace": ("import types\nP = types.SimpleNamespace(a=1)\ndef tool(v):\n    return P.a", "a=1", "a=2"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_whatever_the_tool_goes_through_is_seen(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, old, new = CASES[case]
    other = types.ModuleType("other")
    exec(compile(OF_ANOTHER_FILE, "other.py", "exec"), other.__dict__)
    monkeypatch.setitem(sys.modules, "other", other)
    head = "import functools, other\n"
    assert old in program
    first, again, changed = (
        digest(tool(made(head + text))) for text in (program, "# a comment\n\n" + program, program.replace(old, new))
    )
    assert first is not None
    assert changed is not None
    assert first == again
    assert first != changed
