"""Another user of the machine against root's snapshots and the daemon's life, through the hooks' socket, folders, names,
links, paths below /proc and slow connections: nothing is read, nothing is replaced, and the API answers meanwhile."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.daemon.http.wire import hook_socket_of
from tests.e2e.support import Snap
from tests.leftovers import nothing_left
from tests.stranger import NOBODY, Stranger


@pytest.fixture(scope="module")
def snap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Snap]:
    found = Snap(tmp_path_factory.mktemp("h") / "state")
    found("ls")
    yield found
    found.stop_daemon()
    nothing_left(found.state_dir, running=False)


@pytest.fixture
def stranger(snap: Snap) -> Iterator[Stranger]:
    found = Stranger(hook_socket_of(snap.state_dir))
    yield found
    found.close()


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user may write to."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        os.chmod(name, 0o777)
        yield Path(name)


def folder_of(place: Path, name: str, uid: int, content: str) -> Path:
    """A folder of a user, with one file."""
    folder = place / name
    folder.mkdir()
    (folder / "file").write_text(content)
    for path in (folder, folder / "file"):
        os.chown(path, uid, uid)
    return folder


@pytest.fixture
def theirs(place: Path, stranger: Stranger) -> Path:
    """A folder of the stranger that the daemon knows."""
    folder = folder_of(place, "theirs", NOBODY, "theirs")
    assert stranger.hook(folder, "SessionStart") == (0, "")
    return folder


@pytest.fixture
def mine(snap: Snap, place: Path) -> Iterator[str]:
    """The newest snapshot of a folder of root's."""
    root = Stranger(hook_socket_of(snap.state_dir), 0)
    folder = folder_of(place, "mine", 0, "root's\n")
    assert root.hook(folder, "SessionStart") == (0, "")
    yield newest(snap, folder)
    root.close()


def newest(snap: Snap, folder: Path) -> str:
    """The head of a folder's trajectory."""
    (head,) = [
        line["head"]
        for line in snap.json("ls")
        if snap.json("log", "--all", line["id"])[0]["tool"]["arguments"].get("folder") == str(folder)
    ]
    return str(head)


# -- names -------------------------------------------------------------------------------------------------------------


def test_an_answer_tells_nothing_of_others_snapshots(mine: str, theirs: Path, stranger: Stranger) -> None:
    wrong = mine[:-1] + ("0" if mine[-1] != "0" else "1")
    for options in (["--dry-run"], []):
        found = {
            stranger.ask(theirs, "rewind", *options, ref)[1].replace(ref, "REF")
            for ref in (mine, wrong, mine[:8], wrong[:7], "0" * 32, "mine", "nothing")
        }
        assert found == {"snapshotd: there is no snapshot 'REF' of this folder; its log lists them\n"}


def test_a_name_of_a_user_stands_for_no_snapshot_of_roots(
    snap: Snap, mine: str, theirs: Path, stranger: Stranger, place: Path
) -> None:
    for name in (mine, mine[:12], mine[:4]):
        code, text = stranger.ask(theirs, "checkpoint", name)
        assert (code, "taken for an id" in text) == (2, True)
        folder = folder_of(place, name, NOBODY, "theirs")
        assert stranger.hook(folder, "SessionStart") == (0, "")
    assert snap("cat", f"{mine}:/workspace/file").stdout == "root's\n"
    assert snap("cat", f"{mine[:12]}:/workspace/file").stdout == "root's\n"


def test_names_of_a_users_folder_are_the_users_own(
    snap: Snap, mine: str, theirs: Path, stranger: Stranger, place: Path
) -> None:
    other = Stranger(hook_socket_of(snap.state_dir), NOBODY - 1)
    theirs_too = folder_of(place, "theirs-too", NOBODY - 1, "other")
    assert other.hook(theirs_too, "SessionStart") == (0, "")
    snap("tag", mine, "before")
    for one, folder in ((stranger, theirs), (other, theirs_too)):
        code, text = one.ask(folder, "checkpoint", "before")
        assert (code, text.endswith(" is before\n")) == (0, True)
        assert one.ask(folder, "rewind", "--dry-run", "before")[0] == 0
        assert "  before\n" in one.ask(folder, "log")[1]
    other.close()
    contents = [
        snap("cat", f"{ref}:/workspace/file").stdout for ref in ("before", f"before@{NOBODY}", f"theirs@{NOBODY}")
    ]
    assert contents == ["root's\n", "theirs", "theirs"]
    snap("tag", mine, f"x@{NOBODY}", code=2)
    snap("tag", "--delete", f"before@{NOBODY}")
    assert stranger.ask(theirs, "rewind", "--dry-run", "before")[0] == 4
    snap("tag", "--delete", "before")
