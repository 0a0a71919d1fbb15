"""A folder on a disk that is mounted and unmounted while the daemon runs: a verb reaches the disk that its caller sees and
no other one, and the daemon keeps no disk busy once the agent has ended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import long
from tests.capabilities import require
from tests.e2e.hooked import Agent
from tests.e2e.support import Snap
from tests.loop_disk import Disk, loop_disk, make_image

SIZE_BYTES = {"ext4": 32 << 20, "xfs": 320 << 20, "btrfs": 120 << 20}
DISKS = ["ext4", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("xfs", "btrfs"))]


@pytest.fixture
def disk(empty_snap: Snap, request: pytest.FixtureRequest) -> Iterator[Disk]:
    """Mounted after the start of the daemon, which is a new one, at the end too."""
    require("root")
    kind = getattr(request, "param", "ext4")
    empty_snap.stop_daemon()
    empty_snap("ls")
    # where mounts are private, a daemon of another test that starts meanwhile has the disk, too
    with loop_disk(kind, SIZE_BYTES[kind], detached=False) as found:
        yield found
        empty_snap.stop_daemon()  # it may have started while the disk was mounted
    for line in empty_snap.json("ls"):
        empty_snap("rm", "--force", line["id"])


@pytest.fixture
def agent(empty_snap: Snap, disk: Disk) -> Iterator[Agent]:
    """At work in a folder of the disk, with one call behind it."""
    folder = disk.mount_point / "project"
    folder.mkdir()
    (folder / "file").write_text("old\n")
    found = Agent(empty_snap, folder)
    found.hook("SessionStart")
    found.do("echo new > file")
    yield found
    found.close()


@pytest.mark.long  # a rewind does: test_a_disk_that_was_unmounted_stays_as_it_is
def test_every_verb_reaches_a_disk_that_was_mounted_later(empty_snap: Snap, agent: Agent) -> None:
    _, begun, _ = agent.steps()
    file = agent.folder / "file"
    assert "file" in empty_snap("rewind", "--preview", "--files", "project", begun["id"]).stdout
    empty_snap("rewind", "--files", "project", begun["id"])
    assert file.read_text() == "old\n"
    empty_snap("undo", "project")
    assert file.read_text() == "new\n"
    assert "file" in agent.send("rewind", "--files", "--dry-run", begun["id"])
    agent.send("rewind", "--files", begun["id"])
    assert file.read_text() == "old\n"
    agent.send("undo")
    assert file.read_text() == "new\n"


@pytest.mark.long  # names: test_hook_folders.py
def test_a_folder_whose_name_looks_like_that_of_a_removed_one(empty_snap: Snap, disk: Disk) -> None:
    folder = disk.mount_point / "gone (deleted)"
    folder.mkdir()
    agent = Agent(empty_snap, folder)
    try:
        assert agent.hook("SessionStart") == ""
    finally:
        agent.close()


def test_a_disk_that_was_unmounted_stays_as_it_is(empty_snap: Snap, disk: Disk, agent: Agent) -> None:
    _, begun, _ = agent.steps()
    trajectory = agent.trajectory
    agent.close()
    empty_snap.stop_daemon()
    empty_snap("ls")  # where mounts are private, this one has the disk until it ends
    disk.unmount(detached=False)
    refused = (
        ("rewind", "--files", trajectory, begun["id"]),
        ("rewind", "--preview", trajectory, begun["id"]),
        ("undo", trajectory),
    )
    for command in refused:
        assert "cannot be opened" in empty_snap(*command, code=4).stderr
    own, disk.image = disk.image, disk.image.with_name("other")
    make_image(disk.image, "ext4", SIZE_BYTES["ext4"])
    disk.mount()
    (agent.folder).mkdir()
    (agent.folder / "file").write_text("on another disk\n")
    for command in refused:
        assert "another folder by now" in empty_snap(*command, code=6).stderr
    assert agent.files() == {"file": "on another disk\n"}
    disk.unmount(detached=False)
    empty_snap.stop_daemon()
    disk.image = own
    disk.mount()
    assert agent.files() == {"file": "new\n"}
    empty_snap("rewind", "--files", trajectory, begun["id"])
    assert agent.files() == {"file": "old\n"}


@pytest.mark.long  # once the daemon has ended, too: the test before
@pytest.mark.parametrize("disk", DISKS, indirect=True)
@pytest.mark.parametrize("ends", long.some(["in a call", "between calls", "without its folder"], 1))
def test_a_disk_can_be_unmounted_once_the_agent_has_ended(disk: Disk, agent: Agent, ends: str) -> None:
    if ends == "in a call":
        agent.before("never-ends")
        agent.run(["sh", "-c", "echo newer > file"])
    if ends == "without its folder":
        agent.run(["rm", "-r", str(agent.folder)])
    agent.close()
    disk.unmount(detached=False)
    if ends == "in a call":
        disk.mount()
        assert agent.names() == ["start", "edits", "Bash", "Bash"]


@pytest.mark.long  # another disk at the path: test_hook_folders.py
@pytest.mark.parametrize("disk", DISKS, indirect=True)
def test_changes_on_a_disk_that_comes_back_are_found(empty_snap: Snap, disk: Disk, agent: Agent) -> None:
    agent.hook("Stop")  # nothing has changed since the last look
    agent.close()
    disk.unmount(detached=False)
    disk.mount()
    (agent.folder / "file").write_text("changed\n")
    later = Agent(empty_snap, agent.folder, "s-2")
    try:
        later.hook("SessionStart")
        assert later.names() == ["start", "edits", "Bash", "edits"]
    finally:
        later.close()
