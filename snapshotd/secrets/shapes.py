"""The shapes of tokens: a literal that they begin with, or that stands before them, and runs of characters of bounded
length.

Every shape is a sequence of parts. No part gives back characters that it took (possessive), so trying one takes linear
time for any text. A second expression, made of the same parts, says if a text that ends here could still become a
match.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from snapshotd.secrets.base import MARKER_BYTES
from snapshotd.secrets.needles import Anchors, Beginnings, may_follow


class Run(NamedTuple):
    """`least` to `most` characters of a class, as many as there are."""

    chars: str
    least: int
    most: int


class Not(NamedTuple):
    """The next character, if there is one, is none of a class. Only as the last part."""

    chars: str


Part = Run | Not


def text(literal: str) -> tuple[Part, ...]:
    """Exactly this text."""
    return tuple(Run(re.escape(char), 1, 1) for char in literal)


@dataclass(frozen=True, slots=True)
class Shape:
    """`anchors`, then `before`, then `value`, then `after`. With an empty `before` the anchor is part of the secret,
    unless `context`.

    `not_after`: bytes that the anchor never directly follows, unless they end an escape (`may_follow`). `likely`: a
    last look at the value, to leave ordinary words alone.
    """

    name: str
    anchors: tuple[str, ...]
    value: tuple[Part, ...]
    before: tuple[Part, ...] = ()
    after: tuple[Part, ...] = ()
    context: bool = False
    not_after: str = ""
    likely: Callable[[bytes], bool] | None = None


_DIGITS = "0123456789"
_UPPER = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_ALNUM = _DIGITS + _UPPER + _UPPER.lower()
_WORD = _ALNUM + "_"
_TOKEN = r"[A-Za-z0-9_-]"
_BEARER = "[A-Za-z0-9._~+/=-]"
_PEM_KINDS = (
    "PRIVATE KEY",
    "RSA PRIVATE KEY",
    "EC PRIVATE KEY",
    "DSA PRIVATE KEY",
    "OPENSSH PRIVATE KEY",
    "ENCRYPTED PRIVATE KEY",
)
_PEM = (*(f"-----BEGIN {kind}-----" for kind in _PEM_KINDS), "-----BEGIN PGP PRIVATE KEY BLOCK-----")


def _has_digit(value: bytes) -> bool:
    return re.search(rb"[0-9]", value) is not None


def _is_mixed(value: bytes) -> bool:
    return all(re.search(chars, value) for chars in (rb"[0-9]", rb"[A-Z]", rb"[a-z]"))


def _is_basic(value: bytes) -> bool:
    """True if this is base64 of `user:password`."""
    try:
        return b":" in base64.b64decode(value.rstrip(b"=") + b"=" * (-len(value.rstrip(b"=")) % 4))
    except binascii.Error:
        return False


def _is_literal(value: bytes) -> bool:
    """Not a variable or a placeholder of a script."""
    return len(value) >= 3 and value[:1] not in b"$<{%*"


SHAPES: tuple[Shape, ...] = (
    Shape(
        "aws-access-key-id",
        ("AKIA", "ASIA", "ABIA", "ACCA"),
        (Run("[A-Z0-9]", 16, 16),),
        after=(Not("[A-Za-z0-9]"),),
        not_after=_ALNUM,
    ),
    Shape(
        "aws-secret-key",
        ("ret_access_key", "RET_ACCESS_KEY", "retAccessKey"),
        (Run("[A-Za-z0-9/+]", 40, 40),),
        before=(Run(r"""[ \t"'\\:=>]""", 1, 16),),
        after=(Not("[A-Za-z0-9/+=]"),),
        context=True,
    ),
    Shape("github-token", ("ghp_", "gho_", "ghs_", "ghu_", "ghr_"), (Run("[A-Za-z0-9]", 30, 255),)),
    Shape("github-token", ("github_pat_",), (Run("[A-Za-z0-9_]", 22, 255),)),
    Shape("gitlab-token", ("glpat-", "gldt-", "glrt-"), (Run(_TOKEN, 20, 255),)),
    Shape("anthropic-key", ("sk-ant-",), (Run(_TOKEN, 20, 255),), not_after=_WORD + "-", likely=_has_digit),
    Shape("openai-key", ("sk-",), (Run(_TOKEN, 20, 255),), not_after=_WORD + "-", likely=_has_digit),
    Shape(
        "slack-token", ("xoxa-", "xoxb-", "xoxe-", "xoxo-", "xoxp-", "xoxr-", "xoxs-"), (Run("[A-Za-z0-9-]", 10, 255),)
    ),
    Shape("google-key", ("AIza",), (Run(_TOKEN, 35, 35),), after=(Not(_TOKEN),), not_after=_WORD),
    Shape("stripe-key", ("sk_live_", "rk_live_", "sk_test_", "rk_test_"), (Run("[A-Za-z0-9]", 16, 255),)),
    Shape("npm-token", ("npm_",), (Run("[A-Za-z0-9]", 36, 36),), after=(Not(r"\w"),), not_after=_WORD),
    Shape("pypi-token", ("pypi-",), (Run(_TOKEN, 16, 1024),), not_after=_WORD, likely=_is_mixed),
    Shape("huggingface-token", ("hf_",), (Run("[A-Za-z0-9]", 30, 255),), not_after=_WORD),
    Shape("sendgrid-key", ("SG.",), (Run(_TOKEN, 16, 64), *text("."), Run(_TOKEN, 32, 64)), not_after=_WORD),
    Shape(
        "jwt",
        ("eyJ",),
        (Run(_TOKEN, 8, 8192), *text("."), Run(_TOKEN, 4, 16384), *text("."), Run(_TOKEN, 0, 4096)),
        not_after=_WORD + "-",
    ),
    Shape(
        "private-key",
        _PEM,
        # Before END there may be more dashes: those that `git diff` and `grep -A` put before a line.
        (Run("(?:[^-]|-(?!----))", 1, 65536), Run("-", 5, 16), *text("END "), Run("[A-Z0-9 ]", 4, 64), *text("-----")),
    ),
    Shape("private-key", _PEM, (Run(r"[A-Za-z0-9+/=\r\n\\]", 16, 65536),)),  # cut off, or too long
    Shape(
        "authorization",
        ("uthorization", "UTHORIZATION"),
        (Run(_BEARER, 6, 4096),),
        before=(
            Run(r"""[\\"']""", 0, 4),
            Run("[ \t]", 0, 4),
            Run("[:=]", 1, 1),
            Run(r"""[ \t\\"']""", 0, 8),
            Run("[A-Za-z]", 1, 20),
            Run("[ \t]", 1, 4),
        ),
        context=True,
    ),
    Shape(
        "authorization",
        ("Bearer ", "bearer "),
        (Run(_BEARER, 16, 4096),),
        context=True,
        not_after=_WORD,
        likely=_has_digit,
    ),
    Shape(
        "authorization",
        ("Basic ", "basic "),
        (Run("[A-Za-z0-9+/=]", 8, 4096),),
        context=True,
        not_after=_WORD,
        likely=_is_basic,
    ),
    Shape(
        "url-password",
        ("://",),
        (Run(r"[^\s/@\"'<>]", 1, 256),),
        before=(Run(r"[^\s/@:\"'<>]", 0, 128), *text(":")),
        after=text("@"),
        context=True,
        likely=_is_literal,
    ),
)
"""Tried in this order if the same anchor begins several of them."""

