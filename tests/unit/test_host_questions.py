"""The host is asked for its abilities in one place: nothing else compares versions of the kernel, tests for root, or knows
the prefix of overlayfs's attributes."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from tests.own_sources import trees, walk

PLACE = "kernel/abilities.py"
_USER = {"geteuid", "getuid", "getresuid"}
_RELEASE = {"release", "version"}
_RELEASE_FILES = ("/proc/version", "/proc/sys/kernel/osrelease")


def _is_call(node: ast.AST, names: set[str]) -> bool:
    function = node.func if isinstance(node, ast.Call) else None
    name = getattr(function, "attr", getattr(function, "id", None))
    return name in names


def root_tests(tree: ast.Module) -> Iterator[ast.AST]:
    """`geteuid() == 0` and its like. Whether a file is one's own is another question."""
    for node in walk(tree):
        if isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            if any(_is_call(side, _USER) for side in sides) and any(
                isinstance(side, ast.Constant) and side.value == 0 for side in sides
            ):
                yield node
        elif isinstance(node, ast.If | ast.IfExp | ast.While) and _is_call(node.test, _USER):
            yield node


def versions(tree: ast.Module) -> Iterator[ast.AST]:
    for node in walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            module = getattr(node.func.value, "id", None)
            if module == "platform" and node.func.attr in _RELEASE:
                yield node
        elif isinstance(node, ast.Attribute):
            if node.attr in _RELEASE and _is_call(node.value, {"uname"}):
                yield node
        elif isinstance(node, ast.Constant) and node.value in _RELEASE_FILES:
            yield node


def overlay_attributes(tree: ast.Module) -> Iterator[ast.AST]:
    docs = {id(node.value) for node in walk(tree) if isinstance(node, ast.Expr)}
    for node in walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and id(node) not in docs:
            text = node.value.encode() if isinstance(node.value, str) else node.value
            if b"trusted.overlay" in text:
                yield node


LEFT: dict[Callable[[ast.Module], Iterator[ast.AST]], dict[str, int]] = {
    versions: {},
    root_tests: {
        "client/apply/host_change.py": 2,  # keeps owners of files in a user's own folder, where it may
        "client/autostart.py": 1,
        "daemon/host.py": 1,
        "engine/host/doctor.py": 1,
        "engine/host/system_packages.py": 1,  # a package manager wants root; it runs before anything is installed
        "runtime/docker.py": 1,
        "runtime/runc.py": 1,
    },
    overlay_attributes: {
        "fuse/ids.py": 1,
        "layers/capture.py": 4,
        "layers/links.py": 1,
        "layers/store.py": 2,
        "trees/lookup.py": 5,
    },
}
"""What still stands elsewhere: a list that gets shorter."""


@pytest.mark.parametrize("question", LEFT, ids=lambda one: one.__name__)
def test_only_the_abilities_ask_the_host(question: Callable[[ast.Module], Iterator[ast.AST]]) -> None:
    found = Counter({file: len(list(question(tree))) for file, tree in trees().items() if file != PLACE})
    assert {file: count for file, count in found.items() if count} == LEFT[question]


@pytest.mark.parametrize(
    ("question", "source"),
    [
        (root_tests, "import os\nif os.geteuid() == 0: pass"),
        (root_tests, "import os\nx = 1 if os.getuid() else 2"),
        (root_tests, "from os import geteuid\nassert 0 != geteuid()"),
        (versions, "import platform\nplatform.release()"),
        (versions, "import os\nos.uname().release"),
        (versions, "open('/proc/version')"),
        (overlay_attributes, "x = b'trusted.overlay.opaque'"),
    ],
)
def test_such_a_question_is_seen(question: Callable[[ast.Module], Iterator[ast.AST]], source: str) -> None:
    assert len(list(question(ast.parse(source)))) == 1
    assert (
        list(question(ast.parse('"""trusted.overlay"""\nimport os\nmine = os.stat("x").st_uid == os.geteuid()'))) == []
    )
