"""A folder is changed as a whole or not at all: errors at every step, and kills at every step with what the next apply
makes of it."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from snapshotd import failpoints
from snapshotd.client.apply import host_change
from snapshotd.client.apply.apply import apply
from snapshotd.client.apply.host_change import STAGING
from snapshotd.errors import Conflict, NotPermitted, UsageError
from tests.unit.client.folders import Folders, Rig

BASE: dict[str, object] = {
    "changed": b"before",
    "gone": b"g",
    "dir-goes/a": b"a",
    "dir-goes/b": b"b",
    "to-file/a": b"a",
    "to-dir": b"f",
    "link": "changed",
    "mode": b"m",
}
SNAPSHOT: dict[str, object] = {
    "changed": b"after",
    "to-file": b"f",
    "to-dir/new": b"n",
    "link": "gone",
    "mode": (b"m", 0o755),
    "new/a": b"a",
    "new/b": "a",
}
OLD: dict[str, object] = {**BASE, "dir-goes": None, "to-file": None, "mine": b"mine"}
NEW: dict[str, object] = {**SNAPSHOT, "to-dir": None, "new": None, "mine": b"mine"}
STEPS = 18
"""Five take away what is deleted, four what is replaced, eight put something in its place, and one changes a mode."""


@pytest.fixture(autouse=True)
def _own_records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def records() -> list[Path]:
    return list((Path(os.environ["XDG_STATE_HOME"]) / "snapshotd" / "applies").iterdir())


def name_of(record: Path) -> str:
    return os.fsdecode(STAGING) + record.stem


def staging_of(folder: Path) -> Path:
    (found,) = folder.glob(os.fsdecode(STAGING) + "*")
    return found


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    rig = Rig(tmp_path)
    rig.prepare(BASE, SNAPSHOT, {**BASE, "mine": b"mine"})
    return rig


def kill_at(rig: Rig, failpoint: str) -> None:
    """An apply in a process of its own that dies there."""
    child = os.fork()
    if child == 0:
        name, _, count = failpoint.partition(":")
        failpoints._armed, failpoints._left = name, int(count or 1)
        try:
            rig.apply()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == failpoints.EXIT_CODE


def raise_at(monkeypatch: pytest.MonkeyPatch, name: str, count: int, error: BaseException) -> None:
    hits = 0

    def hit(reached: str) -> None:
        nonlocal hits
        hits += reached == name
        if reached == name and hits == count:
            raise error

    monkeypatch.setattr(host_change, "hit", hit)


def test_the_steps_are_counted_right(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(host_change, "hit", seen.append)
    rig.apply()
    assert rig.result() == NEW
    assert seen.count("client.apply.step") == STEPS
    named = {name for name in failpoints.NAMES if name.startswith("client.apply.")}
    assert named - set(seen) == {"client.apply.undo"}


@pytest.mark.parametrize("error", [OSError(5, "broken"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
@pytest.mark.parametrize(
    ("point", "count"),
    [
        *((name, 1) for name in ("client.apply.staged", "client.apply.placed", "client.apply.counts")),
        *(("client.apply.step", n + 1) for n in range(STEPS)),
    ],
)
def test_an_error_at_any_step_leaves_the_folder_as_it_was(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, point: str, count: int, error: BaseException
) -> None:
    inodes = {name: os.lstat(rig.here / name).st_ino for name in OLD}
    raise_at(monkeypatch, point, count, error)
    expected = (UsageError, OSError) if isinstance(error, OSError) else type(error)
    with pytest.raises(expected, match="broken" if isinstance(error, OSError) else None):
        rig.apply()
    assert rig.result() == OLD
    assert {name: os.lstat(rig.here / name).st_ino for name in OLD} == inodes, "the very same files, not copies"


@pytest.mark.parametrize(
    ("failpoint", "counts"),
    [
        ("client.apply.staged", False),
        *((f"client.apply.step:{n + 1}", False) for n in range(STEPS)),
        ("client.apply.placed", False),
        ("client.apply.counts", True),
        ("client.apply.done", True),
    ],
)
def test_a_kill_at_any_step_is_old_or_new(rig: Rig, failpoint: str, counts: bool) -> None:
    """The next apply begins with what was there before, or finds everything done."""
    kill_at(rig, failpoint)
    assert staging_of(rig.here).is_dir()
    done = apply(Folders(rig.directory / "base", rig.directory / "base"), rig.here, dry_run=False)
    assert rig.result() == (NEW if counts else OLD)
    assert ("cut off" in "".join(done.warnings)) == (not counts and failpoint != "client.apply.staged")
    again = rig.apply()
    assert again.conflicts == ()
    assert rig.result() == NEW


@pytest.mark.parametrize("count", range(1, STEPS + 2))
def test_undoing_may_be_cut_off_too(rig: Rig, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    kill_at(rig, "client.apply.placed")
    raise_at(monkeypatch, "client.apply.undo", count, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        rig.apply()
    monkeypatch.setattr(host_change, "hit", failpoints.hit)
    rig.apply()
    assert rig.result() == NEW


def test_a_preview_does_not_repair(rig: Rig) -> None:
    kill_at(rig, "client.apply.step:6")
    before = rig.result()
    with pytest.raises(Conflict, match="apply without a dry run"):
        rig.apply(dry_run=True)
    assert rig.result() == before


def change_new(rig: Rig) -> None:
    (rig.here / "changed").write_bytes(b"the user's, written after the kill")


def fill_gone(rig: Rig) -> None:
    (rig.here / "gone").write_bytes(b"the user's")


@pytest.mark.parametrize("meanwhile", [change_new, fill_gone])
def test_what_somebody_made_of_a_half_applied_folder_is_not_undone(rig: Rig, meanwhile: Callable[[Rig], None]) -> None:
    kill_at(rig, "client.apply.placed")
    meanwhile(rig)
    before = rig.result()
    with pytest.raises(Conflict, match="cannot be undone"):
        rig.apply()
    assert rig.result() == before


def test_a_file_in_a_new_directory_stays_when_that_is_undone(rig: Rig) -> None:
    kill_at(rig, "client.apply.placed")
    (rig.here / "new" / "mine").write_bytes(b"mine")
    rig.apply()
    assert rig.result() == {**NEW, "new/mine": b"mine"}


@pytest.mark.parametrize(
    ("name", "meanwhile"),
    [
        ("changed", lambda here: (here / "changed").write_bytes(b"newer")),
        ("gone", lambda here: (here / "gone").write_bytes(b"newer")),
        ("mode", lambda here: (here / "mode").chmod(0o600)),
        ("new", lambda here: (here / "new").write_bytes(b"newer")),
        ("to-file", lambda here: (here / "to-file" / "mine").write_bytes(b"newer")),
        ("dir-goes", lambda here: (here / "dir-goes" / "mine").write_bytes(b"newer")),
    ],
)
def test_a_folder_that_changes_meanwhile_is_left_alone(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, name: str, meanwhile: Callable[[Path], object]
) -> None:
    """After everything was decided, and before the first step."""
    theirs: list[dict[str, object]] = []

    def hit(reached: str) -> None:
        if reached == "client.apply.staged":
            meanwhile(rig.here)
            staging = staging_of(rig.here).rename(rig.directory / "aside")
            theirs.append(rig.result())
            staging.rename(rig.here / name_of(records()[0]))

    monkeypatch.setattr(host_change, "hit", hit)
    with pytest.raises(Conflict, match=f"'{name}' in .* changed while"):
        rig.apply()
    assert [rig.result()] == theirs
    assert theirs != [OLD]


def a_step(path: bytes, name: str) -> dict[str, object]:
    stamp = {"mode": 0, "inode": 0, "size": 0, "mtime_ns": 0}
    return {"op": "take", "path": base64.b64encode(path).decode(), "name": name, "mode": 0, "stamp": stamp}


@pytest.mark.parametrize("name", [".snapshotd-apply", ".snapshotd-apply-" + "0" * 32])
def test_a_journal_that_came_with_the_folder_is_not_obeyed(rig: Rig, name: str) -> None:
    """It could put a hook of git's, or any other program, in place."""
    staging = rig.here / name
    (rig.here / ".git" / "hooks").mkdir(parents=True)
    staging.mkdir()
    (staging / "o0").write_bytes(b"#!/bin/sh")
    (staging / "journal").write_text(json.dumps([a_step(b".git/hooks/pre-commit", "o0")]))
    done = rig.apply()
    assert done.conflicts == ()
    assert os.listdir(rig.here / ".git" / "hooks") == []
    assert sorted(os.listdir(staging)) == ["journal", "o0"]
    warned = "left alone" in "".join(done.warnings)
    assert warned == (name != ".snapshotd-apply")


