"""Docstrings and comments below snapshotd/ open with their subject, not with a riddle about it."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

OPENINGS = re.compile(
    r"(of|what|whatever|who|whoever|whose|whom|which|those|whether|nobody|no one|nothing that)\b", re.IGNORECASE
)
"""Words that put the subject of a sentence after it: "What is kept" instead of "The kept layers"."""
ANYWHERE = re.compile(r"\b(?:of which|of whom|of whose|nobody's)\b", re.IGNORECASE)
SENTENCE = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`(])")


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every bare string: of modules, classes, functions, and of the attribute above it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def comments(source: str) -> Iterator[tuple[int, str]]:
    """First line and text of every comment; comment lines below each other are one."""
    start, column = 0, 0
    words: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, own_line = token.start[0], not token.line[: token.start[1]].strip()
        if not (words and own_line and line == last + 1 and token.start[1] == column):
            if words:
                yield start, "\n".join(words)
            start, column, words = line, token.start[1], []
        words.append(token.string.lstrip("#").strip())
        last = line
    if words:
        yield start, "\n".join(words)


def riddles(source: str) -> list[tuple[int, str]]:
    """Line (of the text's beginning) and sentence of each one that a reader has to read twice."""
    texts = [*docstrings(source), *comments(source)]
    sentences = (
        (line, sentence)
        for line, text in sorted(texts)
        for paragraph in re.split(r"\n\s*\n", text)
        for sentence in SENTENCE.split(" ".join(paragraph.split()))
    )
    return [(line, sentence) for line, sentence in sentences if OPENINGS.match(sentence) or ANYWHERE.search(sentence)]


def test_sentences_open_with_their_subject() -> None:
    files = sorted((ROOT / "snapshotd").rglob("*.py"))
    assert len(files) > 200
    found = [
        f"{path.relative_to(ROOT)}:{line}: {sentence}" for path in files for line, sentence in riddles(path.read_text())
    ]
    assert not found, f"{len(found)} sentences to turn round:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('"""What is kept."""', [1]),
        ('"""The kept layers. Those of forks too."""', [1]),
        ('"""The kept layers.\n\nWhose they are."""', [1]),
        ('"""The layers\nof which none is kept."""', [1]),
        ('LIMIT = 3\n"""Of how many layers."""', [2]),
        ('class Layer:\n    size: int\n    """Whether it is kept."""', [3]),
        ("async def keep():\n    '''Whoever asks.'''", [2]),
        ("x = 1  # nobody reads it", [1]),
        ("# The layers.\n# Of forks too.\nx = 1", [1]),
        ('text = "What is kept."', []),
        ('"""The kept layers, what they hold and whose they are."""\n# It says who asks.', []),
        ('"""Offsets and whole files, and the layers\nof forks."""', []),
    ],
)
def test_the_lint_sees_every_kind_of_text(source: str, lines: list[int]) -> None:
    assert [line for line, _ in riddles(source)] == lines
