"""A cgroup as what holds processes together, in each version that this machine has."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from snapshotd.errors import SandboxFailed
from snapshotd.kernel import mounts
from snapshotd.kernel.holding import cgroup
from snapshotd.kernel.processes import stat_fields
from snapshotd.types import new_id
from tests.keeper_rig import eventually

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="cgroups")


def _mounted(version: int) -> str:
    kind = {1: "cgroup", 2: "cgroup2"}[version]
    for mount in mounts.read_mountinfo():
        if mount.fs_type == kind and (version == 2 or b"freezer" in mount.options.split(b",")):
            return os.fsdecode(mount.point)
    pytest.skip(f"no cgroups of version {version} are mounted")


@pytest.fixture(params=[1, 2])
def group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[cgroup.Cgroup]:
    """One that is there, in one hierarchy, and nothing in it."""
    point = _mounted(request.param)
    monkeypatch.setattr(cgroup, "hierarchies", lambda: (point,))
    monkeypatch.setattr(cgroup, "_layout", lambda: (request.param, point))
    made = cgroup.at(f"/snapshotd-test-{new_id()[:8]}/one")
    assert made.version == request.param
    made.make(cgroup.GroupSettings([(point, [], [])], []))
    yield made
    made.remove()
    cgroup.at(os.path.dirname(made.path)).remove_if_empty()
    assert not os.path.exists(os.path.dirname(made.directory))


def _inside(group: cgroup.Cgroup, stack: ExitStack, script: str = "sleep 1000") -> subprocess.Popen[bytes]:
    """A shell that entered the group before it began its script."""
    entered = f"echo 0 > {group.directory}/cgroup.procs; {script}"
    process = stack.enter_context(subprocess.Popen(["sh", "-c", entered], stdin=subprocess.DEVNULL))
    stack.callback(process.kill)
    eventually(lambda: process.pid in group.members(), "it does not enter")
    return process


def _state(pid: int) -> tuple[int, bytes]:
    """Its processor time and its state."""
    fields = stat_fields(pid)
    return int(fields[11]) + int(fields[12]), fields[0]


def test_members_stand_still_until_they_are_thawed(group: cgroup.Cgroup, tmp_path: Path) -> None:
    with ExitStack() as stack:
        count = tmp_path / "count"
        _inside(group, stack, f"while :; do echo >> {count}; done")
        eventually(lambda: count.exists() and count.stat().st_size > 100, "it does not count")
        group.freeze()
        size = count.stat().st_size
        assert not [pid for pid in group.members() if _state(pid)[1] == b"R"]
        eventually(lambda: group._is_frozen(), "it is not frozen")
        assert count.stat().st_size == size
        group.thaw()
        eventually(lambda: count.stat().st_size > size, "it does not go on")


def test_every_member_is_killed_also_those_that_fork_and_the_frozen(group: cgroup.Cgroup) -> None:
    with ExitStack() as stack:
        forking = _inside(group, stack, "i=0; while [ $i -lt 300 ]; do sleep 1000 & i=$((i + 1)); done; wait")
        eventually(lambda: len(group.members()) > 20, "it does not fork")
        if group.version == 2:
            group.freeze()  # version 1 delivers no signal until it is thawed
        left = group.kill()
        assert forking.pid in left
        eventually(lambda: not group.kill(), "some are left")
        assert forking.wait(60) == -signal.SIGKILL
    assert group.members() == []


def test_what_is_gone_is_told_or_needs_nothing(group: cgroup.Cgroup) -> None:
    missing = cgroup.at(f"{group.path}/missing")
    assert missing.kill() == set()
    missing.thaw()
    missing.remove()
    missing.remove_if_empty()
    assert missing.children() == set()
    for look in (missing.members, missing.freeze):
        with pytest.raises(SandboxFailed, match="missing"):
            look()


def test_a_process_is_in_the_group_that_holds_it(group: cgroup.Cgroup) -> None:
    with ExitStack() as stack:
        process = _inside(group, stack)
        found = cgroup.of_process(process.pid)
        assert isinstance(found, cgroup.Cgroup)
        assert (found.path, found.version) == (group.path, group.version)
        assert group.processes() == []  # its processes are of this one's pid namespace
    with pytest.raises(SandboxFailed, match="is gone"):
        cgroup.of_process(process.pid)


_BORN = """
import os, signal, sys
from snapshotd.runtime.starting.command import clone
pid = clone(int(sys.argv[1]))
if pid == 0:
    os.write(1, open("/proc/self/cgroup").read().encode())
    os._exit(0)
os.write(1, b"%d\\n" % pid)
"""


def test_a_process_is_born_in_its_group(group: cgroup.Cgroup) -> None:
    fd = group.birthplace()
    if group.version == 1:
        assert fd is None
        assert group.doors() == [f"{group.directory}/cgroup.procs"]
        return
    assert fd is not None
    assert group.doors() == []
    try:
        argv = [sys.executable, "-c", _BORN, str(fd)]
        said = subprocess.run(argv, pass_fds=[fd], capture_output=True, text=True, check=True).stdout
    finally:
        os.close(fd)
    assert f"0::{group.path}\n" in said
    os.waitpid(int(re.search(r"^\d+$", said, re.MULTILINE)[0]), 0)  # type: ignore[index]
