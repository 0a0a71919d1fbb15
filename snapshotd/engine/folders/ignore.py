"""The files of a folder that no snapshot holds: those that git ignores, and folders that are made again by a command.

Rules have the form of `.gitignore`, and the last one that matches decides. They come from `ALWAYS`, from the
`.gitignore` of each directory, the deeper one last, and from `.snapshotdignore` at the top. `.git` is never looked at.
"""

from __future__ import annotations

from collections.abc import Iterable

import pathspec

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
MOST_RULES_BYTES = 1 << 20


def spec(lines: Iterable[str]) -> pathspec.GitIgnoreSpec:
    """The rules of one file. A line that is no rule counts as none."""
    kept = []
    for line in lines:
        try:
            pathspec.GitIgnoreSpec.from_lines([line])
        except ValueError:
            continue
        kept.append(line)
    return pathspec.GitIgnoreSpec.from_lines(kept)


_ALWAYS = spec(ALWAYS)
NONE = spec(())


class Rules:
    """The rules that count in one directory: its own and those of the directories above."""

    def __init__(self, levels: tuple[tuple[str, pathspec.GitIgnoreSpec], ...], last: pathspec.GitIgnoreSpec) -> None:
        self._levels, self._last = levels, last

    @staticmethod
    def top(last: pathspec.GitIgnoreSpec) -> Rules:
        """The rules of the top directory, without its `.gitignore`. `last`: those of `.snapshotdignore`."""
        return Rules((("", _ALWAYS),), last)

    def below(self, prefix: str, own: pathspec.GitIgnoreSpec) -> Rules:
        """The rules of a directory with a `.gitignore`. `prefix`: its path, with a slash at the end."""
        return Rules((*self._levels, (prefix, own)), self._last)

    def ignores(self, path: str, is_dir: bool) -> bool:
        """True for a path from the top that no snapshot holds. The directories above it are not ignored."""
        name = path + "/" if is_dir else path
        verdict = self._last.check_file(name).include
        for prefix, own in reversed(self._levels):
            if verdict is not None:
                break
            verdict = own.check_file(name[len(prefix) :]).include
        return bool(verdict)
