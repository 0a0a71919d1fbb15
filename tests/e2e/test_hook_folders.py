"""A folder in which an agent works is the same one after it was moved, and another one at its path is not."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from snapshotd.api.wire import hook_socket_of
from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.kernel.mounts import born_at
from tests import long
from tests.capabilities import require
from tests.e2e.support import Snap
from tests.loop_disk import make_image
from tests.stranger import Stranger


@pytest.fixture
def agent(empty_snap: Snap) -> Iterator[Stranger]:
    """An agent of root's."""
    found = Stranger(hook_socket_of(empty_snap.state_dir), 0)
    yield found
    found.close()
    for line in empty_snap.json("ls"):
        empty_snap("rm", "--force", line["id"])


def begin(agent: Stranger, folder: Path, content: str = "old\n") -> None:
    folder.mkdir()
    (folder / "file").write_text(content)
    assert agent.hook(folder, "SessionStart") == (0, "")


def call(agent: Stranger, folder: Path, content: str) -> None:
    """A call that writes the file."""
    assert agent.hook(folder, "PreToolUse", tool_use_id="t") == (0, "")
    (folder / "file").write_text(content)
    assert agent.hook(folder, "PostToolUse", tool_use_id="t", tool_response={}) == (0, "")


def lines(empty_snap: Snap) -> dict[str, list[str]]:
    """The names of the trajectories, and each one's calls."""
    return {
        line["name"]: [step["tool"]["name"] for step in empty_snap.json("log", "--all", line["id"])]
        for line in empty_snap.json("ls")
    }


