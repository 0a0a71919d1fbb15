"""Measure mounts: `sudo python benchmarks/fuse.py [--files N] [--mib N]`. A snapshot of N files over an image, through
the lazy lower under overlayfs with an empty page cache of the mount, and the same as a real layer for comparison.

Every figure is one run; the mount is new each time, so nothing of it is cached but the packs on disk.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from snapshotd.fuse.lazy import LazyMount
from snapshotd.kernel import mounts
from snapshotd.kernel.mounts import LayerNaming
from snapshotd.repo.writing.writer import PackRepository
from snapshotd.store.local import LocalStore
from snapshotd.trees.archive import apply
from snapshotd.types import TreeID
from tests import root_tree
from tests.fuse_rig import CHILD

_PER_DIRECTORY = 100


def fill(root: Path, files: int, mib: int) -> None:
    for number in range(files):
        folder = root / f"workspace/d{number // _PER_DIRECTORY}"
        if number % _PER_DIRECTORY == 0:
            folder.mkdir()
        (folder / f"file{number}.py").write_text(f"# {number}\n" * (number % 200))
    with (root / "workspace/large").open("wb") as f:
        for _ in range(mib):
            f.write(os.urandom(1 << 20))
    for program in (root / "usr/bin").iterdir():
        os.utime(program, ns=(1, 1), follow_symlinks=False)  # so that it comes through the mount


def archive(writer: PackRepository, folder: Path) -> TreeID:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return apply(writer, fd, None, salt=os.fsencode(folder), marks=False).tree
    finally:
        os.close(fd)


def overlay(lower: int, image: Path, layer: Path, point: Path, held: ExitStack) -> None:
    fds = []
    for folder in (image, layer / "upper", layer / "work", point):
        folder.mkdir(parents=True, exist_ok=True)
        fds.append(os.open(folder, os.O_PATH))
        held.callback(os.close, fds[-1])
    merged = mounts.overlay([lower, fds[0]], fds[1], fds[2], LayerNaming.DESCRIPTOR)
    held.callback(os.close, merged)
    mounts.attach(merged, fds[3])
    held.callback(mounts.detach, str(point))


def timed(words: list[str], where: Path) -> float:
    began = time.perf_counter()
    subprocess.run(words, cwd=where, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def measure(name: str, prepare: Callable[[ExitStack], Path], files: int, mib: int) -> None:
    with ExitStack() as held:
        began = time.perf_counter()
        point = prepare(held)
        mounted = time.perf_counter() - began
        first = timed(["chroot", ".", "/bin/sh", "-c", "ls /workspace/d0 && cat /workspace/d0/file7.py"], point)
        second = timed(["chroot", ".", "/bin/sh", "-c", "ls /workspace/d0 && cat /workspace/d0/file7.py"], point)
        one = timed(["dd", "if=workspace/large", "of=/dev/null", "bs=1M", "status=none"], point)
        stats = timed(["find", "workspace", "-newer", "/etc/passwd", "-size", "+9999"], point)
        again = timed(["find", "workspace", "-newer", "/etc/passwd", "-size", "+9999"], point)
        reads = timed(
            ["grep", "-r", "--exclude=large", "-c", "#", "workspace/d1", "workspace/d2", "workspace/d3"], point
        )
    print(f"{name}")
    print(f"  open the layer and mount the overlay  {mounted * 1e3:8.1f} ms")
    print(f"  first command, cold                   {first * 1e3:8.1f} ms, the same again {second * 1e3:.1f} ms")
    print(f"  fork to the end of the first command  {(mounted + first) * 1e3:8.1f} ms")
    print(f"  one large file                        {mib / one:8.0f} MB/s")
    print(f"  find with a stat of each file         {files / stats:8.0f} files/s, again {files / again:.0f} files/s")
    print(f"  grep through small files              {3 * _PER_DIRECTORY / reads:8.0f} files/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=50_000)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"))
    options = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="snapshotd-fuse-", dir=options.dir))
    lazy = LazyMount([*CHILD, "lazy", str(base / "repo")], base / "lazy")
    try:
        image, snapshot = base / "image", base / "snapshot"
        root_tree.build(image)
        subprocess.run(["cp", "-a", str(image), str(snapshot)], check=True)
        fill(snapshot, options.files, options.mib)
        (base / "repo").mkdir()
        writer = PackRepository(LocalStore(base / "repo/packs"), base / "repo/index.db", bytes(32))
        tree, below = archive(writer, snapshot), archive(writer, image)
        writer.flush()
        writer.close()
        began = time.perf_counter()
        lazy.start()
        print(f"start the process and mount: {(time.perf_counter() - began) * 1e3:.0f} ms (once per daemon)")

        def cold(held: ExitStack) -> Path:
            fd = lazy.open_layer(tree, below, 0)
            held.callback(os.close, fd)
            overlay(fd, image, base / "layer1", base / "merged1", held)
            return base / "merged1"

        def real(held: ExitStack) -> Path:
            fd = os.open(snapshot, os.O_PATH)
            held.callback(os.close, fd)
            overlay(fd, image, base / "layer2", base / "merged2", held)
            return base / "merged2"

        measure(f"lazy lower, {options.files} files", cold, options.files, options.mib)
        measure("a real layer, warm", real, options.files, options.mib)
    finally:
        lazy.close()
        shutil.rmtree(base)


if __name__ == "__main__":
    main()
