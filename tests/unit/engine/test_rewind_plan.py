"""The changes that a rewind of a folder may make, by whose the changes since are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from snapshotd.engine.folders.capture import TOP
from snapshotd.engine.folders.rewinding.plan import PERSON, FolderChanges, History, RewindPlan, plan
from snapshotd.engine.folders.rewinding.putting_back import relative
from snapshotd.trees.stack_view import StackView
from tests.capabilities import require


def planned(place: Path, head: dict[str, str], to: dict[str, str], changes: FolderChanges, *ignored: str) -> RewindPlan:
    require("root")
    fds = []
    for name, files in (("head", head), ("to", to)):
        (place / name / os.fsdecode(TOP)).mkdir(parents=True)
        for path, text in files.items():
            (place / name / os.fsdecode(TOP) / path).write_text(text)
        fds.append(os.open(place / name, os.O_RDONLY))
    history = History()
    history.add(changes)
    try:
        with StackView(fds[:1]) as before, StackView(fds[1:]) as after:
            return plan(before, after, history, {"s-1"}, ignored)
    finally:
        for fd in fds:
            os.close(fd)


@pytest.mark.parametrize("edited", [set(), {"old"}, {"new"}])
def test_a_renamed_file_goes_back_as_a_whole_or_not_at_all(tmp_path: Path, edited: set[str]) -> None:
    """A person wrote `old` since the target, and an agent renamed it: its content is under the new name alone."""
    made = FolderChanges({"s-1": {"old", "new"}}, edited, {("old", "new")})
    found = planned(tmp_path, {"new": "a person's"}, {}, made)
    assert [relative(change) for change in found.changes] == ([] if edited else [b"new"])
    assert list(found.left) == ([b"new"] if edited else [])


def test_a_database_goes_back_with_its_log_or_not_at_all(tmp_path: Path) -> None:
    head, to = {"a.db": "2", "a.db-wal": "2", "b.db": "2", "c.db": "2"}, {"a.db": "1", "b.db": "1", "c.db": "1"}
    made = FolderChanges({"s-1": {"a.db", "a.db-wal", "b.db", "c.db"}}, {"a.db-wal"})
    found = planned(tmp_path, head, to, made, "b.db-wal")
    assert [relative(change) for change in found.changes] == [b"c.db"]
    assert sorted(found.left) == [b"a.db", b"a.db-wal", b"b.db"]


@pytest.mark.parametrize("owner", [PERSON, "s-2"])
def test_a_path_with_another_owner_stays(tmp_path: Path, owner: str) -> None:
    changes = FolderChanges({"s-1": {"a", "b"}})
    changes.add({owner}, b"b")
    found = planned(tmp_path, {"a": "2", "b": "2", "c": "2"}, {"a": "1", "b": "1", "c": "1"}, changes)
    assert [relative(change) for change in found.changes] == [b"a"]
    assert list(found.left) == [b"b"]


def test_a_record_of_any_length_is_read_back() -> None:
    changes = FolderChanges({"s-1": {f"made {n}" for n in range(5000)}}, {"edited"}, {("a", "b")})
    assert FolderChanges.of(changes.record(7)) == changes