def test_another_project_at_the_path_is_not_overwritten(empty_snap: Snap, agent: Stranger, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    begin(agent, folder)
    call(agent, folder, "by the agent\n")
    _, begun, called = empty_snap.json("log", "--all", "project")
    folder.rename(tmp_path / "away")
    folder.mkdir()
    (folder / "file").write_text("another project\n")
    (folder / "more").write_text("another project\n")
    for command in (("rewind", "--files", "project", begun["id"]), ("undo", "project")):
        assert "another folder by now" in empty_snap(*command, code=6).stderr
    assert agent.ask(folder, "rewind", "--files", begun["id"])[0] == 4
    assert agent.ask(folder, "undo")[0] == 4
    assert lines(empty_snap) == {"project": ["start", "edits", "Bash"]}, "nothing has begun either"
    assert agent.hook(folder, "SessionStart") == (0, "")
    call(agent, folder, "more of it\n")
    assert lines(empty_snap) == {"project": ["start", "edits", "Bash"], "project-2": ["start", "edits", "Bash"]}
    assert (folder / "more").read_text() == "another project\n"
    assert empty_snap("cat", f"{called['id']}:/workspace/file").stdout == "by the agent\n"


def test_a_folder_that_was_moved_is_the_same_one(empty_snap: Snap, agent: Stranger, tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    begin(agent, folder)
    folder.rename(elsewhere)
    call(agent, elsewhere, "new\n")
    assert lines(empty_snap) == {"project": ["start", "edits", "Bash"]}
    empty_snap("rewind", "--files", "project", empty_snap.json("log", "--all", "project")[1]["id"])
    assert (elsewhere / "file").read_text() == "old\n"
    empty_snap.stop_daemon()
    empty_snap("undo", "project")
    assert (elsewhere / "file").read_text() == "new\n"
    shutil.copytree(elsewhere, folder)
    assert agent.hook(folder, "SessionStart") == (0, "")
    assert list(lines(empty_snap)) == ["project", "project-2"], "a copy is another one"


def test_a_link_on_the_way_to_a_folder_is_not_followed(empty_snap: Snap, agent: Stranger, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    begin(agent, tmp_path / "a" / "project")
    call(agent, tmp_path / "a" / "project", "new\n")
    begun = empty_snap.json("log", "--all", "project")[1]["id"]
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "a").symlink_to(tmp_path / "b")
    assert "cannot be opened" in empty_snap("rewind", "--files", "project", begun, code=4).stderr
    assert (tmp_path / "b" / "project" / "file").read_text() == "new\n"


@pytest.mark.parametrize("name", long.some([b"\xff\xfe", b"gone (deleted)", "Ärger".encode()], 1))
def test_a_folder_of_any_name(empty_snap: Snap, agent: Stranger, tmp_path: Path, name: bytes) -> None:
    folder = tmp_path / os.fsdecode(name)
    begin(agent, folder)
    call(agent, folder, "new\n")
    (trajectory,) = [line["id"] for line in empty_snap.json("ls")]
    begun = empty_snap.json("log", "--all", trajectory)[1]["id"]
    empty_snap("rewind", "--files", trajectory, begun)
    assert (folder / "file").read_text() == "old\n"
    assert agent.ask(folder, "undo")[0] == 0
    assert (folder / "file").read_text() == "new\n"


def test_a_folder_that_is_gone_begins_nothing(empty_snap: Snap, agent: Stranger, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    begin(agent, folder)
    assert agent(f"globals().update(kept=os.open({str(folder)!r}, 0))") is None
    shutil.rmtree(folder)
    code, text = agent("ask(['hook', 'claude'], f'/proc/self/fd/{kept}', '{\"hook_event_name\": \"SessionStart\"}')")
    assert (code, "does not exist any more" in text) == (4, True)


@pytest.mark.long  # what older versions wrote: tests/golden
def test_a_folder_that_an_older_version_knew_by_its_path(empty_snap: Snap, agent: Stranger, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    begin(agent, folder)
    (line,) = empty_snap.json("ls")
    empty_snap.stop_daemon()
    catalog = SqliteCatalog(empty_snap.state_dir / "catalog.db")
    with catalog._db.transaction():
        assert catalog._db.write("DELETE FROM meta WHERE key LIKE 'folder-identity/%' OR key LIKE 'folder-path/%'")
    catalog.set_meta(f"folder/0/{folder}", line["id"])
    catalog.close()
    empty_snap("ls")
    call(agent, folder, "new\n")
    assert lines(empty_snap) == {"project": ["start", "edits", "Bash"]}
    folder.rename(tmp_path / "away")
    begin(agent, folder)
    assert list(lines(empty_snap)) == ["project", "project-2"]


def without_file_system(snap: Snap, trajectory: str) -> None:
    """Have the catalog know a folder as an older version did."""
    snap.stop_daemon()
    catalog = SqliteCatalog(snap.state_dir / "catalog.db")
    with catalog._db.transaction():
        # folder-identity/UID/INODE.TIME.SYSTEM
        assert catalog._db.write(
            "UPDATE OR REPLACE meta SET key = rtrim(rtrim(key, '0123456789abcdef'), '.') "
            "WHERE key LIKE 'folder-identity/%.%.%' AND value = ?",
            (trajectory,),
        )
    catalog.close()
    snap("ls")


@contextmanager
def mounted(image: Path, at: Path) -> Iterator[int]:
    """A descriptor of an image's root."""
    subprocess.run(["mount", "-o", "loop", str(image), str(at)], check=True)
    try:
        root = os.open(at, os.O_RDONLY)
        try:
            yield root
        finally:
            os.close(root)
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


@pytest.mark.long  # that is told: test_hook_disks.py
@pytest.mark.parametrize("is_older", long.some([False, True], 1))
@pytest.mark.parametrize(
    "kind", ["ext4", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("xfs", "btrfs"))]
)  # only ext4 gives both roots the same time
def test_another_disk_at_the_path_is_another_folder(
    empty_snap: Snap, agent: Stranger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_older: bool
) -> None:
    """Two file systems that were made in one second, so that inode and time of their roots are equal. One that comes
    back on another device is known. `is_older`: the first one was known without its file system."""
    require("root")
    monkeypatch.setenv("E2FSPROGS_FAKE_TIME", "1700000000")
    one, other = tmp_path / "one", tmp_path / "other"
    for image in (one, other):
        make_image(image, kind, (320 if kind == "xfs" else 120) << 20)
    folder, born, begun = tmp_path / "mnt", set(), ""
    folder.mkdir()
    for image in (one, other, one):
        with mounted(image, folder) as root, ExitStack() as held:
            empty_snap("ls")
            held.callback(empty_snap.stop_daemon)  # it has the folder open
            born.add((os.fstat(root).st_ino, born_at(root)))
            if image is other:
                (folder / "file").write_text("on another disk\n")
                assert agent.ask(folder, "rewind", "--files", begun)[0] == 4
                assert "another folder by now" in empty_snap("rewind", "--files", "mnt", begun, code=6).stderr
                assert (folder / "file").read_text() == "on another disk\n"
            elif not (folder / "file").exists():
                (folder / "file").write_text("old\n")
                assert agent.hook(folder, "SessionStart") == (0, "")
                call(agent, folder, "by the agent\n")
                begun = empty_snap.json("log", "--all", "mnt")[1]["id"]
                if is_older:
                    without_file_system(empty_snap, empty_snap.json("ls")[0]["id"])
                    assert agent.hook(folder, "SessionStart") == (0, "")
                    assert list(lines(empty_snap)) == ["mnt"]
            else:
                assert agent.ask(folder, "rewind", "--files", begun)[0] == 0
                assert (folder / "file").read_text() == "old\n"
    assert len(born) == 1 or kind != "ext4"
    empty_snap("ls")
