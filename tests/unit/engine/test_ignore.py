"""Rules of a `.gitignore` mean what they mean to git, and hostile ones cost no more than others."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest

from snapshotd.engine.folders import ignore, scan
from snapshotd.engine.folders.ignore import Rules, read_rules
from snapshotd.engine.folders.scan import FolderIndex, FolderScan
from snapshotd.errors import LimitExceeded
from tests import long

NAMES = [
    b"a",
    b"b",
    b"ab",
    b"a b",
    b"a ",
    b"]",
    b"a*",
    b"[a]",
    b"!a",
    b"#a",
    b"a-b",
    b"-",
    b"\\a",
    b"\xff",
    "é".encode(),
    b"A1",
    b"a\nb",
]
PIECES = [
    *(
        b"a",
        b"b",
        b"ab",
        b"*",
        b"**",
        b"***",
        b"/",
        b"/",
        b"?",
        b" ",
        b"\\",
        b"\\ ",
        b"\\*",
        b"!",
        b"#",
        b"\xff",
        b"\t",
    ),
    *(
        b"[a-b]",
        b"[!a]",
        b"[^b]",
        b"[]a]",
        b"[a",
        b"[]",
        b"[a-]",
        b"[\\]]",
        b"[[:alpha:]]",
        b"[[:digit:]x]",
        b"[[:no:]]",
        b"[[:a]",
    ),
    *(b"[b-a]", b"[--b]", b"[/]", b"**/", b"/**", b"/**/", b"\\/", b"\r", "é".encode()),
]


def made(random_: random.Random) -> bytes:
    """A rule of a few pieces."""
    return b"".join(random_.choice(PIECES) for _ in range(random_.randint(1, 5)))


def test_rules_mean_what_they_mean_to_git(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    os.environ.pop("GIT_DIR", None)
    random_ = random.Random(long.SEED)
    tree = [
        (path, is_dir)
        for top in NAMES
        for path, is_dir in [(top, True), *((top + b"/" + name, bool(n % 2)) for n, name in enumerate(NAMES))]
    ]
    for path, is_dir in tree:
        there = os.path.join(os.fsencode(tmp_path), path)
        os.mkdir(there) if is_dir else os.close(os.open(there, os.O_CREAT))
    for _ in range(long.size(15, 400)):
        lines = [made(random_) for _ in range(random_.randint(1, 6))]
        (tmp_path / ".gitignore").write_bytes(b"\n".join(lines) + b"\n")
        rules = Rules.top(ignore.NONE).below("", read_rules(b"\n".join(lines) + b"\n"))
        asked = b"".join(path + b"\0" for path, _ in tree)
        done = subprocess.run(
            ["git", "-c", "core.excludesFile=", "check-ignore", "-z", "--stdin", "--no-index"],
            cwd=tmp_path,
            input=asked,
            capture_output=True,
            check=False,
        )
        assert done.returncode in (0, 1), done.stderr
        ignored = {one for one in done.stdout.split(b"\0") if one}
        for path, is_dir in tree:
            top = path.split(b"/")[0]
            below_ignored = path != top and rules.ignores(os.fsdecode(top), True)
            ours = below_ignored or rules.ignores(os.fsdecode(path), is_dir)
            theirs = path in ignored
            assert ours == theirs, (lines, path, is_dir)


def test_a_hostile_rule_costs_what_its_path_costs() -> None:
    """Without an end in time on a matcher that tries every way, and so is any bound that could be asserted here."""
    rules = read_rules(b"a*" * 14 + b"b\n" + b"**/" * 300 + b"x\n" + b"[!b]*" * 100 + b"\n")
    assert rules.over == ""
    assert rules.verdict(b"a" * 120) is True
    assert read_rules(b"a*" * 14 + b"b\n").verdict(b"a" * 4000) is None


def test_rules_have_a_bound_and_the_file_is_named(tmp_path: Path) -> None:
    below = tmp_path / "d"
    below.mkdir()
    for name in ("first", "last", "kept"):
        (below / name).touch()
    (below / ".gitignore").write_bytes(b"first\n" + b"x" * (ignore.MOST_LINE_BYTES + 1) + b"\nkept\n")
    found = scanned(tmp_path)
    assert sorted(found.changed) == ["d", "d/.gitignore", "d/last"]
    assert found.warnings == [
        f"d/.gitignore is not followed as a whole: a line has more than {ignore.MOST_LINE_BYTES} bytes, and does not count"
    ]
    many = b"".join(b"name%d\n" % number for number in range(ignore.MOST_RULES - 1))
    for content, says in (
        (b"first\n" + many + b"last\n", f"more than {ignore.MOST_RULES} rules"),
        (b"first\n" + b"#" * ignore.MOST_FILE_BYTES + b"\nlast\n", f"more than {ignore.MOST_FILE_BYTES} bytes"),
        (b"first\n" + b"!a\na\n" * ignore.MOST_TURNS + b"last\n", f"more than {ignore.MOST_TURNS} turns"),
    ):
        (below / ".gitignore").write_bytes(content)
        found = scanned(tmp_path)
        assert sorted(found.changed) == ["d", "d/.gitignore", "d/kept", "d/last"]
        assert says in found.warnings[0]


def test_a_folder_has_a_bound_for_all_its_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ignore, "MOST_FILES", 2)
    for number in range(3):
        (tmp_path / f"d{number}").mkdir()
        (tmp_path / f"d{number}" / "x").touch()
        (tmp_path / f"d{number}" / ".gitignore").write_text("x\n")
    found = scanned(tmp_path)
    assert len([path for path in found.changed if path.endswith("/x")]) == 1
    assert len(found.warnings) == 1


def test_a_folder_that_takes_too_long_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").touch()
    monkeypatch.setattr(scan, "LONGEST_S", -1.0)
    with pytest.raises(LimitExceeded, match="snapshotdignore"):
        scanned(tmp_path)


def scanned(folder: Path) -> FolderScan:
    """A first look at a folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return FolderIndex().scan(fd)
    finally:
        os.close(fd)