_MARKER = Shape(
    "marker", ("[sec",), (*text("ret:"), Run("[A-Za-z0-9_.-]", 1, 64), *text(":"), Run("[0-9a-f]", 16, 16), *text("]"))
)


class Span(NamedTuple):
    """data[begin:end] is a secret of that name; None: it is a marker, and stays."""

    begin: int
    end: int
    name: str | None


@dataclass(frozen=True, slots=True)
class _Rule:
    shape: Shape
    whole: re.Pattern[bytes]
    unfinished: re.Pattern[bytes]
    most: int
    not_after: bytes


def _rule(shape: Shape) -> _Rule:
    parts = (*shape.before, *shape.value, *shape.after)
    whole = f"{_whole_pattern(shape.before)}({_whole_pattern(shape.value)}){_whole_pattern(shape.after)}"
    most = sum(part.most if isinstance(part, Run) else 1 for part in parts)
    return _Rule(
        shape,
        re.compile(whole.encode()),
        re.compile(_unfinished_pattern(parts).encode()),
        most,
        shape.not_after.encode(),
    )


def _whole_pattern(parts: tuple[Part, ...]) -> str:
    return "".join(
        f"{part.chars}{{{part.least},{part.most}}}+" if isinstance(part, Run) else f"(?!{part.chars})" for part in parts
    )


