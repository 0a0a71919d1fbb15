"""Errors speak to whoever reads them: the Python client has the same ones as the command line, and no options."""

from __future__ import annotations

import ast
import re

from snapshotd import errors
from tests.own_sources import trees, walk

OPTION = re.compile(r"(?<![\w-])--(?=[a-z`\s]|$)")


def test_no_error_below_the_command_line_speaks_of_its_options() -> None:
    """A whole command line, in backticks, is advice for both; a bare option is none for a program."""
    looked_at, found = 0, []
    for file, tree in trees().items():
        if file.startswith(("cli/", "agent/")):
            continue
        for node in walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in errors.BY_CODE:
                looked_at += 1
                text = "".join(
                    part.value for part in walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)
                )
                if OPTION.search(re.sub(r"`snapshotd [^`]*`", "", text)):
                    found.append(f"{file}:{node.lineno}: {text}")
    assert looked_at > 300
    assert not found, "\n".join(found)
