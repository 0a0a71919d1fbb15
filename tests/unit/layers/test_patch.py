"""Patches against the real `git apply` and `patch -p1`."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from snapshotd.errors import LimitExceeded
from snapshotd.kernel.files import DIR_FLAGS
from snapshotd.trees import hunks as hunks_module
from snapshotd.trees import patch as patch_module
from snapshotd.trees.hunks import hunks
from snapshotd.trees.patch import PatchBound, write_patch
from snapshotd.trees.stack_view import StackView
from tests import long

Tree = dict[bytes, tuple[str, bytes]]
"""Path to ("file" | "program" | "link", content or target)."""
LARGE = long.size(600_000, 3_000_000)


def write_tree(root: Path, tree: Tree) -> Path:
    root.mkdir(parents=True)
    for path, (kind, content) in tree.items():
        full = os.path.join(os.fsencode(root), path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        if kind == "link":
            os.symlink(content, full)
            continue
        with open(full, "wb") as f:
            f.write(content)
        os.chmod(full, 0o755 if kind == "program" else 0o644)
    return root


def read_tree(root: Path) -> Tree:
    top = os.fsencode(root)
    tree: Tree = {}
    for parent, dirs, files in os.walk(top):
        for name in [*files, *(d for d in dirs if os.path.islink(os.path.join(parent, d)))]:
            full = os.path.join(parent, name)
            path = os.path.relpath(full, top)
            if os.path.islink(full):
                tree[path] = ("link", os.readlink(full))
            else:
                with open(full, "rb") as f:
                    tree[path] = ("program" if os.stat(full).st_mode & 0o100 else "file", f.read())
    return tree


def make_patch(before: Path, after: Path, root: bytes = b"", max_bytes: int | None = None) -> tuple[bytes, int]:
    """With `max_bytes`, a line in place of each larger file."""
    fds = [os.open(path, DIR_FLAGS) for path in (before, after)]
    pieces: list[bytes] = []
    bound = (
        None
        if max_bytes is None
        else PatchBound(max_bytes, lambda path, size: pieces.append(b"%s: %d\n" % (path, size)))
    )
    with StackView(fds[:1]) as a, StackView(fds[1:]) as b:
        outside = write_patch(a, b, root, pieces.append, bound)
    for fd in fds:
        os.close(fd)
    return b"".join(pieces), outside


def git_apply(tree: Path, patch: bytes, *options: str) -> None:
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent), "GIT_CONFIG_GLOBAL": "/dev/null"}
    command = ["git", "apply", "--whitespace=nowarn", *options]
    done = subprocess.run(command, input=patch, cwd=tree, env=env, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr + patch[:5000]


def gnu_patch(tree: Path, patch: bytes) -> None:
    if shutil.which("patch") is None:
        pytest.skip("GNU patch is not installed")
    command = ["patch", "-p1", "--no-backup-if-mismatch", "-s"]
    done = subprocess.run(command, input=patch, cwd=tree, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr + patch[:5000]


Apply = Callable[[Path, bytes], None]
BOTH = pytest.mark.parametrize("apply", [git_apply, gnu_patch])

OLD = b"".join(b"line %d\n" % i for i in range(100))
CASES: dict[str, tuple[Tree, Tree]] = {
    "change": ({b"f": ("file", OLD)}, {b"f": ("file", OLD.replace(b"line 3\n", b"LINE\n").replace(b"line 80\n", b""))}),
    "change first and last": ({b"f": ("file", OLD)}, {b"f": ("file", b"top\n" + OLD[7:-8] + b"end\n")}),
    "new": ({b"k": ("file", b"k\n")}, {b"k": ("file", b"k\n"), b"d/e/new": ("file", b"one\ntwo\n")}),
    "delete": ({b"d/gone": ("file", b"one\n"), b"k": ("file", b"k\n")}, {b"k": ("file", b"k\n")}),
    "new empty": ({b"k": ("file", b"k\n")}, {b"k": ("file", b"k\n"), b"empty": ("file", b"")}),
    "delete empty": ({b"k": ("file", b"k\n"), b"empty": ("file", b"")}, {b"k": ("file", b"k\n")}),
    "fill empty": ({b"f": ("file", b"")}, {b"f": ("file", b"x\n")}),
    "make empty": ({b"f": ("file", b"x\ny\n")}, {b"f": ("file", b"")}),
    "mode": ({b"f": ("file", b"x\n")}, {b"f": ("program", b"x\n")}),
    "mode back": ({b"f": ("program", b"x\n")}, {b"f": ("file", b"x\n")}),
    "mode and content": ({b"f": ("file", OLD)}, {b"f": ("program", OLD + b"x\n")}),
    "new program": ({b"k": ("file", b"k\n")}, {b"k": ("file", b"k\n"), b"p": ("program", b"#!/bin/sh\n")}),
    "no newline at the end": ({b"f": ("file", b"a\nb\nc")}, {b"f": ("file", b"a\nB\nc")}),
    "newline gone": ({b"f": ("file", b"a\nb\n")}, {b"f": ("file", b"a\nb")}),
    "newline came": ({b"f": ("file", b"a\nb")}, {b"f": ("file", b"a\nb\n")}),
    "new without newline": ({b"k": ("file", b"k\n")}, {b"k": ("file", b"k\n"), b"f": ("file", b"x")}),
    "new link": ({b"k": ("file", b"k\n")}, {b"k": ("file", b"k\n"), b"l": ("link", b"k")}),
    "change link": ({b"l": ("link", b"one")}, {b"l": ("link", b"two/three")}),
    "delete link": ({b"l": ("link", b"one"), b"k": ("file", b"k\n")}, {b"k": ("file", b"k\n")}),
    "file to link": ({b"f": ("file", b"x\n")}, {b"f": ("link", b"target")}),
    "link to file": ({b"f": ("link", b"target")}, {b"f": ("file", b"x\n")}),
    "file to directory": (
        {b"f": ("file", b"x\n"), b"k": ("file", b"k\n")},
        {b"f/in": ("file", b"y\n"), b"k": ("file", b"k\n")},
    ),
    "directory to file": (
        {b"f/in": ("file", b"y\n"), b"f/deep/er": ("file", b"z\n"), b"f.txt": ("file", b"1\n")},
        {b"f": ("file", b"x\n"), b"f.txt": ("file", b"2\n")},
    ),
    "directory to link": ({b"f/in": ("file", b"y\n")}, {b"f": ("link", b"x")}),
    "carriage returns": ({b"f": ("file", b"a\r\nb\rc\n")}, {b"f": ("file", b"a\r\nb\rd\n")}),
    "latin-1": ({b"f": ("file", b"\xe9t\xe9\n")}, {b"f": ("file", b"\xe9tat\n")}),
    "odd separators": ({b"f": ("file", b"a\x0bb\x0cc\x1cd\x85\n")}, {b"f": ("file", b"a\x0bb\x0cC\x1cd\x85\n")}),
    "lines like a patch": (
        {b"f": ("file", b"-- x\n++ y\n@@ -1 +1 @@\n")},
        {b"f": ("file", b"-- z\n++ y\ndiff --git a/x b/x\n")},
    ),
    "space in the name": (
        {b"a b/c d": ("file", b"x\n"), b"e f": ("file", b"")},
        {b"a b/c d": ("file", b"y\n"), b"g h": ("file", b"")},
    ),
    "odd names": (
        {b'q"b\\': ("file", b"x\n"), b"\xff\xfe": ("file", b"x\n")},
        {
            b'q"b\\': ("file", b"y\n"),
            b"\xff\xfe": ("file", b"y\n"),
            b"tab\tnl\nbell\a": ("file", b"x\n"),
            b"\xc3\xa9": ("program", b""),
        },
    ),
    "names of options": ({b"-R": ("file", b"x\n")}, {b"-R": ("file", b"y\n"), b"--help": ("file", b"x\n")}),
}


GIT_ONLY = ("file to directory", "directory to file", "directory to link")
"""GNU patch puts off deletions of git-style patches to its end and then finds a directory in the way, git's own patches
included."""


@pytest.mark.parametrize(
    ("name", "apply"), [(n, a) for n in CASES for a in (git_apply, gnu_patch) if a is git_apply or n not in GIT_ONLY]
)
def test_applies(tmp_path: Path, name: str, apply: Apply) -> None:
    before, after = CASES[name]
    patch, outside = make_patch(write_tree(tmp_path / "a", before), write_tree(tmp_path / "b", after))
    assert outside == 0
    apply(tmp_path / "a", patch)
    assert read_tree(tmp_path / "a") == after


@pytest.mark.parametrize("name", CASES)
def test_applies_in_reverse(tmp_path: Path, name: str) -> None:
    before, after = CASES[name]
    patch, _ = make_patch(write_tree(tmp_path / "a", before), write_tree(tmp_path / "b", after))
    git_apply(tmp_path / "b", patch, "-R")
    assert read_tree(tmp_path / "b") == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"\0one", b"\0two"),
        (b"text\n", b"\0" * 100_000),
        (None, bytes(range(256)) * 999),
        (b"\0x", None),
        (b"", b"\0"),
        (random.Random(1).randbytes(LARGE), random.Random(2).randbytes(LARGE - 1)),
    ],
)
def test_binary_applies_with_git_both_ways(tmp_path: Path, old: bytes | None, new: bytes | None) -> None:
    before: Tree = {b"k": ("file", b""), **({} if old is None else {b"f": ("file", old)})}
    after: Tree = {b"k": ("file", b""), **({} if new is None else {b"f": ("file", new)})}
    patch, _ = make_patch(write_tree(tmp_path / "a", before), write_tree(tmp_path / "b", after))
    assert b"GIT binary patch" in patch
    git_apply(tmp_path / "a", patch)
    assert read_tree(tmp_path / "a") == after
    git_apply(tmp_path / "a", patch, "-R")
    assert read_tree(tmp_path / "a") == before


@BOTH
def test_large_text_is_replaced_as_a_whole(tmp_path: Path, apply: Apply) -> None:
    old = b"".join(b"%d\n" % i for i in range(300_000))
    new = old.replace(b"\n7777\n", b"\nx\n") + b"no newline"
    patch, _ = make_patch(
        write_tree(tmp_path / "a", {b"f": ("file", old)}), write_tree(tmp_path / "b", {b"f": ("file", new)})
    )
    assert patch.count(b"\n@@ ") == 1
    apply(tmp_path / "a", patch)
    assert read_tree(tmp_path / "a") == {b"f": ("file", new)}


@BOTH
@pytest.mark.parametrize("seed", range(15))
def test_random_text(tmp_path: Path, seed: int, apply: Apply) -> None:
    rng = random.Random(seed)
    old = [b"%d\n" % rng.randrange(rng.choice((5, 1000))) for _ in range(rng.randrange(300))]
    new = list(old)
    for _ in range(rng.randrange(1, 20)):
        at = rng.randrange(len(new) + 1)
        new[at : at + rng.randrange(4)] = [b"%d\n" % rng.randrange(5) for _ in range(rng.randrange(4))]
    after: Tree = {b"f": ("file", b"".join(new)), b"k": ("file", b"")}
    before: Tree = {b"f": ("file", b"".join(old)), b"k": ("file", b"")}
    patch, _ = make_patch(write_tree(tmp_path / "a", before), write_tree(tmp_path / "b", after))
    if patch:
        apply(tmp_path / "a", patch)
    assert read_tree(tmp_path / "a") == after


def test_index_line_is_what_git_computes(tmp_path: Path) -> None:
    patch, _ = make_patch(
        write_tree(tmp_path / "a", {b"f": ("file", b"x\n")}), write_tree(tmp_path / "b", {b"f": ("file", b"y\n")})
    )
    ids = [
        subprocess.run(
            ["git", "hash-object", "--stdin"], input=text, capture_output=True, check=True, timeout=60
        ).stdout.strip()
        for text in (b"x\n", b"y\n")
    ]
    assert b"\nindex " + ids[0] + b".." + ids[1] + b" 100644\n" in patch


def test_root_and_what_lies_outside(tmp_path: Path) -> None:
    before: Tree = {b"work/f": ("file", b"x\n"), b"work.txt": ("file", b"1\n"), b"etc/c": ("file", b"1\n")}
    after: Tree = {b"work/f": ("file", b"y\n"), b"work.txt": ("file", b"2\n"), b"etc/c": ("file", b"2\n")}
    patch, outside = make_patch(write_tree(tmp_path / "a", before), write_tree(tmp_path / "b", after), b"/work/")
    assert outside == 2
    assert patch.startswith(b"diff --git a/f b/f\n")
    git_apply(tmp_path / "a" / "work", patch)
    assert read_tree(tmp_path / "a" / "work") == {b"f": ("file", b"y\n")}


def test_root_that_is_a_file(tmp_path: Path) -> None:
    write_tree(tmp_path / "a", {b"work": ("file", b"x\n")})
    write_tree(tmp_path / "b", {b"work": ("file", b"y\n")})
    with pytest.raises(NotADirectoryError):
        make_patch(tmp_path / "a", tmp_path / "b", b"work")


def test_nothing_for_what_a_patch_cannot_say(tmp_path: Path) -> None:
    a, b = write_tree(tmp_path / "a", {b"f": ("file", b"x\n")}), write_tree(tmp_path / "b", {b"f": ("file", b"x\n")})
    (b / "f").chmod(0o600)
    (b / "dir").mkdir()
    os.mkfifo(b / "fifo")
    assert make_patch(a, b) == (b"", 0)


def test_too_big_a_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_module, "MAX_FILE_BYTES", 10)
    write_tree(tmp_path / "a", {})
    write_tree(tmp_path / "b", {b"big": ("file", b"x" * 11)})
    with pytest.raises(LimitExceeded, match="'big'"):
        make_patch(tmp_path / "a", tmp_path / "b")


def test_a_file_beyond_a_bound_is_named_in_its_place(tmp_path: Path) -> None:
    write_tree(tmp_path / "a", {b"w/gone": ("file", b"y" * 11)})
    write_tree(tmp_path / "b", {b"w/a": ("file", b"a\n"), b"w/big": ("file", b"x" * 12), b"w/z": ("file", b"z\n")})
    patch, outside = make_patch(tmp_path / "a", tmp_path / "b", b"w", 10)
    lines = [line for line in patch.splitlines() if line.startswith((b"diff", b"big", b"gone"))]
    assert lines == [b"diff --git a/a b/a", b"big: 12", b"gone: 11", b"diff --git a/z b/z"]
    assert outside == 0


@pytest.mark.parametrize("kind", ["same", "few", "permuted", "spread"])
def test_hostile_lines_take_bounded_time(kind: str) -> None:
    """The bound is generous: it is there to catch growth, not slowness."""
    n = 10_000
    rng = random.Random(3)
    lines = {
        "same": [b"x\n"] * n,
        "few": [b"%d\n" % (i % 7) for i in range(n)],
        "permuted": [b"%d\n" % i for i in rng.sample(range(n), n)],
        "spread": [b"%d\n" % (i % 110) for i in range(n)],
    }[kind]
    other = [b"y\n", *lines[: n // 2], b"z\n", *rng.sample(lines[n // 2 :], n // 2), b"w\n"]
    started = time.monotonic()
    result = _patched(lines, list(hunks(lines, other, 3)))
    assert time.monotonic() - started < 30
    assert result == other


def test_small_changes_in_a_large_file_make_small_hunks() -> None:
    old = [b"%d\n" % (i * 7919 % 5000) for i in range(15_000)]
    new = list(old)
    for at in (5, 7000, 14_990):
        new[at] = b"changed\n"
    found = list(hunks(old, new, 3))
    assert _patched(old, found) == new
    assert [hunk.new_count for hunk in found] == [7, 7, 7]


def test_exhausted_budget_still_gives_a_right_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hunks_module, "STEP_BUDGET", 0)
    old, new = [b"a\n", b"b\n", b"a\n", b"c\n"], [b"b\n", b"a\n", b"a\n", b"d\n"]
    assert _patched(old, list(hunks(old, new, 3))) == new


def _patched(old: list[bytes], found: list[hunks_module.Hunk]) -> list[bytes]:
    """Apply hunks, checking every line they claim."""
    result: list[bytes] = []
    at = 0
    for hunk in found:
        start = hunk.old_start - bool(hunk.old_count)
        result += old[at:start]
        assert hunk.new_start - bool(hunk.new_count) == len(result)
        assert [line for sign, line in hunk.lines if sign != b"+"] == old[start : start + hunk.old_count]
        result += [line for sign, line in hunk.lines if sign != b"-"]
        at = start + hunk.old_count
    return result + old[at:]
