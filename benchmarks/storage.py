"""What storing and restoring costs, side by side with git, restic and borg. As root, on an idle machine:

    python benchmarks/storage.py [--only history,big,step,packages,restore] [--git DIR] [--commits N] [--tree DIR]
    [--json FILE] [--dir DIR]

    history   the trees of consecutive commits of a project (--git: any git repository, its first parents), stored one by one
    big       a 2 GiB file, then 4 KiB of it changed
    step      5,000 files, 300 MiB, half of it compressible: the rate of storing (--tree: any directory in their place, as of `pip install`)
    packages  50 snapshots of a root whose packages come and go: what the second to fiftieth add
    restore   50,000 files, 2 GiB: back into a directory

Sizes are of all files of a repository (ours with its index; git's of the pack alone). restic and borg run with their
defaults, borg without encryption. Times are of the whole command, ours of the archive's work in a process that runs
already, with its fsync. Every tool works in the same directory of the same file system, one after the other in one run:
compare within it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from snapshotd.daemon.children import StatePlaces
from snapshotd.kernel import memory
from snapshotd.repo.key import load_key
from snapshotd.repo.reading.reader import PackReader
from snapshotd.repo.writing.writer import PackRepository
from snapshotd.store.local import LocalStore
from snapshotd.trees import archive
from snapshotd.trees.materialise import materialise
from snapshotd.trees.stored_view import StoredView
from snapshotd.types import RecordID, TreeID

MIB = 1 << 20
PASSWORD = {"RESTIC_PASSWORD": "benchmark", "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes"}


def run(*command: str | Path, cwd: Path | None = None, **more: Any) -> subprocess.CompletedProcess[bytes]:
    more.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.run(
        [*map(str, command)], cwd=cwd, check=True, capture_output=True, env={**os.environ, **PASSWORD}, **more
    )


def tree_bytes(path: Path) -> int:
    return sum(os.lstat(os.path.join(base, name)).st_size for base, _, names in os.walk(path) for name in names)


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


class Ours:
    """A repository as the archive worker has it."""

    def __init__(self, directory: Path) -> None:
        places = StatePlaces(directory, directory, "", f"file://{directory / 'repo' / 'store'}")
        self.directory = places.repo_dir
        self.directory.mkdir(parents=True)
        self.key = load_key(self.directory)
        store = LocalStore(self.directory / "store")
        self.writer = PackRepository(
            store, self.directory / "index.db", self.key, packer_command=places.command("pack")
        )

    def store(self, folder: Path, parent: TreeID | None, *, marks: bool = True) -> TreeID:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            tree = archive.apply(self.writer, fd, parent, salt=os.fsencode(folder.name), marks=marks).tree
        finally:
            os.close(fd)
        return tree

    def reader(self) -> PackReader:
        return PackReader(LocalStore(self.directory / "store"), self.directory / "index.db", self.key)

    def packs_bytes(self) -> int:
        return tree_bytes(self.directory / "store")

    def bytes(self) -> int:
        self.writer.close()
        return tree_bytes(self.directory)


def restic(repo: Path, *words: str | Path, cwd: Path | None = None) -> None:
    run("restic", "-q", "--no-cache", "-r", repo, *words, cwd=cwd)


def borg(*words: str | Path, cwd: Path | None = None) -> None:
    run("borg", *words, cwd=cwd)


# -- history -----------------------------------------------------------------------------------------------------------


def history(work: Path, git_dir: Path, count: int) -> dict[str, Any]:
    """Layers are made beforehand, as sandboxes would have; the same trees as commits in a fresh git repository."""
    commits = (
        run("git", "--git-dir", git_dir, "rev-list", "--first-parent", "-n", str(count), "HEAD")
        .stdout.decode()
        .split()[::-1]
    )
    layers = work / "layers"
    layers.mkdir()
    _export(git_dir, commits[0], None, layers / "0")
    for number in range(1, len(commits)):
        _export(git_dir, commits[number], commits[number - 1], layers / str(number))
    line = work / "line"
    run("git", "init", "-q", "--bare", line)
    (line / "objects/info/alternates").write_text(f"{Path(git_dir).resolve() / 'objects'}\n")
    parent: list[str] = []
    identity = {f"GIT_{who}_{what}": "benchmark" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    for number, commit in enumerate(commits):
        dates = {
            "GIT_AUTHOR_DATE": f"{1_000_000_000 + number} +0000",
            "GIT_COMMITTER_DATE": f"{1_000_000_000 + number} +0000",
        }
        made = (
            subprocess.run(
                ["git", "--git-dir", line, "commit-tree", f"{commit}^{{tree}}", *parent, "-m", "step"],
                check=True,
                capture_output=True,
                env={**os.environ, **identity, **dates},
                stdin=subprocess.DEVNULL,
            )
            .stdout.decode()
            .strip()
        )
        parent = ["-p", made]
    run("git", "--git-dir", line, "update-ref", "refs/heads/main", parent[1])
    fresh = work / "git"
    run("git", "clone", "-q", "--bare", "--no-local", "--branch", "main", line, fresh)
    # A gc keeps the deltas that the clone happened to bring; those that git finds for just these trees make a pack a
    # third smaller.
    run("git", "--git-dir", fresh, "repack", "-a", "-d", "-F", "-q")
    git_s = timed(lambda: run("git", "--git-dir", fresh, "gc", "-q"))
    packs = list((fresh / "objects/pack").glob("*.pack"))
    ours, times, record, worked = Ours(work / "ours"), [], None, 0.0
    tree: TreeID | None = None
    for number in range(len(commits)):
        start = time.perf_counter()
        worked = time.process_time() if number == 1 else worked
        tree = ours.store(layers / str(number), tree, marks=number > 0)
        data = json.dumps(
            {"version": 1, "snapshot": f"{number:032x}", "tree": tree, "message": f"step {number}"}
        ).encode()
        record = ours.writer.save_record(data, RecordID(record) if record else None)
        times.append(time.perf_counter() - start)
    flush_s = timed(ours.writer.flush)
    worked = time.process_time() - worked
    result = {
        "commits": len(commits),
        "git_pack_bytes": sum(p.stat().st_size for p in packs),
        "git_gc_s": git_s,
        "ours_packs_bytes": ours.packs_bytes(),
        "ms_per_commit": 1000 * (sum(times[1:]) + flush_s) / (len(times) - 1),
        "cpu_ms_per_commit": 1000 * worked / (len(times) - 1),
        "ms_first": 1000 * times[0],
    }
    result["ratio_to_git"] = result["ours_packs_bytes"] / result["git_pack_bytes"]
    result["ours_with_index_bytes"] = ours.bytes()
    checkout = work / "checkout"
    shutil.copytree(layers / "0", checkout, symlinks=True)
    run("restic", "-q", "-r", work / "restic", "init")
    run("borg", "init", "-e", "none", work / "borg")
    restic_s = borg_s = 0.0
    for number in range(len(commits)):
        if number:
            _apply(layers / str(number), checkout)
        restic_s += timed(lambda: restic(work / "restic", "backup", ".", cwd=checkout))
        borg_s += timed(lambda number=number: borg("create", f"{work / 'borg'}::{number}", ".", cwd=checkout))
    return {
        **result,
        "restic_bytes": tree_bytes(work / "restic"),
        "restic_ms_per_commit": 1000 * restic_s / len(commits),
        "borg_bytes": tree_bytes(work / "borg"),
        "borg_ms_per_commit": 1000 * borg_s / len(commits),
    }


def _export(git_dir: Path, commit: str, before: str | None, folder: Path) -> None:
    """What a commit changed, as an overlay layer: whiteouts for what went."""
    folder.mkdir()
    if before is None:
        data = run("git", "--git-dir", git_dir, "archive", "--format=tar", commit).stdout
        with tempfile.TemporaryFile() as archived:
            archived.write(data)
            archived.seek(0)
            run("tar", "-x", "-C", folder, stdin=archived)
        return
    listing = run("git", "--git-dir", git_dir, "diff-tree", "-r", "-z", "--no-renames", before, commit).stdout.split(
        b"\0"
    )[:-1]
    for header, path in zip(listing[::2], listing[1::2], strict=True):
        _, mode, _, blob, status = header.decode().split()
        target = folder / os.fsdecode(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if status == "D":
            os.mknod(target, 0o20000, 0)
        elif mode != "160000":
            data = run("git", "--git-dir", git_dir, "cat-file", "blob", blob).stdout
            if mode == "120000":
                os.symlink(data, os.fsencode(target))
            else:
                target.write_bytes(data)
                target.chmod(0o755 if mode == "100755" else 0o644)


def _apply(layer: Path, checkout: Path) -> None:
    for base, _, names in os.walk(layer):
        for name in names:
            source = Path(base) / name
            target = checkout / source.relative_to(layer)
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.is_symlink() or target.exists():
                shutil.rmtree(target) if target.is_dir() and not target.is_symlink() else target.unlink()
            if not source.is_char_device():
                shutil.copy2(source, target, follow_symlinks=False)


# -- the others --------------------------------------------------------------------------------------------------------


def fill(path: Path, size: int, rng: random.Random) -> None:
    """Half noise, half text: about what a mixture of sources and build results is."""
    words = [rng.randbytes(6).hex().encode() for _ in range(200)]
    half = size // 2
    text = b" ".join(rng.choice(words) for _ in range(half // 13 + 1))[:half]
    path.write_bytes(text + rng.randbytes(size - half))


def big(work: Path) -> dict[str, Any]:
    """The file as a layer over an empty image; then the changed one as the next layer."""
    empty, one, two = work / "empty", work / "one", work / "two"
    for folder in (empty, one, two):
        folder.mkdir()
    rng = random.Random(1)
    with open(one / "big", "wb") as f:
        for _ in range(2048):
            f.write(rng.randbytes(MIB))
    ours = Ours(work / "ours")
    base = ours.store(empty, None, marks=False)
    first_s = timed(lambda: (ours.store(one, base), ours.writer.flush()))
    tree = ours.store(one, base)
    before = ours.packs_bytes()
    run("cp", "--reflink=auto", one / "big", two / "big")
    with open(two / "big", "r+b") as f:
        f.seek(1_234_567_890)
        f.write(rng.randbytes(4096))
    second_s = timed(lambda: (ours.store(two, tree), ours.writer.flush()))
    result = {"first_s": first_s, "second_s": second_s, "added_bytes": ours.packs_bytes() - before}
    for name, command in _others(work):
        command(one)
        size = tree_bytes(work / name)
        seconds = timed(lambda command=command: command(two))
        result |= {f"{name}_second_s": seconds, f"{name}_added_bytes": tree_bytes(work / name) - size}
    return result


def _others(work: Path) -> list[tuple[str, Callable[[Path], None]]]:
    run("restic", "-q", "-r", work / "restic", "init")
    run("borg", "init", "-e", "none", work / "borg")
    return [
        ("restic", lambda folder: restic(work / "restic", "backup", ".", cwd=folder)),
        ("borg", lambda folder: borg("create", f"{work / 'borg'}::{time.time_ns()}", ".", cwd=folder)),
    ]


def make_step(folder: Path, files: int, size: int) -> None:
    rng = random.Random(2)
    for number in range(files):
        target = folder / f"d{number % 50}" / f"f{number}"
        target.parent.mkdir(parents=True, exist_ok=True)
        fill(target, rng.randrange(size // files // 2, size // files * 3 // 2), rng)


def step(work: Path, tree: Path | None) -> dict[str, Any]:
    """Each tool stores the same directory into a fresh repository, nine times in turns; the best counts: neighbours can
    only slow down.

    The others are commands, ours works in processes that run already (other files were stored until they did, which
    does not count): `nothing_s` is what they take to store a directory of one short file into the same repository,
    `times_without_start` the ratio of the rates when that is taken off.
    """
    folder, empty, single, before = work / "step", work / "empty", work / "single", work / "before"
    for one in (folder, empty, single, before):
        one.mkdir()
    make_step(before, 1500, 100 * MIB)
    (single / "file").write_text("one\n")
    if tree is None:
        make_step(folder, 5000, 300 * MIB)
    else:
        run("cp", "-a", "--reflink=never", f"{tree}/.", folder)
    run("sync")
    size, files = tree_bytes(folder), sum(len(names) for _, _, names in os.walk(folder))
    seen: dict[str, list[float]] = {"ours": [], "restic": [], "borg": []}
    nothing: dict[str, list[float]] = {"restic": [], "borg": []}
    sizes: dict[str, int] = {}
    for number in range(9):
        place = work / f"round{number}"
        place.mkdir()
        others = dict(_others(place))
        names = list(seen)
        for name in names[number % 3 :] + names[: number % 3]:
            if name == "ours":
                ours = Ours(place / "ours")
                ours.store(before, None, marks=False)
                base = ours.store(empty, None, marks=False)
                ours.writer.flush()
                less = ours.packs_bytes()
                _at_rest(folder)
                seen["ours"].append(timed(lambda ours=ours, base=base: (ours.store(folder, base), ours.writer.flush())))
                sizes["ours"] = ours.bytes() - less
            else:
                _at_rest(folder)
                seen[name].append(timed(lambda command=others[name]: command(folder)))
                sizes[name] = tree_bytes(place / name)
                nothing[name].append(timed(lambda command=others[name]: command(single)))
        shutil.rmtree(place)
    best, start = (
        {name: min(values) for name, values in seen.items()},
        {name: min(values) for name, values in nothing.items()},
    )
    return {
        "plain_bytes": size,
        "files": files,
        "load": os.getloadavg()[0],
        "MB_per_s": {name: size / 1e6 / value for name, value in best.items()},
        "seconds": seen,
        "bytes": sizes,
        "nothing_s": start,
        "times": {name: best[name] / best["ours"] for name in start},
        "times_without_start": {name: (best[name] - start[name]) / best["ours"] for name in start},
        "times_median": {name: statistics.median(seen[name]) / statistics.median(seen["ours"]) for name in start},
    }


def _at_rest(folder: Path) -> None:
    """Nothing is left to be written of whoever was before, and the files are in memory, as those of a step are (borg
    drops them)."""
    run("sync")
    for base, _, names in os.walk(folder):
        for name in names:
            path = Path(base, name)
            if not path.is_symlink():
                path.read_bytes()


def packages(work: Path) -> dict[str, Any]:
    """A root of 2,000 files; in each of 50 snapshots one of five packages is unpacked anew (same content, other
    times)."""
    root = work / "root"
    root.mkdir()
    make_step(root, 2000, 60 * MIB)
    five = []
    for number in range(5):
        package = work / f"package{number}"
        package.mkdir()
        make_step(package, 300, 8 * MIB + number)
        for path in package.rglob("f*"):
            path.write_bytes(number.to_bytes(4, "big") + path.read_bytes())
        five.append(package)
    ours = Ours(work / "ours")
    ours.store(root, None, marks=False)
    ours.writer.flush()
    first = ours.packs_bytes()
    added = []
    for number in range(50):
        target = root / "site-packages" / f"p{number % 5}"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(five[number % 5], target)
        for path in target.rglob("*"):
            os.utime(path)
        (root / "log").write_text(f"step {number}\n")
        ours.store(root, None, marks=False)
        ours.writer.flush()
        added.append(ours.packs_bytes() - first - sum(added))
    alone = [Ours(work / f"alone{number}") for number in range(5)]
    once = 0
    for single, package in zip(alone, five, strict=True):
        single.store(package, None, marks=False)
        single.writer.flush()
        once += single.packs_bytes()
    return {
        "root_bytes": first,
        "five_packages_alone_bytes": once,
        "first_five_added_bytes": sum(added[:5]),
        "last_45_added_bytes": sum(added[5:]),
    }


def restore(work: Path) -> dict[str, Any]:
    """Back into an empty directory each; ours by a process of its own, cold caches for all.

    Nothing is removed between the runs: ext4 goes past every inode that was deleted in the last minute when it looks
    for a new one (`recently_deleted`), which made whoever came next three times as slow.
    """
    folder = work / "tree"
    folder.mkdir()
    make_step(folder, 50_000, 2048 * MIB)
    ours = Ours(work / "ours")
    tree = ours.store(folder, None, marks=False)
    ours.writer.flush()
    ours.writer.close()
    run("restic", "-q", "-r", work / "restic", "init")
    restic(work / "restic", "backup", ".", cwd=folder)
    seen: dict[str, list[float]] = {"ours": [], "restic": []}
    for number in range(3):
        for name in seen:
            target = work / f"{name}{number}"
            target.mkdir()
            run("sync")
            Path("/proc/sys/vm/drop_caches").write_text("3\n")
            if name == "ours":
                seen[name].append(timed(lambda target=target: _restore_ours(ours, tree, target)))
            else:
                seen[name].append(
                    timed(lambda target=target: restic(work / "restic", "restore", "latest", "--target", target))
                )
    return {
        "seconds": {name: min(values) for name, values in seen.items()},
        "times_restic": min(seen["restic"]) / min(seen["ours"]),
    }


def _restore_ours(ours: Ours, tree: TreeID, target: Path) -> None:
    reader = ours.reader()
    fd = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    with StoredView(reader, tree) as view:
        materialise(view, b"", fd)
    os.close(fd)
    reader.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="history,big,step,packages,restore")
    parser.add_argument("--git", type=Path, help="a git repository; without one `history` is left out")
    parser.add_argument("--commits", type=int, default=400)
    parser.add_argument("--tree", type=Path, help="what `step` stores")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dir", type=Path, help="where to work; default: a temporary directory")
    options = parser.parse_args()
    missing = [tool for tool in ("git", "restic", "borg") if shutil.which(tool) is None]
    if missing:
        sys.exit(f"missing: {', '.join(missing)} (Debian: apt-get install git restic borgbackup)")
    memory.keep_freed()  # as the archive worker does
    memory.collect_rarely()
    results: dict[str, Any] = {}
    for name in options.only.split(","):
        if name == "history" and options.git is None:
            continue
        with tempfile.TemporaryDirectory(dir=options.dir, prefix="snapshotd-bench-") as directory:
            work = Path(directory)
            more = {"history": (options.git, options.commits), "step": (options.tree,)}.get(name, ())
            results[name] = globals()[name](work, *more)
        print(name, json.dumps(results[name], indent=2), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
