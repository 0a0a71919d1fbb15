"""Docstrings and comments below snapshotd/ open with their subject, not with a riddle about it."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest

from tests.own_sources import texts, trees, walk

OPENINGS = re.compile(
    r"(of|what|whatever|who|whoever|whose|whom|which|those|whether|nobody|no one|nothing that)\b", re.IGNORECASE
)
"""Words that put the subject of a sentence after it: "What is kept" instead of "The kept layers"."""
ANYWHERE = re.compile(r"\b(?:of which|of whom|of whose|nobody's)\b", re.IGNORECASE)
SENTENCE = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`(])")
A_WORD = re.compile(r"#.*\b(?:of|what|whatever|who\w*|which|those|whether|nobody|no|nothing)\b", re.IGNORECASE)
"""A line whose comment has one of these words, or the first of them. Comments without any are not taken apart, because
that takes longer than everything else here."""


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every bare string: of modules, classes, functions, and of the attribute above it."""
    for node in walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def comments(source: str) -> Iterator[tuple[int, str]]:
    """First line and text of every comment; comment lines below each other are one."""
    start, column = 0, 0
    words: list[str] = []
    last = 0
    if not A_WORD.search(source):
        return
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


def riddles(source: str, tree: ast.Module) -> list[tuple[int, str]]:
    """Line (of the text's beginning) and sentence of each one that a reader has to read twice."""
    sentences = (
        (line, sentence)
        for line, text in sorted([*docstrings(tree), *comments(source)])
        for paragraph in re.split(r"\n\s*\n", text)
        for sentence in SENTENCE.split(" ".join(paragraph.split()))
    )
    return [(line, sentence) for line, sentence in sentences if OPENINGS.match(sentence) or ANYWHERE.search(sentence)]


def test_sentences_open_with_their_subject() -> None:
    assert len(texts()) > 200
    found = [
        f"{file}:{line}: {sentence}"
        for file, source in texts().items()
        for line, sentence in riddles(source, trees()[file])
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
    assert [line for line, _ in riddles(source, ast.parse(source))] == lines