@pytest.mark.parametrize(
    "text", ["", "{", "{}x", "[]", "{}", a_step(b"../x", "o0"), a_step(b"x", "../x"), a_step(b"x", "")]
)
def test_a_record_that_is_damaged_is_not_believed(rig: Rig, text: str | dict[str, object]) -> None:
    kill_at(rig, "client.apply.placed")
    (record,) = records()
    inode = os.stat(rig.here).st_ino
    record.write_text(text if isinstance(text, str) else json.dumps({"folder": "", "inode": inode, "steps": [text]}))
    before = rig.result()
    with pytest.raises(Conflict, match="no record of an apply"):
        rig.apply()
    assert rig.result() == before


def test_a_record_is_of_one_folder(rig: Rig) -> None:
    """A copy of a half-applied folder, as a sandbox may have one, is not undone by it, and the folder itself still is."""
    kill_at(rig, "client.apply.placed")
    half, rig.here = rig.here, rig.directory / "copy"
    subprocess.run(["cp", "-a", half, rig.here], check=True)
    before = set(os.listdir(rig.here))
    done = rig.apply()
    assert "left alone" in "".join(done.warnings)
    assert set(os.listdir(rig.here)) == before
    rig.here = half
    assert "has been undone" in "".join(rig.apply().warnings)
    assert rig.result() == NEW
    assert records() == []


