"""A file system of its own on a loop device, which a test can fill up or cut off, and its clean end in every case."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

UMOUNT_S = 60.0
_MAKE = {
    "xfs": ("mkfs.xfs", "-q", "-f", "-m", "reflink=1"),
    # A small disk gets blocks of 1 KiB by itself. SQLite allocates its shared memory by pages, so a full disk with such
    # blocks ends the process by SIGBUS.
    "ext4": ("mkfs.ext4", "-q", "-F", "-m", "0", "-b", "4096"),
    "btrfs": ("mkfs.btrfs", "-q", "-f"),
}


class Disk:
    """An image file, mounted at `mount_point`, both in a directory of its own. `scratch` lies beside, on the host's
    file system."""

    def __init__(self, directory: Path, kind: str, size_bytes: int, options: tuple[str, ...] = ()) -> None:
        self.image, self.mount_point, self.scratch = (
            directory / f"{kind}.disk",
            directory / "mnt",
            directory / "scratch",
        )
        self.mount_point.mkdir()
        self.scratch.mkdir()
        make_image(self.image, kind, size_bytes, options)
        self.mount()

    def mount(self) -> None:
        """With recovery of its log where that is needed."""
        _run("mount", "-o", "loop", str(self.image), str(self.mount_point))

    def cut(self) -> None:
        """The power goes: nothing that was not flushed gets to the disk any more, and every write fails."""
        _run("xfs_io", "-x", "-c", "shutdown", str(self.mount_point))

    def unmount(self, *, detached: bool = True) -> None:
        """Retries: what a killed process had mounted on top is given up a little later. Returns when the loop device is
        free, too (unless not `detached`: another mount namespace may have the disk still)."""
        deadline = time.monotonic() + UMOUNT_S
        while self.is_mounted():
            result = subprocess.run(
                ["umount", str(self.mount_point)], capture_output=True, text=True, timeout=UMOUNT_S, check=False
            )
            if result.returncode != 0:
                assert time.monotonic() < deadline, f"{self.mount_point} is still in use: {result.stderr}"
                time.sleep(0.05)
        while detached and (attached := self.devices()):
            assert time.monotonic() < deadline, f"still attached: {attached}"
            time.sleep(0.05)

    def is_mounted(self) -> bool:
        """Not by looking at the mount point, which a file system that was cut off does not let anybody do."""
        return str(self.mount_point) in Path("/proc/thread-self/mountinfo").read_text().split()

    def devices(self) -> list[str]:
        """The loop devices whose file lies in this disk's directory."""
        found = []
        for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
            try:
                if str(self.image.parent) in backing.read_text():
                    found.append(backing.parts[3])
            except OSError:
                continue  # detached meanwhile
        return found

    def free_bytes(self) -> int:
        st = os.statvfs(self.mount_point)
        return st.f_bavail * st.f_frsize


def make_image(path: Path, kind: str, size_bytes: int, options: tuple[str, ...] = ()) -> None:
    """A file system in a file."""
    with path.open("wb") as file:
        file.truncate(size_bytes)
    _run(*_MAKE[kind], *options, str(path))


@contextmanager
def loop_disk(kind: str, size_bytes: int, options: tuple[str, ...] = (), *, detached: bool = True) -> Iterator[Disk]:
    """A mounted disk; unmounted, detached (see `Disk.unmount`) and deleted at the end."""
    directory = Path(tempfile.mkdtemp(prefix=f"snapshotd-{kind}-", dir="/var/tmp"))
    disk = Disk(directory, kind, size_bytes, options)
    try:
        yield disk
    finally:
        disk.unmount(detached=detached)
        shutil.rmtree(directory)


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, check=False)
    assert result.returncode == 0, (command, result.stderr)


@contextmanager
def filled(disk: Disk, left_bytes: int) -> Iterator[Callable[[], None]]:
    """Somebody else's file takes all of the disk but so much; what is yielded does it again, after something was
    freed."""
    path = disk.mount_point / "filler"

    def fill() -> None:
        with path.open("ab") as file:
            size = file.tell()
            step = 64 << 20
            while step >= 4096:
                if disk.free_bytes() - step < left_bytes:
                    step //= 2
                    continue
                try:
                    os.posix_fallocate(file.fileno(), size, step)
                    size += step
                except OSError as exc:
                    if exc.errno != errno.ENOSPC:
                        raise
                    os.ftruncate(file.fileno(), size)
                    step //= 2

    fill()
    try:
        yield fill
    finally:
        path.unlink()


@contextmanager
def memory_disk(folder: Path, size: str) -> Iterator[Path]:
    """An empty file system in memory that is full after so many bytes, as `mount` takes them. Skips where there is no root."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    path = folder / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "snapshotd-test-small", path], check=True, timeout=30)
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True, timeout=30)
