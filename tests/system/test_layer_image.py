"""The layers' image gives the disk below back what its layers no longer take."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from snapshotd.errors import NO_ROOM
from snapshotd.kernel.quota import Used
from snapshotd.layers import ballast, filesystem
from snapshotd.layers.capture import capture
from snapshotd.layers.merge import merge
from snapshotd.layers.store import LayerStore
from snapshotd.types import LayerID
from tests.capabilities import require
from tests.loop_disk import loop_disk
from tests.storage_rig import in_own_mount_namespace, wait_until

BIG_BYTES = 64 << 20
DISK_BYTES = 400 << 20
AHEAD_BYTES = 128 << 20
"""Space that the image has from its disk beyond what is used."""
SLACK_BYTES = 20 << 20


def big_layer(store: LayerStore) -> LayerID:
    layer = store.create()
    store.unpin([layer])
    with open(store.root / layer / "upper" / "big", "wb") as file:
        file.write(os.urandom(BIG_BYTES))
        os.fsync(file.fileno())
    return layer


def taken_bytes(state: Path) -> int:
    return (state / "layers.img").stat().st_blocks * 512


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    require("root", "xfs")
    filesystem._make_image(tmp_path / "layers.img")
    monkeypatch.setattr(ballast, "MAX_BYTES", AHEAD_BYTES)
    yield tmp_path
    assert not os.path.ismount(tmp_path / "layers")


@in_own_mount_namespace
def test_a_limited_layer_takes_no_more_and_can_still_be_copied_and_merged(state: Path) -> None:
    """Hard links into a directory that hands its project on fail, so those of captures and merges must go elsewhere."""
    require("quotas")
    store = filesystem.prepare(state)
    try:
        assert store.limits.enforced
        uppers = [store.create() for _ in range(2)]
        for live in uppers:
            store.limits.limit(live, Used(8 << 20, 100))
            upper = store.root / live / "upper"
            (upper / "dir").mkdir()
            (upper / "dir" / f"kept-{live}").write_bytes(b"kept")
            with pytest.raises(OSError, match="No space left") as failed, open(upper / "big", "wb") as file:
                os.posix_fallocate(file.fileno(), 0, 1 << 40)
            assert failed.value.errno in NO_ROOM
            names = (upper / f"small{n}" for n in range(100))
            with pytest.raises(OSError, match="No space left"):
                deque((name.touch() for name in names), maxlen=0)
            (upper / "big").unlink()
            os.rename(upper / "small0", store.root / live / "work" / "small0")  # as overlayfs does
            os.rename(store.root / live / "work" / "small0", upper / "small0")
            os.link(upper / "small1", upper / "dir" / "linked")
        first = capture(store, uppers[0], None, nullcontext(), set)
        again = capture(store, uppers[0], first, nullcontext(), set)
        assert (store.root / again.layer / "upper" / "small2").stat().st_nlink == 2
        merged = store.create()
        fds = [store.read_upper(layer) for layer in (*uppers, merged)]
        merge(fds[:-1], fds[-1])
        for fd in fds:
            os.close(fd)
        assert {path.name for path in (store.root / merged / "upper" / "dir").iterdir()} >= {
            f"kept-{live}" for live in uppers
        }
        for layer in (*uppers, first.layer, again.layer, merged):
            store.remove(layer)
    finally:
        filesystem.release(store)


@in_own_mount_namespace
def test_a_removed_layer_gives_its_space_back(state: Path) -> None:
    store = filesystem.prepare(state)
    try:
        empty = taken_bytes(state)
        layers = [big_layer(store) for _ in range(3)]
        wait_until(lambda: taken_bytes(state) > empty + 3 * BIG_BYTES - SLACK_BYTES, "blocks are allocated ahead again")
        store.remove(layers[0])
        wait_until(
            lambda: taken_bytes(state) < empty + 2 * BIG_BYTES + SLACK_BYTES, "the removed layer's space is back"
        )
        assert store.evict(layers[1])
        wait_until(lambda: taken_bytes(state) < empty + BIG_BYTES + SLACK_BYTES, "the evicted layer's space is back")
        assert store.sweep(set) == layers[2:]
        wait_until(lambda: taken_bytes(state) < empty + SLACK_BYTES, "the swept layer's space is back")
    finally:
        filesystem.release(store)


@in_own_mount_namespace
def test_what_an_earlier_daemon_left_behind_comes_back_at_the_next_start(state: Path) -> None:
    store = filesystem.prepare(state)
    empty = taken_bytes(state)
    layer = big_layer(store)
    wait_until(lambda: taken_bytes(state) > empty + BIG_BYTES - SLACK_BYTES, "blocks are allocated ahead again")
    filesystem.release(store)
    filesystem._mount_image(state / "layers.img", state / "layers")
    killed = LayerStore(state / "layers", "loop-xfs")
    killed.remove(layer)
    filesystem.release(killed)
    left = taken_bytes(state)
    filesystem.release(filesystem.prepare(state))
    assert taken_bytes(state) < left - BIG_BYTES + SLACK_BYTES


@in_own_mount_namespace
def test_a_daemon_that_has_ended_keeps_no_space_ahead(state: Path) -> None:
    store = filesystem.prepare(state)
    running = taken_bytes(state)
    filesystem.release(store)
    assert taken_bytes(state) < running - AHEAD_BYTES + ballast.MIN_BYTES + SLACK_BYTES


@in_own_mount_namespace
def test_layers_on_a_full_disk_meet_it_at_once_and_never_later(state: Path) -> None:
    """Also when somebody else takes all that the disk has, and after a copy of the image without its holes."""
    require("xfs")
    with loop_disk("ext4", DISK_BYTES) as disk:
        small = disk.mount_point / "state"
        small.mkdir()
        store = filesystem.prepare(small)
        filesystem.release(store)
        subprocess.run(["cp", "--sparse=always", small / "layers.img", small / "copy"], check=True)
        (small / "copy").rename(small / "layers.img")
        store = filesystem.prepare(small)
        try:
            with pytest.raises(OSError, match="No space left"):
                deque((big_layer(store) for _ in range(40)), maxlen=0)
            filler = disk.mount_point / "filler"
            with filler.open("wb") as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1 << 20))
                    file.flush()
            with contextlib.suppress(OSError), open(store.root / "more", "wb") as file:
                while True:
                    file.write(os.urandom(1 << 20))
            store.proof.sync()
            for layer in store.layers():
                store.remove(layer)
        finally:
            filesystem.release(store)
