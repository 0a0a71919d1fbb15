"""Merging one branch into another: lines of texts, and a stated outcome for everything else, in one step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from snapshotd.client import Snapshotd
from snapshotd.errors import Conflict, UsageError
from tests import long
from tests.e2e.support import Snap, wait_until

BASE = r"""
seq 20 > text; seq 20 > twice; printf 'a\0b' > binary; echo x > mode; echo x > both; echo x > gone; echo x > kept
mkdir -p dir/deep; echo x > dir/one; echo x > dir/deep/two; ln -s text link; echo x > old; echo x > shared; ln shared other
mkdir -p swap tree; echo x > swap/in; echo x > plain; echo x > tree/a; chmod 600 mode; chown 7:8 kept
"""


class Pair:
    """A base state, `mine` and `theirs`, forked from it."""

    def __init__(self, snap: Snap, runtime: str) -> None:
        self.snap = snap
        self.box, _ = snap.create("--runtime", runtime)
        snap.sh(self.box, BASE)
        self.mine, self.theirs = snap.json("fork", self.box, "--n", "2")["trajectories"]

    def change(self, mine: str, theirs: str) -> None:
        self.snap.sh(self.mine, mine)
        self.snap.sh(self.theirs, theirs)

    def merge(self, *words: str, code: int = 0) -> dict[str, Any]:
        done: dict[str, Any] = self.snap.json("merge", *words, self.theirs, self.mine, code=code)
        return done

    def log(self) -> list[tuple[str, str]]:
        return [(one["id"], one["tool"]["name"]) for one in self.snap.json("log", self.mine)]

    def sh(self, script: str) -> str:
        return str(self.snap.sh(self.mine, script)["stdout"])


@pytest.fixture
def pair(snap: Snap, runtime: str) -> Iterator[Pair]:
    made = Pair(snap, runtime)
    yield made
    for each in (made.mine, made.theirs, made.box):
        snap("rm", "--force", each, code=None)


def test_changes_of_both_sides_are_kept_in_one_step(pair: Pair) -> None:
    pair.change(
        "sed -i 's/^1$/one/' text; chmod 755 plain; echo mine > new-mine; chmod 640 twice",
        "sed -i 's/^20$/twenty/' text; echo y > twice; echo y > mode; chmod 4755 mode; rm gone; mv old renamed; rm -r dir/deep;"
        " mkdir -p fresh/deep; echo y > fresh/deep/file; ln -sfn /etc/passwd link; echo y > kept; rm -r swap; echo y > swap;"
        " rm plain && echo x > plain; rm shared other; echo y > shared; ln shared other; mkfifo pipe; rm -r tree; ln -s dir tree",
    )
    assert pair.snap.sh(pair.theirs, "cat shared other; stat -c %h shared")["stdout"] == "y\ny\n2\n"
    before = pair.log()
    preview = pair.merge("--dry-run")
    assert pair.log() == before
    done = pair.merge()
    assert done["changes"] == preview["changes"]
    assert done["conflicts"] == []
    changes = {item["path"]: (item["change"], item["merged"]) for item in done["changes"]}
    assert changes["text"] == ("changed", True)
    assert (changes["old"], changes["renamed"]) == (("deleted", False), ("added", False))
    assert any("fifo is not brought" in warning for warning in done["warnings"])
    assert pair.log() == [*before, (done["snapshot"], "merge")]
    assert (
        pair.sh("head -1 text; tail -1 text; cat twice kept fresh/deep/file swap new-mine")
        == "one\ntwenty\ny\ny\ny\ny\nmine\n"
    )
    assert pair.sh("stat -c %a mode plain twice") == "4755\n755\n640\n", "permissions of both sides"
    assert pair.sh("stat -c %u:%g kept") == "7:8\n", "owners come along"
    assert pair.sh("readlink link tree; cat shared other; stat -c %h shared") == "/etc/passwd\ndir\ny\ny\n2\n"
    assert pair.sh("ls dir") == "one\n"
    assert pair.sh("test -e gone || test -e old || test -e pipe || test -e dir/deep || echo none") == "none\n"
    pair.snap("rewind", "--yes", pair.mine, done["snapshot"])
    pair.snap("undo", pair.mine)


@pytest.mark.long  # in another command: unit/cli
def test_a_relative_path_begins_at_the_workspace(pair: Pair) -> None:
    """As in every other command."""
    pair.change("true", "echo y > dir/one; echo y > both; mkdir /dir; echo z > /dir/top")
    listed = [pair.merge("--dry-run", "--path", path)["changes"] for path in ("dir", "./dir/", "/workspace/dir")]
    assert [[change["path"] for change in one] for one in listed] == [["one"]] * 3
    assert [change["path"] for change in pair.merge("--dry-run", "--path", "/dir")["changes"]] == ["top"]
    for path in ("../dir", "nowhere"):
        refused = pair.snap("merge", pair.theirs, pair.mine, "--path", path, code=None)
        assert (refused.returncode, path in refused.stderr) == ({"../dir": 2, "nowhere": 4}[path], True), refused.stderr


def test_undo_takes_a_merge_back_and_the_mind_goes_on(pair: Pair) -> None:
    pair.change("echo mine > a", "echo theirs > b")
    before = pair.snap.manifest(pair.mine)
    head = pair.snap.json("show", pair.mine)["id"]
    pair.merge()
    assert pair.sh("cat a b") == "mine\ntheirs\n"
    again = pair.merge()
    assert (again["changes"], again["same"], again["snapshot"]) == ([], 1, None)
    assert "there is nothing to merge" in pair.snap("merge", pair.theirs, pair.mine).stderr
    pair.snap("rewind", "--yes", pair.mine, head)
    pair.merge()
    pair.snap("undo", pair.mine)
    assert pair.snap.manifest(pair.mine) == before


@pytest.mark.runc
@pytest.mark.parametrize(
    ("mine", "theirs", "path", "reason"),
    long.some(
        [
            ("sed -i s/1/one/ text", "sed -i s/1/eins/ text", "text", "same lines"),
            ("printf 'a\\0c' > binary", "printf 'a\\0d' > binary", "binary", "no text"),
            ("chmod 700 both", "chmod 644 both; chmod 711 both", "both", "permissions changed on both sides"),
            ("rm gone", "echo y > gone", "gone", "changed in the snapshot, deleted here"),
            ("echo y > gone", "rm gone", "gone", "deleted in the snapshot, changed here"),
            ("mv old mine", "echo y > old", "old", "changed in the snapshot, deleted here"),
            ("ln -sfn mine link", "ln -sfn theirs link", "link", "and changed here"),
            ("echo y > swap/more", "rm -r swap; echo y > swap", "swap", "directory here with files"),
            ("rm -r swap; echo y > swap", "echo y > swap/more", "swap/more", "swap is a file here"),
            ("echo mine > new", "echo theirs > new", "new", "here is a file that it never knew"),
            ("rm plain; mkdir plain", "echo y > plain", "plain", "a directory here"),
        ],
        3,
    ),
)
def test_what_excludes_each_other_is_a_conflict_and_merges_nothing(
    snap: Snap, mine: str, theirs: str, path: str, reason: str
) -> None:
    pair = Pair(snap, "runc")
    pair.change(mine, theirs + "; echo more > also")
    before = pair.log()
    done = pair.merge(code=Conflict.exit_code)
    assert [item["path"] for item in done["conflicts"]] == [path]
    assert reason in done["conflicts"][0]["reason"]
    assert done["snapshot"] is None
    assert pair.log() == before
    assert "nothing was merged" in snap("merge", pair.theirs, pair.mine, code=Conflict.exit_code).stderr
    for each in (pair.mine, pair.theirs, pair.box):
        snap("rm", "--force", each)


@pytest.mark.runc
def test_what_is_not_merged(snap: Snap) -> None:
    pair = Pair(snap, "runc")
    pair.change("echo mine > a", "echo theirs > b")
    other, _ = snap.create("--runtime", "runc")
    assert "nothing in common" not in snap("merge", pair.theirs, pair.mine, "--dry-run").stderr
    refused = snap("merge", other, pair.mine, code=UsageError.exit_code).stderr
    assert "no snapshot in common" in refused
    snap("merge", pair.theirs, other, "--base", pair.box, code=None)
    client = Snapshotd(state_dir=snap.state_dir, autostart=False)
    client.exec_in_background(pair.mine, ["sh", "-c", "echo late > late; exec sleep 1000"])
    wait_until(lambda: "late" in [one.name for one in client.list_files(pair.mine, "/workspace")], "it has written")
    with pytest.raises(Conflict, match="has changed since it was compared"):
        client.merge(pair.theirs, pair.mine)  # the command ends for the merge, with a snapshot
    assert [change.path for change in client.merge(pair.theirs, pair.mine).changes] == [b"b"]
    pair.snap("undo", pair.mine)
    snap.sh(pair.mine, "sleep 1000 >/dev/null 2>&1 & echo started")
    assert "stop it first" in snap("merge", pair.theirs, pair.mine, code=Conflict.exit_code).stderr
    for each in (pair.mine, pair.theirs, pair.box, other):
        snap("rm", "--force", each)
