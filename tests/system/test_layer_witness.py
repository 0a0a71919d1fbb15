"""Layers are trusted after an end of the daemon only if all of them were written: a process that outlives it finds out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from snapshotd.errors import DataLoss, Unsupported
from snapshotd.kernel import loop
from snapshotd.layers import filesystem
from snapshotd.layers.store import LayerStore
from tests.capabilities import require
from tests.loop_disk import loop_disk
from tests.storage_rig import Daemon, in_own_mount_namespace, wait_until

DISK_BYTES = 400 << 20
_DAEMON = """
import os, sys
from pathlib import Path
from snapshotd.daemon.host import enter_own_mount_namespace
from snapshotd.layers import filesystem
enter_own_mount_namespace()
store = filesystem.prepare(Path(sys.argv[1]))
assert store.proof.earlier
store.proof.watch()
layer = store.create()
(store.root / layer / "upper" / "file").write_bytes(os.urandom(20 << 20))
if sys.argv[2] == "proven":
    store.proof.prove([layer])
print(layer, flush=True)
sys.stdin.read()
"""


def _daemon(state: Path, how: str = "") -> tuple[subprocess.Popen[str], str]:
    """A process that has layers as a daemon has, with one of them just sealed; and that layer's id."""
    process = subprocess.Popen(
        [sys.executable, "-c", _DAEMON, str(state), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()


def _witness(state: Path) -> int:
    """Its process id."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if os.fsencode(state / "layers.state") in words:
            return int(name)
    raise AssertionError("there is no witness")


def _next_start(state: Path) -> tuple[bool, LayerStore]:
    store = filesystem.prepare(state)
    return store.proof.earlier, store


@pytest.mark.parametrize("how", ["killed", "killed with its witness"])
@in_own_mount_namespace
def test_layers_are_trusted_after_a_kill_if_the_witness_says_so(how: str, tmp_path: Path) -> None:
    require("root")
    process, layer = _daemon(tmp_path)
    if how != "killed":
        os.kill(_witness(tmp_path), signal.SIGKILL)
    _kill(process)
    proven, store = _next_start(tmp_path)
    assert proven == (how == "killed")
    assert (store.root / layer).exists()
    filesystem.release(store)


@in_own_mount_namespace
def test_snapshots_that_nobody_can_vouch_for_are_called_lost(tmp_path: Path, small_root: Path) -> None:
    """A captured one is, after its daemon was killed with the witness. The stored one before it is not."""
    require("root", "runc")
    daemon = Daemon(tmp_path / "state")
    try:
        with daemon.explained():
            client = daemon.start()
            client.import_image(str(small_root), name="small")
            line = client.create(image="small", runtime="runc")[0].id
            stored = client.exec(line, ["sh", "-c", "echo a > a"], wait="stored").snapshot
            (archive,) = daemon.children("archive")
            os.kill(archive, signal.SIGSTOP)
            captured = client.exec(line, ["sh", "-c", "echo b > a"]).snapshot
            assert stored is not None
            assert captured is not None
            assert daemon.process is not None
            for pid in (_witness(daemon.state_dir), daemon.process.pid, archive):
                os.kill(pid, signal.SIGKILL)
            daemon.kill()
            client = daemon.start()
            assert [client.snapshot(one.id).state for one in (stored, captured)] == ["stored", "lost"]
            assert captured.id in daemon.log()
            with pytest.raises(DataLoss, match="was lost"):
                client.restore(captured.id, tmp_path / "lost")
            client.restore(stored.id, tmp_path / "restored", path="/workspace")
            assert (tmp_path / "restored" / "a").read_bytes() == b"a\n"
            daemon.stop()
    finally:
        daemon.end()


@in_own_mount_namespace
def test_layers_that_could_not_be_written_are_not_trusted(tmp_path: Path) -> None:
    require("xfs")
    with loop_disk("xfs", 320 << 20) as disk:
        state = disk.mount_point / "state"
        state.mkdir()
        process, _ = _daemon(state)
        os.sync()  # the state's own files are there after the cut
        disk.cut()
        _kill(process)
        disk.unmount()
        disk.mount()
        proven, store = _next_start(state)
        assert not proven
        filesystem.release(store)


@in_own_mount_namespace
def test_a_write_that_fails_is_told_once_and_remembered(tmp_path: Path) -> None:
    """Nothing is proven after it, for another sync says that all is well."""
    require("xfs")
    with loop_disk("xfs", 320 << 20) as disk:
        store = LayerStore(disk.mount_point, "reflink")
        good, bad = store.create(), store.create()
        (store.root / good / "upper" / "file").write_bytes(b"good")
        store.proof.prove([good])
        (store.root / bad / "upper" / "file").write_bytes(b"bad")
        disk.cut()
        for _ in range(2):
            with pytest.raises(DataLoss, match="reported an error"):
                store.proof.prove([bad])
            with pytest.raises(OSError, match="reported an error"):
                store.proof.sync()
        with pytest.raises(DataLoss, match="reported an error"):
            store.create()
        store._ready.clear()
        store.close()


@in_own_mount_namespace
def test_an_image_that_cannot_be_mounted_is_kept_and_its_place_stays_empty(tmp_path: Path) -> None:
    require("xfs")
    with loop_disk("ext4", DISK_BYTES) as disk:
        state = disk.mount_point / "state"
        state.mkdir()
        process, layer = _daemon(state, "proven")
        _kill(process)
        image = state / "layers.img"
        wait_until(lambda: loop.device_of(image) is None, "the kernel has given up the mount of what was killed")
        with image.open("r+b") as file:
            head = file.read(4096)
            file.seek(0)
            file.write(bytes(4096))
        proven, store = _next_start(state)
        assert (proven, store.kind) == (True, "missing")
        with pytest.raises(Unsupported, match="cannot mount the layer image"):
            store.create()
        store.proof.watch()  # the layers were not touched, so what was said of them stays
        filesystem.release(store)
        with image.open("r+b") as file:
            file.write(head)
        proven, store = _next_start(state)
        assert (proven, store.kind) == (True, "loop-xfs")
        assert (store.root / layer / "upper" / "file").stat().st_size == 20 << 20
        filesystem.release(store)
        image.unlink()
        store = filesystem.prepare(state)
        assert store.kind == "loop-xfs", "a new image, since nothing was written below the old one"
        filesystem.release(store)
