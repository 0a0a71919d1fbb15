"""The files of a merge, over the whole root: what the plan lists changes, and nothing else does. `git merge` is the oracle
for random trees, and `apply` to a folder is held to the same.

Three directories stand for the trees of base, source and head; the plan, the request and the layer are the product's.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapshotd.client.apply.apply import apply
from snapshotd.engine.history.merging import Items, ViewPair, ViewTree, from_root, write
from snapshotd.errors import UsageError
from snapshotd.kernel.files import DIR_FLAGS
from snapshotd.layers.amend import amend
from snapshotd.layers.store import LayerStore
from snapshotd.layers.view import open_stack
from snapshotd.trees.materialise import materialise
from snapshotd.trees.stack_view import StackView
from snapshotd.trees.three_way import Item, MergePlan, Present
from snapshotd.types import ImageID, Stack
from tests import variety
from tests.capabilities import require
from tests.long import size
from tests.unit.client.folders import Folders

IMAGE = ImageID("1" * 32)
TOP = [b"workspace"]
Facts = dict[bytes, variety.Fact]


@dataclass
class Trees:
    """The roots of base, source and head, each with a /workspace."""

    place: Path

    def __post_init__(self) -> None:
        self.base, self.theirs = self.place / "base", self.place / "theirs"
        self.mine = self.place / "store" / "images" / IMAGE / "root"
        for root in (self.base, self.theirs, self.mine):
            (root / "workspace").mkdir(parents=True)

    def make(self, base: str, theirs: str, mine: str) -> None:
        for root, own in ((self.base, ""), (self.theirs, theirs), (self.mine, mine)):
            subprocess.run(["sh", "-ec", f"umask 022; {base}\n{own}"], cwd=root / "workspace", check=True)

    def merge(self) -> tuple[MergePlan[Present], Path]:
        """The plan for /workspace, and the root that comes out of it."""
        with contextlib.ExitStack() as opened:
            fds = [os.open(root, DIR_FLAGS) for root in (self.base, self.theirs, self.mine)]
            for fd in fds:
                opened.callback(os.close, fd)
            base, theirs, mine = (opened.enter_context(StackView([fd])) for fd in fds)
            plan = MergePlan(ViewPair(base, theirs, TOP), ViewTree(mine, TOP), in_sandbox=True)
        return plan, self.write(from_root(plan.items, b"workspace"))

    def write(self, items: Items) -> Path:
        store = LayerStore(self.place / "store", "plain")
        fd, made = os.open(self.theirs, DIR_FLAGS), self.place / "made"
        made.mkdir()
        try:
            with open_stack(store, Stack(IMAGE)) as present, StackView([fd]) as view:
                layer = amend(store, Stack(IMAGE), lambda root: write(root, present, view, items))
            with open_stack(store, Stack(IMAGE, (layer,))) as merged:
                target = os.open(made, DIR_FLAGS)
                try:
                    materialise(merged, b"", target, whiteouts=True)
                finally:
                    os.close(target)
        finally:
            os.close(fd)
            store.close()
        return made


def untouched(facts: Facts, listed: set[bytes]) -> dict[bytes, object]:
    """What is at each path that is not listed. Times of directories follow what comes and goes in them."""
    return {
        path: (
            fact.kind,
            fact.mode,
            fact.uid,
            fact.gid,
            0 if fact.kind == 0o040000 else fact.mtime_ns,
            fact.target,
            fact.digest,
            fact.xattrs,
            links if len(links := [link for link in fact.links if link not in listed]) > 1 else [],
        )
        for path, fact in facts.items()
        if path not in listed
    }


@pytest.fixture
def trees(tmp_path: Path) -> Trees:
    require("root")
    return Trees(tmp_path)


CASES = {
    "the linked file is changed here": ("echo x > b", "ln b a", "echo mine > b"),
    "the linked file is removed here": ("echo x > b", "ln b a", "rm b"),
    "the linked file has another mode here": ("echo x > b", "ln b a", "chmod 600 b"),
    "a link to a file outside": ("echo x > ../b", "ln ../b a", "echo mine > ../b"),
    "a name outside of a file that changed": ("echo x > ../b; ln ../b a", "echo new > a", "chmod 600 ../b"),
    "a link into .git": ("true", "mkdir .git; echo x > .git/x; ln .git/x a", "true"),
    "a link into a directory that is not here": ("mkdir ../d; echo x > ../d/b", "ln ../d/b a", "rm -r ../d"),
    "permissions of one of two names that are one file here": ("echo x > b", "chmod 600 b", "ln b mine"),
    "permissions here of one of two names that come": (
        "echo x > a; echo x > b",
        "echo new > a; ln -f a b",
        "chmod 700 a",
    ),
}
"""In /workspace of the base's root, and then, on copies of it, of the source's and the head's."""


