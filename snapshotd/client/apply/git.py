"""The git program, for making a commit of what was applied."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from snapshotd.errors import Conflict, UsageError
from snapshotd.trees.git import first_line, run_git

_WITHOUT_PROGRAMS = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "commit.verbose": "false",
    "status.submoduleSummary": "false",
    "submodule.recurse": "false",
    "safe.bareRepository": "explicit",
}
"""Settings under which git runs no program that a repository names, but for those that make a commit another one
(`_MAKES_COMMITS`). From the list in git-config(1), version 2.39."""
_NO_FETCH = {"GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}
"""A missing object is not fetched: the repository names the program that would."""
_MAKES_COMMITS = re.compile(
    r"filter\..*\.(?:clean|process)|gpg\.(?:.*\.)?program|gpg\.ssh\.defaultkeycommand|hook\..*\.command|lfs\.extension\..*\.clean",
    re.DOTALL,
)
_OWN_SCOPES = ("local", "worktree")


class Worktree:
    """The git worktree that a folder lies in. UsageError when it lies in none, or when git could make no commit there
    as things stand.

    The repository's settings and hooks may be an attacker's, as the folder may. Git runs none of the programs that they
    name, unless `hooks`; where a commit would be another one without them (filters, signatures), UsageError."""

    def __init__(self, folder: Path, *, hooks: bool) -> None:
        self._folder, self._hooks = os.fsencode(os.path.realpath(folder)), hooks
        asked = ["rev-parse", "--show-toplevel", "--absolute-git-dir"]
        found = self._git(asked, self._folder)
        answers = found.stdout.rstrip(b"\n").split(b"\n")
        if found.returncode != 0 or len(answers) != 2:
            raise UsageError(f"{folder} cannot be committed to: {first_line(found)}; apply without a commit")
        # Git runs at the top from now on, where nothing that is applied to the folder is taken for a repository.
        self._top, git_dir = answers
        self._prefix = os.path.relpath(self._folder, self._top)
        if not hooks:
            self._refuse_programs(folder)
        if self._git(["var", "GIT_COMMITTER_IDENT"], self._top).returncode != 0:
            raise UsageError(
                "git knows no name and e-mail for a commit; set user.name and user.email with `git config`"
            )
        for name, what in (
            ("MERGE_HEAD", "merge"),
            ("CHERRY_PICK_HEAD", "cherry-pick"),
            ("rebase-merge", "rebase"),
            ("rebase-apply", "rebase"),
        ):
            if os.path.lexists(os.path.join(git_dir, os.fsencode(name))):
                raise UsageError(f"{folder} is in the middle of a {what}; end it first, or apply without a commit")

    def check(self, paths: Sequence[bytes]) -> None:
        """UsageError: git would refuse a commit of these files (relative to the folder), by their names or because it
        cannot sign. Nothing is changed: index and objects of the trial are elsewhere."""
        full = [os.path.normpath(os.path.join(self._prefix, path)) for path in paths]
        with tempfile.TemporaryDirectory(prefix="snapshotd-commit-") as directory:
            trial: dict[str, str] = {
                "GIT_INDEX_FILE": os.path.join(directory, "index"),
                "GIT_OBJECT_DIRECTORY": directory,
            }
            lines = b"".join(b"100644 %b\t%b\0" % (b"1" * 40, path) for path in full)
            self._git(["update-index", "-z", "--index-info"], self._top, lines, **trial)  # passes over such names
            taken = self._git(["ls-files", "-z"], self._top, b"", **trial).stdout.split(b"\0")
            refused = sorted({*full} - {*taken})
            if refused:
                raise UsageError(
                    f"git takes no file of the name {os.fsdecode(refused[0])!r}, so nothing was changed: apply without a commit, or "
                    "a part without that file"
                )
            if self._git(["config", "--type=bool", "commit.gpgSign"], self._top).stdout.strip() != b"true":
                return
            tree = self._git(["mktree"], self._top, b"", **trial).stdout.decode().strip()
            signed = self._git(["commit-tree", "-S", "-m", "trial", tree], self._top, b"", **trial)
            if signed.returncode != 0:
                raise UsageError(
                    f"git cannot sign a commit ({first_line(signed)}), so nothing was changed: mend it, or set commit.gpgSign to false"
                )

    def commit(self, paths: Sequence[bytes], message: str) -> str | None:
        """Commit these files and links (relative to the folder; also those that are gone) as they are now, and nothing
        else: what else is staged stays staged. Ignored files are left out. Returns the commit's id, or None when git
        sees no change in them. Conflict when git, or a hook, refuses."""
        every = [os.path.normpath(os.path.join(self._prefix, path)) for path in paths]
        tracked = set(self._run(["ls-files", "-z"]).split(b"\0"))
        full = {path: os.path.join(self._top, path) for path in every}
        here = [path for path in every if os.path.lexists(full[path]) and not _is_directory(full[path])]
        dotted = [b"./" + path for path in here]  # a name may begin with what git takes for a pattern
        ignored = set(self._run(["check-ignore", "-z", "--stdin"], dotted, fine=(0, 1)).split(b"\0"))
        listed = [path for path in every if path in tracked] + [
            path for path in here if path not in tracked and b"./" + path not in ignored
        ]
        if not listed:
            return None
        self._run(["--literal-pathspecs", "add", "--all", *_FROM_STDIN], listed)
        states = self._run(["status", "--porcelain=v1", "-z", "--no-renames", *_STATUS]).split(b"\0")
        changed = {state[3:] for state in states}
        # `git commit --only` fails on a file that became a directory. Its content takes its place in the commit.
        listed = [path for path in listed if path in changed and not _is_directory(full[path])]
        if not listed:
            return None
        self._run(["--literal-pathspecs", "commit", "--quiet", "--only", f"--message={message}", *_FROM_STDIN], listed)
        return self._run(["rev-parse", "HEAD"]).decode().strip()

    def _run(self, args: Sequence[str], paths: Sequence[bytes] = (), fine: tuple[int, ...] = (0,)) -> bytes:
        done = self._git(args, self._top, b"\0".join(paths))
        if done.returncode not in fine:
            raise Conflict(
                f"the changes are in {os.fsdecode(self._folder)}, but git did not commit them: {first_line(done)}; "
                "commit them yourself"
            )
        return done.stdout

    def _git(
        self, args: Sequence[str], cwd: bytes, data: bytes = b"", **env: str
    ) -> subprocess.CompletedProcess[bytes]:
        if self._hooks:
            return run_git(args, cwd, data, env)
        settings = [word for name, value in _WITHOUT_PROGRAMS.items() for word in ("-c", f"{name}={value}")]
        return run_git([*settings, *args], cwd, data, {**_NO_FETCH, **env})

    def _refuse_programs(self, folder: Path) -> None:
        """UsageError: a commit as the repository wants it takes a program that the repository names."""
        listed = self._git(["config", "--list", "--show-scope", "--null"], self._top)
        if listed.returncode != 0:
            raise UsageError(f"the settings of {folder} cannot be read: {first_line(listed)}; apply without a commit")
        fields = listed.stdout.decode(errors="surrogateescape").split("\0")
        for scope, setting in zip(fields[::2], fields[1::2], strict=False):
            name = setting.partition("\n")[0]
            if scope in _OWN_SCOPES and _MAKES_COMMITS.fullmatch(name):
                raise UsageError(
                    f"the repository of {folder} names a program for commits with its setting {name}, which does not run: "
                    "apply without a commit and commit yourself, or let its hooks and programs run"
                )


_FROM_STDIN = ("--pathspec-from-file=-", "--pathspec-file-nul")
_STATUS = ("--untracked-files=no", "--ignore-submodules=all")  # a submodule has settings of its own


def _is_directory(path: bytes) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)
