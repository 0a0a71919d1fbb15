"""What `apply` brings to a folder, path by path, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapshotd.client.apply.apply import EntryMode, apply
from snapshotd.client.apply.host_tree import HostTree
from snapshotd.errors import Conflict, DaemonUnavailable, Unsupported, UsageError
from snapshotd.trees.git import merge_file
from tests.unit.client.folders import Folders, Rig

LINES = b"1\n2\n3\n4\n5\n6\n7\n"
TOP, END = LINES.replace(b"1", b"one"), LINES.replace(b"7", b"seven")
BOTH = TOP.replace(b"7", b"seven")
Tree = dict[str, object]


@pytest.fixture(autouse=True)
def _usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


CLEAN: dict[str, tuple[Tree, Tree, Tree, Tree]] = {
    "new file": ({}, {"a": b"x"}, {}, {"a": b"x"}),
    "new file in a new directory": ({}, {"d/e/a": b"x"}, {}, {"d": None, "d/e": None, "d/e/a": b"x"}),
    "new file in a directory that was deleted here": ({"d": None}, {"d/a": b"x"}, {}, {"d": None, "d/a": b"x"}),
    "changed": ({"a": b"x"}, {"a": b"y"}, {"a": b"x"}, {"a": b"y"}),
    "deleted": ({"a": b"x"}, {}, {"a": b"x"}, {}),
    "deleted on both sides": ({"a": b"x"}, {}, {}, {}),
    "only here": ({"a": b"x"}, {"a": b"x"}, {"a": b"z", "mine": b"m"}, {"a": b"z", "mine": b"m"}),
    "the same on both sides": ({"a": b"x"}, {"a": b"y"}, {"a": b"y"}, {"a": b"y"}),
    "added equal on both sides": ({}, {"a": b"y", "d": None}, {"a": b"y", "d": 0o700}, {"a": b"y", "d": 0o700}),
    "text on both sides": ({"a": LINES}, {"a": TOP}, {"a": END}, {"a": BOTH}),
    "the folder has the same text and more": ({"a": LINES}, {"a": TOP}, {"a": BOTH}, {"a": BOTH}),
    "renamed": ({"a": b"x"}, {"b": b"x"}, {"a": b"x"}, {"b": b"x"}),
    "binary changed": ({"a": b"\0x"}, {"a": b"\0y"}, {"a": b"\0x"}, {"a": b"\0y"}),
    "mode": ({"a": b"x"}, {"a": (b"x", 0o755)}, {"a": b"x"}, {"a": (b"x", 0o755)}),
    "mode there, content here": ({"a": b"x"}, {"a": (b"x", 0o755)}, {"a": b"z"}, {"a": (b"z", 0o755)}),
    "content there, mode here": ({"a": b"x"}, {"a": b"y"}, {"a": (b"x", 0o700)}, {"a": (b"y", 0o700)}),
    "text and mode": ({"a": LINES}, {"a": (TOP, 0o755)}, {"a": END}, {"a": (BOTH, 0o755)}),
    "same content, mode missing": ({"a": b"x"}, {"a": (b"y", 0o755)}, {"a": b"y"}, {"a": (b"y", 0o755)}),
    "mode of a directory": ({"d": None}, {"d": 0o700}, {"d": None}, {"d": 0o700}),
    "mode beyond the umask": ({}, {"a": (b"x", 0o666)}, {}, {"a": b"x"}),
    "link": ({}, {"l": "a", "d/l": "../a"}, {}, {"l": "a", "d": None, "d/l": "../a"}),
    "link changed": ({"l": "a"}, {"l": "b"}, {"l": "a"}, {"l": "b"}),
    "link changed alike": ({"l": "a"}, {"l": "b"}, {"l": "b"}, {"l": "b"}),
    "file to link": ({"a": b"x"}, {"a": "b"}, {"a": b"x"}, {"a": "b"}),
    "link to file": ({"a": "b"}, {"a": b"x"}, {"a": "b"}, {"a": b"x"}),
    "file to directory": ({"a": b"x"}, {"a/b": b"y"}, {"a": b"x"}, {"a": None, "a/b": b"y"}),
    "directory to file": ({"a/b": b"y", "a/c/d": b"z"}, {"a": b"x"}, {"a/b": b"y", "a/c/d": b"z"}, {"a": b"x"}),
    "directory to link": ({"a/b": b"y"}, {"a": "b"}, {"a/b": b"y"}, {"a": "b"}),
    "directory deleted": ({"a/b/c": b"y"}, {}, {"a/b/c": b"y"}, {}),
    "names of any bytes": ({}, {"\udcff\n\x1b/ x": b"y"}, {}, {"\udcff\n\x1b": None, "\udcff\n\x1b/ x": b"y"}),
}


@pytest.mark.parametrize("case", CLEAN)
def test_what_goes_together(rig: Rig, case: str) -> None:
    base, snapshot, here, expected = CLEAN[case]
    rig.prepare(base, snapshot, here)
    before = rig.result()
    preview = rig.apply(dry_run=True)
    assert rig.result() == before
    done = rig.apply()
    assert (done.conflicts, done.warnings) == ((), ())
    assert done.changes == preview.changes
    assert rig.result() == expected
    again = rig.apply()
    assert (again.changes, again.conflicts) == ((), ()), "what is there already is not brought again"


CONFLICTS: dict[str, tuple[Tree, Tree, Tree, dict[str, str]]] = {
    "text in the same lines": ({"a": LINES}, {"a": TOP}, {"a": LINES.replace(b"1", b"I")}, {"a": "same lines"}),
    "binary on both sides": ({"a": b"\0x"}, {"a": b"\0y"}, {"a": b"\0z"}, {"a": "no text"}),
    "added on both sides": ({}, {"a": b"x"}, {"a": b"y"}, {"a": "never knew"}),
    "added, a program here": ({}, {"a": b"x"}, {"a": (b"x", 0o755)}, {"a": "never knew"}),
    "deleted there, changed here": ({"a": b"x"}, {}, {"a": b"y"}, {"a": "deleted in the snapshot, changed here"}),
    "deleted there, mode here": ({"a": b"x"}, {}, {"a": (b"x", 0o600)}, {"a": "deleted in the snapshot, changed here"}),
    "changed there, deleted here": ({"a": b"x"}, {"a": b"y"}, {}, {"a": "changed in the snapshot, deleted here"}),
    "modes": ({"a": b"x"}, {"a": (b"x", 0o755)}, {"a": (b"x", 0o600)}, {"a": "permissions"}),
    "links": ({"l": "a"}, {"l": "b"}, {"l": "c"}, {"l": "changed here"}),
    "link against file": ({"a": b"x"}, {"a": "b"}, {"a": b"y"}, {"a": "a symlink in the snapshot, and changed here"}),
    "file against link": ({"a": b"x"}, {"a": b"y"}, {"a": "b"}, {"a": "a file in the snapshot, and a symlink here"}),
    "directory against file": ({"a": b"x"}, {"a/b": b"y"}, {"a": b"z"}, {"a": "a directory in the snapshot"}),
    "new directory against file": ({}, {"a/b/c": b"y"}, {"a": b"z"}, {"a": "a directory in the snapshot, a file here"}),
    "file against directory": ({"a": b"x"}, {"a": b"y"}, {"a/b": b"z"}, {"a": "a directory here"}),
    "directory against directory to file": (
        {"d/a": b"x"},
        {"d": b"f"},
        {"d/a": b"y"},
        {"d/a": "deleted in the snapshot"},
    ),
    "directory to file, unknown in it": (
        {"a/b": b"x"},
        {"a": b"y"},
        {"a/b": b"x", "a/mine": b"m"},
        {"a": "never knew"},
    ),
    "below a link of the folder": (
        {"d": None},
        {"d/a": b"x"},
        {"d": "../outside"},
        {"d/a": "nothing is written through"},
    ),
    "below a file of the folder": ({"d/a": b"x"}, {"d/a": b"y"}, {"d": b"f"}, {"d/a": "d is a file here"}),
    "two of three": ({"a": b"x", "b": b"x"}, {"a": b"y", "b": b"y", "c": b"c"}, {"b": b"x"}, {"a": "deleted here"}),
}


@pytest.mark.parametrize("case", CONFLICTS)
def test_what_excludes_each_other(rig: Rig, case: str) -> None:
    base, snapshot, here, expected = CONFLICTS[case]
    rig.prepare(base, snapshot, here)
    (rig.directory / "outside").mkdir()
    before = rig.result()
    for dry_run in (True, False):
        done = rig.apply(dry_run=dry_run)
        assert {os.fsdecode(item.path) for item in done.conflicts} == set(expected)
        for item in done.conflicts:
            assert expected[os.fsdecode(item.path)] in item.reason
        assert rig.result() == before
    assert list((rig.directory / "outside").iterdir()) == []


WARNED: dict[str, tuple[Tree, Tree, Tree, Tree, str]] = {
    "fifo": ({}, {"p": ..., "a": b"x"}, {}, {"a": b"x"}, "p: a fifo is not brought"),
    "fifo gone": ({"p": ...}, {"p": b"x"}, {}, {"p": b"x"}, ""),
    "absolute link": ({}, {"l": "/etc/passwd"}, {}, {}, "l: a link that leads out"),
    "link that climbs out": ({}, {"d/l": "../../x"}, {}, {"d": None}, "d/l: a link that leads out"),
    "link that climbs from another": ({}, {"d": ".", "l": "d/../x"}, {}, {"d": "."}, "l: a link that leads out"),
    "file to a link that leads out": ({"a": b"x"}, {"a": "/x"}, {"a": b"x"}, {"a": b"x"}, "a: a link that leads out"),
    "set-user-id": ({}, {"s": (b"x", 0o4755)}, {}, {"s": (b"x", 0o755)}, "s: its set-user-id"),
    "git's own": ({}, {".git/config": b"x", "d/.GIT/hooks/h": b"x"}, {}, {"d": None}, "5 changes in .git"),
    "apply's own names": (
        {},
        {"pkg/.snapshotd-apply/journal": b"x", ".Snapshotd-Apply-2": b"x"},
        {},
        {"pkg": None},
        "3 changes in .snapshotd-apply",
    ),
    "unknown in a directory that goes": (
        {"d/a": b"x"},
        {},
        {"d/a": b"x", "d/mine": b"m"},
        {"d": None, "d/mine": b"m"},
        "d: the directory stays",
    ),
}


@pytest.mark.parametrize("case", WARNED)
def test_what_is_never_brought_is_said(rig: Rig, case: str) -> None:
    base, snapshot, here, expected, warning = WARNED[case]
    rig.prepare(base, snapshot, here)
    done = rig.apply()
    assert done.conflicts == ()
    assert rig.result() == expected
    assert len(done.warnings) == bool(warning)
    assert warning in "".join(done.warnings)


def test_permissions_do_not_reach_a_files_other_names(rig: Rig) -> None:
    """They may lie outside of the folder, or be none of the snapshot's."""
    rig.prepare({"a": b"x"}, {"a": (b"x", 0o755)}, {"a": (b"x", 0o644)})
    os.link(rig.here / "a", rig.directory / "outside")
    os.link(rig.here / "a", rig.here / "mine")
    assert [item.path for item in rig.apply().changes] == [b"a"]
    assert rig.result() == {"a": (b"x", 0o755), "mine": b"x"}
    assert (rig.directory / "outside").stat().st_mode & 0o777 == 0o644
    assert (rig.directory / "outside").samefile(rig.here / "mine")