@pytest.mark.parametrize("case", CASES)
def test_only_what_the_plan_lists_changes(trees: Trees, case: str) -> None:
    trees.make(*CASES[case])
    before = variety.manifest(trees.mine)
    plan, made = trees.merge()
    assert plan.conflicts == []
    listed = {b"workspace/" + item.path for item in plan.items}
    after = variety.manifest(made)
    assert listed
    assert untouched(after, listed) == untouched(before, listed)
    for item in plan.items:
        wanted = item.permissions if item.own_mode or not item.put else None
        theirs_has = (trees.theirs / "workspace" / os.fsdecode(item.path)).lstat().st_mode & 0o7777
        assert after[b"workspace/" + item.path].mode == (theirs_has if wanted is None else wanted)


def test_names_that_come_together_stay_one_file(trees: Trees) -> None:
    trees.make("true", "mkdir d; echo x > a; ln a d/b", "true")
    _, made = trees.merge()
    assert variety.manifest(made)[b"workspace/a"].links == (b"workspace/a", b"workspace/d/b")


@pytest.mark.parametrize(
    "item",
    [
        Item("added", b"workspace/missing/a", "file", None, put=True),
        Item("changed", b"workspace/missing/a", "file", None, put=False, permissions=0o600),
    ],
    ids=["take", "mode"],
)
def test_a_path_in_a_directory_that_is_not_there_is_refused(trees: Trees, item: Item[Present]) -> None:
    trees.make("true", "mkdir missing; echo x > missing/a", "true")
    with pytest.raises(UsageError, match=r"'missing'.*nothing was merged"):
        trees.write([item])


# -- any three trees, with git as the oracle -------------------------------------------------------------------------

LINES = "1\n2\n3\n4\n5\n6\n7\n"
CONTENTS = (LINES, LINES.replace("1", "one"), LINES.replace("7", "seven"), LINES.replace("1", "I"), "\0x", "\0y")
Leaf = tuple[int, int, int]
"""A file: its content, its permissions, and a link group (0: none); names with all three equal are one file. Or a
symbolic link, with 0 for permissions, to the digit."""
Files = dict[str, Leaf]

_LEAF = st.one_of(
    st.tuples(
        st.sampled_from((0, 0, 0, *range(len(CONTENTS)))),
        st.sampled_from((0o644, 0o644, 0o755)),
        st.sampled_from((1, 1, 1, 0)),
    ),
    st.tuples(st.integers(0, 1), st.just(0), st.just(0)),
)
_NAMES = st.sampled_from(("a", "b", "c", "d/a", "d/b", "a/x", "../o", "../d/p"))
_TREE = st.dictionaries(_NAMES, _LEAF, min_size=5, max_size=8)
_CHANGES = st.dictionaries(_NAMES, st.one_of(_LEAF, _LEAF, st.none()), min_size=2, max_size=4)


def changed(base: Files, changes: dict[str, Leaf | None]) -> Files:
    tree = {name: leaf for name, leaf in {**base, **changes}.items() if leaf is not None}
    return {name: leaf for name, leaf in tree.items() if name != "a" or "a/x" not in tree}


def lay_out(workspace: Path, files: Files) -> None:
    workspace.mkdir(parents=True)
    made: dict[Leaf, Path] = {}
    for name, leaf in files.items():
        path = workspace / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content, mode, group = leaf
        if not mode:
            path.symlink_to(str(content))
        elif group and leaf in made:
            os.link(made[leaf], path)
        else:
            path.write_text(CONTENTS[content])
            path.chmod(mode)
            made[leaf] = path


def inside(files: Files) -> Files:
    return {name: leaf for name, leaf in files.items() if not name.startswith("..")}


