r"""The files of a folder that no snapshot holds: those that git ignores, and folders that are made again by a command.

Rules have the form of `.gitignore`, and the last one that matches decides. They come from `ALWAYS`, from the
`.gitignore` of each directory, the deeper one last, and from `.snapshotdignore` at the top. `.git` is never looked at.

Rules are as hostile as the folder. So they become expressions of RE2, which takes a time that is linear in the path, and
there is a limit to each line, file and folder. They mean what they mean to git, byte for byte: wildmatch.c, and
`last_matching_pattern_from_list` in dir.c (test_ignore.py compares with `git check-ignore`). A rule is matched with an
entry itself and not with what is above it, since nothing below an ignored directory is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import re2

ALWAYS = (
    ".claude/worktrees/",
    "node_modules/",
    ".venv/",
    "venv/",
    "__pycache__/",
    ".tox/",
    ".nox/",
    ".mypy_cache/",
    ".pytest_cache/",
    ".ruff_cache/",
    ".gradle/",
    ".next/",
    ".cache/",
)
"""A `.snapshotdignore` with `!node_modules/` takes one back."""
RULES = (".gitignore", ".snapshotdignore")
NEVER = ".git"
MOST_FILE_BYTES = 64 << 10
MOST_RULES = 2000
MOST_LINE_BYTES = 1000
MOST_TURNS = 100
"""Changes between rules that ignore and rules that take back, in one file: each costs a match for each path."""
MOST_FILES, MOST_FOLDER_BYTES = 1000, 1 << 20
"""Files with rules in one folder, and their bytes together."""
_DIRECTORY = b"\0"
"""Stands behind the path of a directory. No name holds it."""
_SPECIAL = re.compile(rb"[][^\\.$|?*+(){}]")
_CLASSES = {
    b"alnum": rb"[A-Za-z0-9]",
    b"alpha": rb"[A-Za-z]",
    b"blank": rb"[ \t]",
    b"cntrl": rb"[\x00-\x1f\x7f]",
    b"digit": rb"[0-9]",
    b"graph": rb"[\x21-\x7e]",
    b"lower": rb"[a-z]",
    b"print": rb"[\x20-\x7e]",
    b"punct": rb"[!-/:-@[-`{-~]",
    b"space": rb"[ \t\n\r\x0b\x0c]",
    b"upper": rb"[A-Z]",
    b"xdigit": rb"[A-Fa-f0-9]",
}
_CLASS_BYTES = {name: {n for n in range(256) if re.match(text, bytes([n]))} for name, text in _CLASSES.items()}


class _Expression(Protocol):
    def fullmatch(self, text: bytes) -> object | None: ...


class _NeverMatches(Exception):  # noqa: N818 - what git makes of a malformed pattern
    pass


@dataclass(frozen=True, slots=True)
class RuleFile:
    """The rules of one file. `over`: why some of its rules do not count; "" if all do."""

    blocks: tuple[tuple[bool, _Expression], ...]
    over: str = ""

    def verdict(self, name: bytes) -> bool | None:
        """True: ignored; False: taken back; None: no rule says. `name`: from the file's directory, with `_DIRECTORY`
        behind that of a directory."""
        return next((ignored for ignored, rules in self.blocks if rules.fullmatch(name)), None)


def read_rules(data: bytes) -> RuleFile:
    """The rules of a file's content, or of its beginning: one byte more than `MOST_FILE_BYTES` says that there is more."""
    over = ""
    if len(data) > MOST_FILE_BYTES:
        data = data[: data.rfind(b"\n", 0, MOST_FILE_BYTES) + 1]
        over = f"it has more than {MOST_FILE_BYTES} bytes, and only the rules before count"
    rules: list[tuple[bool, bytes]] = []
    turns = 0
    for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        if len(line) > MOST_LINE_BYTES:
            over = over or f"a line has more than {MOST_LINE_BYTES} bytes, and does not count"
            continue
        rule = _parse_rule(line)
        if rule is None:
            continue
        turns += bool(rules) and rules[-1][0] != rule[0]
        if len(rules) == MOST_RULES or turns > MOST_TURNS:
            what = (
                f"{MOST_RULES} rules"
                if len(rules) == MOST_RULES
                else f"{MOST_TURNS} turns between rules with and without !"
            )
            over = f"it has more than {what}, and only those before count"
            break
        rules.append(rule)
    blocks = [(ignored, _compile(one for _, one in some)) for ignored, some in groupby(rules, lambda rule: rule[0])]
    return RuleFile(tuple(reversed(blocks)), over)


def _compile(expressions: Iterable[bytes]) -> _Expression:
    text = b"|".join(expressions)
    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1
    options.log_errors, options.never_capture, options.dot_nl = False, True, True
    options.max_mem = (1 << 20) + 200 * len(text)
    made: _Expression = re2.compile(text, options)
    re2.purge()  # its cache would keep the rules of folders that are gone
    return made