def _unfinished_pattern(parts: tuple[Part, ...]) -> str:
    """Return the pattern of a text at the end of the data that more data could make a match of, or a longer match than it
    is."""
    pattern = r"(?!)"
    for part in reversed(parts):
        if isinstance(part, Not):
            pattern = r"\Z"
        else:
            pattern = rf"(?:{part.chars}{{0,{part.most}}}+\Z|{part.chars}{{{part.least},{part.most}}}+{pattern})"
    return pattern


_RULES = [_rule(shape) for shape in (_MARKER, *SHAPES)]
_ANCHORS = tuple(dict.fromkeys(anchor.encode() for rule in _RULES for anchor in rule.shape.anchors))
_BY_ANCHOR = [[rule for rule in _RULES if anchor.decode() in rule.shape.anchors] for anchor in _ANCHORS]
"""For each anchor the rules to try."""
_NOT_AFTER = {
    anchor: bytes(byte for byte in rules[0].not_after if all(byte in rule.not_after for rule in rules))
    for anchor, rules in zip(_ANCHORS, _BY_ANCHOR, strict=True)
}
NAMES = frozenset(shape.name for shape in SHAPES)

_anchors = Anchors(_ANCHORS)
_beginnings = Beginnings(_ANCHORS, _NOT_AFTER)


class Shapes:
    """Finds tokens of all shapes, and markers."""

    def __init__(self, marker_names: Collection[str]) -> None:
        """`marker_names`: of the markers that are left as they are; text in another one is searched like any text."""
        self._marker_names = frozenset(name.encode() for name in marker_names)

    def find(self, data: bytes, start: int, final: bool) -> tuple[list[Span], int]:
        """As `Needles.find`. Looks at up to `LOOK_BACK` bytes before `start`."""
        open_from = len(data) if final else _beginnings.first(data, start)
        spans: list[Span] = []
        for begin, end, index in _anchors.find(data, start):
            if begin < start:
                continue
            if begin >= open_from:
                break
            found = self._try(index, data, begin, end, final)
            if found is _OPEN:
                return spans, begin
            if found:
                spans += found
                start = found[-1].end
                if open_from < start:
                    open_from = len(data) if final else _beginnings.first(data, start)
        return spans, max(start, open_from)

    def _try(self, index: int, data: bytes, begin: int, end: int, final: bool) -> list[Span] | None:
        """The spans that come with the anchor at data[begin:end]; `_OPEN` if that cannot be said yet."""
        for rule in _BY_ANCHOR[index]:
            if not may_follow(data, begin, rule.not_after):
                continue
            if not final and len(data) - end <= rule.most and rule.unfinished.match(data, end):
                return _OPEN
            match = rule.whole.match(data, end)
            if match is not None and (spans := self._spans(rule.shape, data, begin, match)):
                return spans
        return None

    def _spans(self, shape: Shape, data: bytes, begin: int, match: re.Match[bytes]) -> list[Span]:
        if shape is _MARKER:
            return [Span(begin, match.end(), None)] if self._has_marker(data, begin, match.end(), begin) else []
        if shape.likely is not None and not shape.likely(match[1]):
            return []
        if not shape.context:
            return [Span(begin, match.end(1), shape.name)]
        before, (value, end) = match.start(), match.span(1)
        if self._has_marker(data, begin, match.end(), value):
            return []
        # The text before the secret part may hold secrets of its own: the user of a URL can be a token.
        inner = [Span(a + before, b + before, name) for a, b, name in self.find(data[before:value], 0, True)[0]]
        return [*inner, Span(value, end, _own_name(match[1]) or shape.name)]

    def _has_marker(self, data: bytes, begin: int, end: int, beyond: int) -> bool:
        """True if a marker that is left as it is lies within data[begin:end] and ends after `beyond`."""
        return any(
            marker.end() > beyond and marker[1] in self._marker_names
            for marker in MARKER_BYTES.finditer(data, begin, end)
        )


_OPEN: list[Span] = []
"""Stands for: more data is needed."""


def _own_name(value: bytes) -> str | None:
    """The name of the shape that a value has by itself, without the text before it."""
    for begin, end, index in _anchors.find(value, 0):
        for rule in _BY_ANCHOR[index] if begin == 0 else ():
            match = None if rule.shape.context else rule.whole.match(value, end)
            if match is not None and match.end() == len(value):
                return rule.shape.name
    return None