def test_a_folder_that_was_moved_is_undone(rig: Rig) -> None:
    kill_at(rig, "client.apply.placed")
    rig.here = rig.here.rename(rig.directory / "moved")
    assert "has been undone" in "".join(rig.apply().warnings)
    assert rig.result() == NEW


def test_what_was_put_in_the_place_of_an_old_file_is_not_brought_back(rig: Rig) -> None:
    kill_at(rig, "client.apply.placed")
    (staged,) = (path for path in staging_of(rig.here).iterdir() if path.name == "o0")
    staged.rename(rig.directory / "real")
    staged.write_bytes(b"somebody's")
    with pytest.raises(Conflict, match="cannot be undone"):
        rig.apply()


def test_a_record_that_is_left_without_its_files_goes(rig: Rig) -> None:
    """The user has removed them, to keep the folder as it is."""
    kill_at(rig, "client.apply.placed")
    subprocess.run(["rm", "-r", staging_of(rig.here)], check=True)
    (rig.here / "changed").write_bytes(b"before")
    rig.apply()
    assert records() == []


def test_records_cannot_be_kept_where_another_user_writes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(rig.directory / "open"))
    (rig.directory / "open" / "snapshotd" / "applies").mkdir(parents=True)
    (rig.directory / "open" / "snapshotd" / "applies").chmod(0o777)
    with pytest.raises(NotPermitted, match="others can write"):
        rig.apply()
    monkeypatch.setenv("XDG_STATE_HOME", str(rig.here / "mine"))
    with pytest.raises(UsageError, match="XDG_STATE_HOME"):
        rig.apply()
    assert rig.result() == OLD


def test_a_staging_directory_that_is_a_link_is_not_followed(rig: Rig) -> None:
    outside = rig.directory / "outside"
    outside.mkdir()
    (outside / "file").touch()
    (rig.here / (os.fsdecode(STAGING) + "0" * 32)).symlink_to("../outside")
    rig.apply()
    assert os.listdir(outside) == ["file"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_leftovers_are_not_touched(rig: Rig) -> None:
    staging = rig.here / (os.fsdecode(STAGING) + "0" * 32)
    staging.mkdir()
    os.chown(staging, 1, 1)
    with pytest.raises(NotPermitted, match="another user"):
        rig.apply()
    assert staging.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_root_applies_belongs_to_the_folders_owner(rig: Rig) -> None:
    os.chown(rig.here, 1001, 1002)
    os.chown(rig.here / "changed", 1003, 1004)
    rig.apply()
    owners = {name: (os.lstat(rig.here / name).st_uid, os.lstat(rig.here / name).st_gid) for name in NEW}
    assert owners["changed"] == (1003, 1004)
    assert {owners[name] for name in ("new", "new/a", "new/b", "to-dir/new")} == {(1001, 1002)}
