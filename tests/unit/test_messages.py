"""Errors speak to whoever reads them: the Python client has the same ones as the command line, and no options."""

from __future__ import annotations

import ast
import re

import pytest

from snapshotd import errors
from snapshotd.terms import number_of
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


NOUNS = re.compile(
    r" (?:[a-z]+ )?(files|directories|snapshots|trajectories|changes|conflicts|paths|objects|packs|sandboxes|messages|commands|calls"
    r"|forks|entries|layers|images|damages|tags|branches|variants|events|rules|tasks|checkpoints|things|sessions|forks)\b"
)


def test_one_thing_is_not_said_in_the_plural() -> None:
    """`number_of` says `1 file`. A limit, written in capitals, is never one; nor is a number that is compared with another
    (`3 of 4 packs`, `1 to 256 forks`)."""
    found = []
    for file, tree in trees().items():
        for node in walk(tree):
            parts = node.values if isinstance(node, ast.JoinedStr) else []
            for before, part, behind in zip([None, *parts], parts, parts[1:], strict=False):
                said = ast.unparse(part.value) if isinstance(part, ast.FormattedValue) else ""
                number = (
                    said
                    and not said.split(".")[-1].isupper()
                    and not said.startswith(("number_of(", "size("))
                    and "'" not in said
                )
                compared = isinstance(before, ast.Constant) and re.search(r"\b(of|to|than) $", str(before.value))
                if number and not compared and isinstance(behind, ast.Constant) and NOUNS.match(str(behind.value)):
                    found.append(f"{file}:{node.lineno}: {ast.unparse(node)}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("count", "noun", "said"),
    [
        (0, "file", "0 files"),
        (1, "file", "1 file"),
        (2, "file", "2 files"),
        (1, "directory", "1 directory"),
        (2, "older directory", "2 older directories"),
        (2, "day", "2 days"),
        (2, "branch", "2 branches"),
        (2, "trajectory", "2 trajectories"),
    ],
)
def test_a_number_of_things(count: int, noun: str, said: str) -> None:
    assert number_of(count, noun) == said