def _parse_rule(line: bytes) -> tuple[bool, bytes] | None:
    """A line's expression, after True if it ignores. None: it is no rule, or matches nothing."""
    if line.startswith(b"#"):
        return None
    line = _trim(line.removesuffix(b"\r"))
    ignores = not line.startswith(b"!")
    pattern = line if ignores else line[1:]
    directories_alone = pattern.endswith(b"/")
    pattern = pattern.removesuffix(b"/")
    anchored = b"/" in pattern
    try:
        body = b"".join(_translate(pattern.removeprefix(b"/"), anchored))
    except _NeverMatches:
        return None
    if not body:
        return None
    return ignores, (b"" if anchored else b"(?:.*/)?") + body + (b"\\x00" if directories_alone else b"\\x00?")


def _trim(line: bytes) -> bytes:
    """Remove the spaces at the end of a line, up to one behind a backslash."""
    kept = at = 0
    while at < len(line):
        if line[at : at + 1] == b"\\":
            at += 1
        if line[at : at + 1] != b" " or line[at - 1 : at] == b"\\":
            kept = at + 1
        at += 1
    return line[:kept]


def _translate(pattern: bytes, anchored: bool) -> Iterator[bytes]:
    """The parts of the expression of a pattern. `anchored`: it is a path; else it is a name, without a slash."""
    at = 0
    while at < len(pattern):
        char = pattern[at : at + 1]
        at += 1
        if char == b"\\":
            if at == len(pattern):
                raise _NeverMatches
            yield _quote(pattern[at : at + 1])
            at += 1
        elif char == b"?":
            yield rb"[^/\x00]"
        elif char == b"[":
            members, at = _translate_set(pattern, at)
            yield members
        elif char == b"*":
            end = at
            while pattern[end : end + 1] == b"*":
                end += 1
            whole = end > at and (at == 1 or pattern[at - 2 : at - 1] == b"/")
            at = end
            if not anchored or not whole or pattern[end : end + 1] not in (b"", b"/"):
                yield rb"[^/\x00]*"
            elif end == len(pattern):
                yield rb"[^\x00]*"
            else:
                at += 1
                yield rb"(?:[^\x00]*/)?"
        else:
            yield _quote(char)


def _quote(char: bytes) -> bytes:
    return _SPECIAL.sub(rb"\\\g<0>", char) if char < b"\x7f" and char >= b" " else b"\\x%02x" % char[0]


def _translate_set(pattern: bytes, at: int) -> tuple[bytes, int]:
    """The expression of the set whose first byte is at `at`, and the place behind it."""
    negated = pattern[at : at + 1] in (b"!", b"^")
    at += negated
    members: set[int] = set()
    before: int | None = None
    first = True
    while first or pattern[at : at + 1] != b"]":
        first = False
        char, after = _byte_at(pattern, at), pattern[at + 1 : at + 2]
        if char == 0x5C:
            at += 1
            before = _byte_at(pattern, at)
            members.add(before)
        elif char == 0x2D and before is not None and after not in (b"", b"]"):
            at += 1
            last = _byte_at(pattern, at)
            if last == 0x5C:
                at += 1
                last = _byte_at(pattern, at)
            members.update(range(before, last + 1))
            before = None
        elif char == 0x5B and after == b":":
            end = pattern.find(b"]", at + 2)
            if end < 0:
                raise _NeverMatches
            if end == at + 2 or pattern[end - 1 : end] != b":":
                members.add(char)
                before = char
            else:
                name = pattern[at + 2 : end - 1]
                if name not in _CLASS_BYTES:
                    raise _NeverMatches
                members |= _CLASS_BYTES[name]
                at, before = end, None
        else:
            members.add(char)
            before = char
        at += 1
    if negated:
        members = set(range(256)) - members
    members -= {0, 0x2F}
    if not members:
        raise _NeverMatches
    return b"[" + b"".join(b"\\x%02x" % one for one in sorted(members)) + b"]", at + 1


def _byte_at(pattern: bytes, at: int) -> int:
    if at >= len(pattern):
        raise _NeverMatches
    return pattern[at]


_ALWAYS = read_rules("\n".join(ALWAYS).encode())
NONE = read_rules(b"")


class Rules:
    """The rules that count in one directory: its own and those of the directories above."""

    def __init__(self, levels: tuple[tuple[str, RuleFile], ...], last: RuleFile) -> None:
        self._levels, self._last = levels, last

    @staticmethod
    def top(last: RuleFile) -> Rules:
        """The rules of the top directory, without its `.gitignore`. `last`: those of `.snapshotdignore`."""
        return Rules((("", _ALWAYS),), last)

    def below(self, prefix: str, own: RuleFile) -> Rules:
        """The rules of a directory with a `.gitignore`. `prefix`: its path, with a slash at the end."""
        return Rules((*self._levels, (prefix, own)), self._last)

    def ignores(self, path: str, is_dir: bool) -> bool:
        """True for a path from the top that no snapshot holds. The directories above it are not ignored."""
        name = path.encode(errors="surrogateescape") + (_DIRECTORY if is_dir else b"")
        verdict = self._last.verdict(name)
        for prefix, own in reversed(self._levels):
            if verdict is not None:
                break
            verdict = own.verdict(name[len(prefix.encode(errors="surrogateescape")) :])
        return bool(verdict)