def test_paths_that_lead_out_are_refused(rig: Rig) -> None:
    """A daemon would never name one; the client does not rely on that."""
    rig.prepare({}, {"a": b"x"}, {})
    _, before, after = next(iter(Folders(rig.directory / "base", rig.directory / "snapshot").changes()))
    for path in (b"../a", b"/a", b"d/../../a", b"d//a", b"."):

        class Hostile(Folders):
            def changes(self, path: bytes = path) -> Iterator[tuple[bytes, EntryMode | None, EntryMode | None]]:
                yield path, before, after

        with pytest.raises(UsageError, match="cannot hold the path"):
            apply(Hostile(rig.directory / "base", rig.directory / "snapshot"), rig.here, dry_run=False)


def test_a_content_that_ends_early_changes_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.prepare({}, {"a": b"x", "b": b"long"}, {})
    monkeypatch.setattr(Folders, "content", lambda self, side, path: iter([b"x"]))
    with pytest.raises(DaemonUnavailable, match="gave 1 bytes"):
        rig.apply()
    assert os.listdir(rig.here) == []


def test_folders_that_cannot_be_had(rig: Rig) -> None:
    rig.prepare({}, {"a": b"x"}, {"f": b""})
    rig.here = rig.directory / "missing"
    with pytest.raises(UsageError, match="No such file"):
        rig.apply()
    rig.here = rig.directory / "here" / "f"
    with pytest.raises(UsageError, match="Not a directory"):
        rig.apply()


