"""A pivot whose daemon is killed in the middle: the next one finds the sandbox as it was before, or as it would have
been after."""

from __future__ import annotations

import os

import pytest

from snapshotd.kernel import mounts
from snapshotd.layers import pivot as pivoting
from snapshotd.layers.pivot import layout_of, pivot, settle
from tests.parking_box import Box

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes mount and pid namespaces")

LOOKS = """
    import os
    open("written", "a").write("x")
    assert os.path.exists("/proc/self/status")
    print(open("written").read(), end="")
"""


def _whole(box: Box, root_id: int, written: str) -> None:
    """The sandbox has this one root, can be written, and sees its processes."""
    found = mounts.read_mountinfo(box._target.pid)
    assert [mount.mount_id for mount in found if mount.point == b"/"] == [root_id]
    assert [mount.fs_type for mount in found if mount.point == b"/proc"] == ["proc"]
    assert box.run(LOOKS)[0] == written


def test_sealed(box: Box) -> None:
    assert box.run(LOOKS)[0] == "x"
    before = layout_of(box._target).root_id
    box.inside(mounts.seal_here)
    settle(box._target)
    _whole(box, before, "xx")


def test_prepared(box: Box) -> None:
    assert box.run(LOOKS)[0] == "x"
    before = layout_of(box._target).root_id
    with pivoting._overlay(box._target, box._store, box._stack.push(box._upper), box._layer()) as coming:
        box.inside(mounts.seal_here)
        box.inside(lambda: pivoting._attach_on_proc(coming))
    settle(box._target)
    _whole(box, before, "xx")


def test_switched(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the last step: the old root is still there, below which nobody lives."""
    assert box.run(LOOKS)[0] == "x"
    announced: list[int] = []
    stack, upper = box._stack.push(box._upper), box._layer()
    with monkeypatch.context() as patched:
        patched.setattr(mounts, "detach", lambda path: None)
        pivot(box._target, box._store, stack, upper, layout_of(box._target), seal=True, announce=announced.append)
    box._stack, box._upper = stack, upper
    assert len([mount for mount in mounts.read_mountinfo(box._target.pid) if mount.point == b"/"]) == 2
    settle(box._target)
    _whole(box, announced[0], "xx")


def test_nothing_was_cut_off(box: Box) -> None:
    before = layout_of(box._target).root_id
    settle(box._target)
    _whole(box, before, "x")
