"""The git program: how it is run, and the merge of three versions of a text."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from snapshotd.errors import LimitExceeded, Unsupported

_MERGE_FAILED = 128
"""`git merge-file` ends with the number of conflicts, at most 127, or with a larger code for an error."""
_MERGE_S = 60.0
"""A text may be an attacker's, and the daemon merges it."""
_FOREIGN = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR")
"""Variables that a caller, such as a hook, may have set for another repository."""


def merge_file(ours: bytes, base: bytes, theirs: bytes) -> bytes | None:
    """Three versions of a text merged; None when both sides changed the same lines. Unsupported: there is no git.
    LimitExceeded: it takes too long."""
    with tempfile.TemporaryDirectory(prefix="snapshotd-merge-") as directory:
        for name, data in (("ours", ours), ("base", base), ("theirs", theirs)):
            Path(directory, name).write_bytes(data)
        # Above this directory git would look for a repository, and take its settings.
        ceiling = os.path.dirname(os.path.realpath(directory))
        words = ["merge-file", "-p", "-q", "ours", "base", "theirs"]
        try:
            done = run_git(words, directory, env={"GIT_CEILING_DIRECTORIES": ceiling}, timeout_s=_MERGE_S)
        except subprocess.TimeoutExpired as exc:
            raise LimitExceeded(
                f"git did not merge two versions of a text within {_MERGE_S:.0f} s; bring a part without that file"
            ) from exc
    if done.returncode >= _MERGE_FAILED:
        raise Unsupported(f"git cannot merge two texts: {first_line(done)}; look at your installation of git")
    return done.stdout if done.returncode == 0 else None


def run_git(
    args: Sequence[str],
    cwd: str | bytes,
    data: bytes = b"",
    env: Mapping[str, str] | None = None,
    *,
    timeout_s: float | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run git in `cwd` with `data` as its input. Unsupported: it is not installed. subprocess.TimeoutExpired."""
    inherited = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    how: dict[str, Any] = {"cwd": cwd, "input": data, "env": {**inherited, **(env or {})}, "timeout": timeout_s}
    try:
        return subprocess.run(["git", *args], capture_output=True, check=False, **how)
    except FileNotFoundError as exc:
        raise Unsupported("the program git is not installed here, and merging and committing need it") from exc


def first_line(done: subprocess.CompletedProcess[bytes]) -> str:
    """The first line of git's own words, or its exit code."""
    lines = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
    return lines[0].removeprefix("fatal: ").removeprefix("error: ") if lines else f"exit code {done.returncode}"
