"""Access control lists on the copy path, on XFS, which lists each under two names; and what a directory hands down to
new files."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.layers.capture import capture
from snapshotd.layers.store import LayerStore
from tests.capabilities import require
from tests.loop_disk import loop_disk

ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
_USER_OBJ, _USER, _GROUP_OBJ, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
ACL = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", tag, permissions, number)
    for tag, permissions, number in (
        (_USER_OBJ, 7, 0xFFFFFFFF),
        (_USER, 5, 1000),
        (_GROUP_OBJ, 5, 0xFFFFFFFF),
        (_MASK, 5, 0xFFFFFFFF),
        (_OTHER, 0, 0xFFFFFFFF),
    )
)


@pytest.fixture
def store() -> Iterator[LayerStore]:
    require("xfs")
    with loop_disk("xfs", 320 << 20) as disk:
        store = LayerStore(disk.mount_point, "plain")
        yield store
        store.close()


def acls(path: Path) -> dict[str, bytes]:
    return {name: os.getxattr(path, name, follow_symlinks=False) for name in os.listxattr(path, follow_symlinks=False)}


def test_a_copy_has_the_lists_of_the_original_and_no_others(store: LayerStore) -> None:
    live = store.create()
    upper = store.root / live / "upper"
    shared = upper / "shared"
    (shared / "below").mkdir(parents=True)
    for name in (ACCESS, DEFAULT):
        os.setxattr(shared, name, ACL)

    @contextlib.contextmanager
    def frozen() -> Iterator[None]:
        """What came since the first pass is copied into a directory whose default it would inherit."""
        (shared / "listed").write_text("x")
        (shared / "bare").write_text("x")
        os.mkfifo(shared / "pipe")
        (shared / "folder").mkdir()
        os.removexattr(shared / "bare", ACCESS)
        os.removexattr(shared / "pipe", ACCESS)
        for name in (ACCESS, DEFAULT):
            os.removexattr(shared / "folder", name)
        yield

    copy = store.root / capture(store, live, None, frozen(), set).layer / "upper"
    for original in [upper, *upper.rglob("*")]:
        path = copy / original.relative_to(upper)
        assert acls(path) == acls(original), original
        assert path.lstat().st_mode == original.lstat().st_mode
    assert ACCESS in acls(copy / "shared/listed")
    assert not acls(copy / "shared/bare")