def test_a_merge_without_git_says_so(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.prepare({"a": LINES}, {"a": TOP}, {"a": END})
    monkeypatch.setenv("PATH", str(rig.directory))
    with pytest.raises(Unsupported, match="git is not installed"):
        rig.apply()
    assert rig.result() == {"a": END}


def test_settings_around_the_temporary_directory_do_not_count(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    git(rig.directory, "init", "--quiet")
    (rig.directory / ".git" / "config").write_text("[merge]\nconflictStyle = nonsense\n")
    monkeypatch.setattr(tempfile, "tempdir", str(rig.directory))
    assert merge_file(END, LINES, TOP) == BOTH


def test_one_apply_at_a_time(rig: Rig) -> None:
    rig.prepare({}, {"a": b"x"}, {})
    with HostTree(rig.here), pytest.raises(Conflict, match="just being applied"):
        rig.apply()


# -- texts, with git as the oracle ----------------------------------------------------------------------------------


def git(where: Path, *args: str, code: int | None = 0, data: bytes = b"") -> bytes:
    done = subprocess.run(["git", "-C", str(where), *args], input=data, capture_output=True, check=False)
    assert code is None or done.returncode == code, done.stderr
    return done.stdout


def merged_by_git(where: Path, ours: bytes, base: bytes, theirs: bytes) -> bytes | None:
    """The text after `git merge`, or None for a conflict."""

    def commit(mark: int, branch: str, text: bytes, parent: int | None) -> bytes:
        head = f"commit refs/heads/{branch}\nmark :{mark}\ncommitter t <t@t> 0 +0000\ndata 0\n"
        head += f"from :{parent}\n" if parent else ""
        return head.encode() + b"M 100644 inline a\ndata %d\n%s\n" % (len(text), text)

    stream = commit(1, "base", base, None) + commit(2, "ours", ours, 1) + commit(3, "theirs", theirs, 1)
    git(where, "fast-import", "--quiet", "--force", data=stream)
    git(where, "checkout", "--quiet", "--force", "--detach", "ours")
    # `git merge-file` finds changed lines with Myers' algorithm; the default strategy of a merge always with another.
    how = ["--quiet", "--strategy=recursive", "--strategy-option=diff-algorithm=myers"]
    merge = ["-c", "user.name=t", "-c", "user.email=t@t", "merge", *how, "theirs"]
    done = subprocess.run(["git", "-C", str(where), *merge], capture_output=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return (where / "a").read_bytes() if done.returncode == 0 else None


TEXT = st.lists(st.sampled_from([b"a\n", b"b\n", b"c\n", b"\n", b"long line\r\n"]), max_size=8).map(b"".join)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("oracle")
    git(where, "init", "--quiet")
    git(where, "config", "core.autocrlf", "false")
    return where


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(base=TEXT, left=st.tuples(TEXT, TEXT), cut=st.integers(0, 8), tail=st.sampled_from([b"", b"no end"]))
def test_texts_merge_as_git_merges_them(
    repository: Path, base: bytes, left: tuple[bytes, bytes], cut: int, tail: bytes
) -> None:
    """Both sides keep a part of the base, so that most pairs of changes lie apart."""
    lines = base.splitlines(keepends=True)
    ours = left[0] + b"".join(lines[cut // 2 :]) + tail
    theirs = b"".join(lines[:cut]) + left[1]
    expected = merged_by_git(repository, ours, base, theirs)
    if theirs == base or ours in (base, theirs):
        return  # git takes a side without merging; so does the plan, which has its own tests
    assert merge_file(ours, base, theirs) == expected


# -- any three trees ------------------------------------------------------------------------------------------------

_LEAF = st.sampled_from([b"\0x", b"\0y", "a", "b"])
_TREE = st.dictionaries(
    st.sampled_from("abc"), st.one_of(_LEAF, st.dictionaries(st.sampled_from("ab"), _LEAF, max_size=2))
)


def flat(tree: dict[str, object]) -> Tree:
    found: Tree = {}
    for name, value in tree.items():
        found[name] = None if isinstance(value, dict) else value
        found.update({f"{name}/{below}": leaf for below, leaf in value.items()} if isinstance(value, dict) else {})
    return found


@settings(max_examples=60, deadline=None)
@given(trees=st.tuples(_TREE, _TREE, _TREE), related=st.booleans())
def test_any_three_trees(trees: tuple[dict[str, object], dict[str, object], dict[str, object]], related: bool) -> None:
    """Nothing of the folder is lost but what the base had too, and everything of the snapshot arrives, or nothing."""
    base, snapshot, here = (flat({**trees[0], **tree} if related else tree) for tree in trees)
    with tempfile.TemporaryDirectory() as directory:
        rig = Rig(Path(directory))
        rig.prepare(base, snapshot, here)
        preview = rig.apply(dry_run=True)
        assert rig.result() == here
        done = rig.apply()
        assert (done.changes, done.conflicts) == (preview.changes, preview.conflicts)
        result = rig.result()
        if done.conflicts:
            assert result == here
            return
        for path in {*base, *snapshot, *here}:
            wanted, has, had, now = (tree.get(path, ...) for tree in (snapshot, here, base, result))
            if wanted != had and not (wanted is ... and has is now is None):  # a directory may stay for what is in it
                assert now == wanted, path
            elif wanted == had and has is not ...:
                assert now == has, path
            if has not in (..., None, had):
                assert now == has, path
        assert rig.apply().conflicts == ()
        assert rig.result() == result
