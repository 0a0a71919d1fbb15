"""The program that Claude Code runs for a new worktree, and when it is done with one: a copy of the folder as it is.

    python3 -I -S worktree.py create|remove          the event is on standard input

A plain git worktree has the committed files alone, and nothing runs in it: no `.env`, no `node_modules`. This one has
every file of the folder, shared with it until one of the two writes, where the file system can (XFS, Btrfs). In a git
repository it is a worktree of that repository besides, on a branch of its own; what the folder has not committed is
there as well. It lies in `.claude/worktrees`, and works without a daemon. Standard output is the path alone.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from typing import Any

PLACE = os.path.join(".claude", "worktrees")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class NoWorktree(Exception):  # noqa: N818 - an answer, and no fault
    """Why there is no worktree, in one sentence."""


def main(words: list[str]) -> int:
    try:
        event = read_event()
        if words == ["create"]:
            sys.stdout.write(create(event) + "\n")
        elif words == ["remove"]:
            remove(event)
        else:
            raise NoWorktree("say create or remove")
    except (NoWorktree, OSError) as exc:
        sys.stderr.write(f"snapshotd: {exc}\n")
        return 1
    return 0


def read_event() -> dict[str, Any]:
    """The first JSON object on standard input, whose end is not waited for."""
    data = b""
    while True:
        piece = os.read(0, 1 << 16)
        data += piece
        try:
            found = json.loads(data.decode(errors="replace"))
            if isinstance(found, dict):
                return found
        except ValueError:
            pass
        if not piece or len(data) > 1 << 20:
            raise NoWorktree("a hook's input is one JSON object, and this one is none")


def create(event: dict[str, Any]) -> str:
    """Make a worktree and return its path. NoWorktree: it cannot be made, and nothing is left of it."""
    name = event.get("name") or event.get("worktree_name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise NoWorktree(f"{name!r} is no name for a worktree: use letters, digits, '.', '_' and '-'")
    folder = top_of(str(event.get("cwd") or "."))
    target = os.path.join(folder, PLACE, name)
    if os.path.lexists(target):
        raise NoWorktree(f"{target} exists already; choose another name")
    os.makedirs(os.path.dirname(target), exist_ok=True)
    try:
        if git(folder, "rev-parse", "--verify", "-q", "HEAD").returncode == 0:
            in_git(folder, target, name)
        else:
            copy(folder, target, [entry for entry in os.listdir(folder) if entry != ".claude"])
            share_claude(folder, target)
    except BaseException:
        discard(folder, target)
        raise
    return target


def in_git(folder: str, target: str, name: str) -> None:
    branches = [f"worktree-{name}", *(f"worktree-{name}-{number}" for number in range(2, 100))]
    free = next(
        (one for one in branches if git(folder, "rev-parse", "--verify", "-q", f"refs/heads/{one}").returncode), None
    )
    if free is None:
        raise NoWorktree(f"there are a hundred branches {branches[0]}; choose another name")
    done = git(folder, "worktree", "add", "--no-checkout", "-b", free, target, "HEAD")
    if done.returncode != 0:
        raise NoWorktree(f"git makes no worktree: {stderr_of(done)}")
    entries = [entry for entry in os.listdir(folder) if entry not in (".git", ".claude")]
    copy(folder, target, entries)
    share_claude(folder, target)
    git(target, "reset", "-q")  # the index is that of the branch; the files stay


def share_claude(folder: str, target: str) -> None:
    """The agent's settings in the folder, without the worktrees."""
    place = os.path.join(folder, ".claude")
    if os.path.isdir(place) and not os.path.islink(place):
        inside = os.path.join(target, ".claude")
        os.makedirs(inside, exist_ok=True)
        copy(place, inside, [entry for entry in os.listdir(place) if entry != os.path.basename(PLACE)])


def copy(source: str, target: str, entries: list[str]) -> None:
    os.makedirs(target, exist_ok=True)
    for start in range(0, len(entries), 500):
        paths = [os.path.join(source, entry) for entry in entries[start : start + 500]]
        done = subprocess.run(["cp", "-a", "--reflink=auto", "--", *paths, target], stderr=subprocess.PIPE, check=False)
        if done.returncode != 0:
            raise NoWorktree(f"the folder cannot be copied: {stderr_of(done)}")


def remove(event: dict[str, Any]) -> None:
    """Remove a worktree that `create` made. The branch stays. Not an error when it is gone."""
    target = os.path.abspath(str(event.get("worktree_path") or ""))
    folder, name = os.path.split(target)
    if not folder.endswith(os.sep + PLACE) or not NAME.fullmatch(name):
        raise NoWorktree(f"{target} is no worktree of ours, and stays")
    if os.path.islink(target):
        raise NoWorktree(f"{target} is a link, and stays")
    discard(folder[: -len(PLACE) - 1], target)


def discard(folder: str, target: str) -> None:
    shutil.rmtree(target, ignore_errors=True)
    git(folder, "worktree", "prune")


def top_of(folder: str) -> str:
    """The top of the repository that holds the folder, or the folder."""
    done = git(folder, "rev-parse", "--show-toplevel")
    found = done.stdout.decode(errors="surrogateescape").rstrip("\n")
    return found if done.returncode == 0 and found else os.path.abspath(folder)


def stderr_of(done: subprocess.CompletedProcess[bytes]) -> str:
    return done.stderr.decode(errors="replace").strip()[:500]


def git(folder: str, *words: str) -> subprocess.CompletedProcess[bytes]:
    """A command of git; one that cannot be run counts as failed."""
    try:
        return subprocess.run(["git", "-C", folder, *words], capture_output=True, check=False)
    except OSError as exc:
        return subprocess.CompletedProcess(words, 127, b"", str(exc).encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
