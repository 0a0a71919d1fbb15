"""The library's source: what it may use, and what it shares with the daemon."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import snapshotd
from snapshotd.agent.wire import connection as agent_connection
from snapshotd.engine.protocol import agent_handler, agent_wire

SOURCES = sorted((Path(snapshotd.__file__).parent / "agent").glob("*.py"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_the_library_is_python_3_8_with_the_standard_library_only(source: Path) -> None:
    tree = ast.parse(source.read_text(), feature_version=(3, 8))
    allowed = {
        "__future__",
        "argparse",
        "ast",
        "base64",
        "builtins",
        "collections",
        "contextlib",
        "contextvars",
        "fcntl",
        "functools",
        "gc",
        "getpass",
        "hashlib",
        "importlib",
        "importlib.util",
        "inspect",
        "itertools",
        "json",
        "os",
        "re",
        "selectors",
        "signal",
        "socket",
        "stat",
        "struct",
        "subprocess",
        "sys",
        "threading",
        "time",
        "traceback",
        "types",
        "typing",
        "uuid",
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            assert name in allowed or name.startswith("snapshotd.agent"), name
        # 3.9: str.removeprefix and dict | dict; 3.10: zip(strict=), match; all rejected here, as they are easy to slip
        # in
        if isinstance(node, ast.Attribute):
            assert node.attr not in {"removeprefix", "removesuffix", "to_thread", "pairwise", "cache"}, node.attr


def test_both_ends_agree_on_the_protocol() -> None:
    assert agent_connection.VERSION == agent_handler.VERSION
    assert snapshotd.__version__ == agent_connection.LIBRARY
    assert agent_connection.LINE_LIMIT_BYTES == agent_wire.LINE_LIMIT_BYTES