def merged_by_git(where: Path, base: Files, theirs: Files, mine: Files) -> dict[str, tuple[int, str]] | None:
    """Mode and blob of each path after `git merge`, or None for a conflict."""

    def commit(mark: int, branch: str, files: Files, parent: int | None) -> str:
        text = f"commit refs/heads/{branch}\nmark :{mark}\ncommitter t <t@t> 0 +0000\ndata 0\n"
        text += f"from :{parent}\ndeleteall\n" if parent else ""
        for name, (content, mode, _) in inside(files).items():
            data = CONTENTS[content] if mode else str(content)
            text += f"M {0o100000 | mode if mode else 0o120000:o} inline {name}\ndata {len(data)}\n{data}\n"
        return text + "\n"

    stream = commit(1, "base", base, None) + commit(2, "mine", mine, 1) + commit(3, "theirs", theirs, 1)
    git(where, "fast-import", "--quiet", "--force", data=stream.encode())
    git(where, "checkout", "--quiet", "--force", "--detach", "mine")
    git(where, "clean", "-dfqx")
    # The default strategy follows renames even if told not to (git 2.39).
    how = ("--strategy=recursive", "--strategy-option=no-renames")
    merge = ("merge", "--quiet", "--no-commit", "--no-ff", *how, "theirs")
    if git(where, *merge, fine=(0, 1))[0] == 1:
        return None
    found = {}
    for line in git(where, "ls-files", "--stage", "-z")[1].split("\0")[:-1]:
        about, name = line.split("\t")
        mode, blob, _ = about.split(" ")
        found[name] = (int(mode, 8), blob)
    return found


def git(where: Path, *args: str, data: bytes = b"", fine: tuple[int, ...] = (0,)) -> tuple[int, str]:
    """Its exit code, one of `fine`, and what it printed."""
    identity = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "core.autocrlf=false")
    done = subprocess.run(["git", "-C", str(where), *identity, *args], input=data, capture_output=True, check=False)
    assert done.returncode in fine, done.stderr
    return done.returncode, done.stdout.decode()


def as_git_sees(workspace: Path) -> dict[str, tuple[int, str]]:
    found = {}
    for path in workspace.rglob("*"):
        if path.is_symlink() or path.is_file():
            link = path.is_symlink()
            data = os.fsencode(os.readlink(path)) if link else path.read_bytes()
            mode = 0o120000 if link else 0o100755 if path.stat().st_mode & 0o100 else 0o100644
            blob = hashlib.sha1(b"blob %d\0%b" % (len(data), data), usedforsecurity=False).hexdigest()
            found[str(path.relative_to(workspace))] = (mode, blob)
    return found


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("oracle")
    git(where, "init", "--quiet")
    return where


@settings(max_examples=size(10, 300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(base=_TREE, theirs=_CHANGES, mine=_CHANGES)
def test_any_three_trees_merge_as_git_merges_them(
    repository: Path, base: Files, theirs: dict[str, Leaf | None], mine: dict[str, Leaf | None]
) -> None:
    """Contents and permissions as git has them; and of the whole root, links and names outside of /workspace included,
    only what the plan lists has changed."""
    require("root")
    base = changed(base, {})
    tree_theirs, tree_mine = changed(base, theirs), changed(base, mine)
    by_git = merged_by_git(repository, base, tree_theirs, tree_mine)
    with tempfile.TemporaryDirectory() as place:
        trees = Trees(Path(place))
        for root, files in ((trees.base, base), (trees.theirs, tree_theirs), (trees.mine, tree_mine)):
            (root / "workspace").rmdir()
            lay_out(root / "workspace", files)
        before = variety.manifest(trees.mine)
        plan, made = trees.merge()
        source = Folders(trees.base / "workspace", trees.theirs / "workspace")
        applied = apply(source, trees.mine / "workspace", dry_run=False)
        assert [item.path for item in applied.changes] == [item.path for item in plan.items] or applied.conflicts
        assert bool(applied.conflicts) == bool(plan.conflicts)
        if plan.conflicts:
            assert variety.manifest(trees.mine) == before
            # Where a name is a directory in one of the trees and not in another, git goes further.
            folders = {os.path.dirname(name) for files in (base, tree_theirs, tree_mine) for name in files}
            assert by_git is None or {os.fsdecode(conflict.path) for conflict in plan.conflicts} <= folders
            return
        assert by_git is not None
        listed = {b"workspace/" + item.path for item in plan.items}
        for root in (made, trees.mine):
            assert as_git_sees(root / "workspace") == by_git
            after = variety.manifest(root)
            assert untouched(after, listed) == untouched(before, listed)
        brought = [os.fsdecode(item.path) for item in plan.items if item.put and not (item.own_mode or item.merged)]
        for one, other in itertools.combinations(brought, 2):
            paths = [root / "workspace" / name for root in (trees.theirs, made) for name in (one, other)]
            if all(path.is_file() and not path.is_symlink() for path in paths):
                assert paths[0].samefile(paths[1]) == paths[2].samefile(paths[3])
