"""A folder in which the kernel says that nothing has changed is not looked at, and no change is missed: a watched index
and one that looks at every file find the same."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.engine.folders import quiet, scan
from snapshotd.engine.folders.scan import FolderIndex, FolderScan, open_file, settled_mark
from snapshotd.kernel import fanotify
from snapshotd.kernel.identity import HostUser, acting_as
from tests import long
from tests.capabilities import require

ROOT, NOBODY = HostUser(0, 0), HostUser(65534, 65534)
FILES = ("a", "d/b", "d/e/c")
OTHER = """
import mmap, os, sys
kept = []
for line in sys.stdin:
    exec(line)
    print(flush=True)
"""


class Other:
    """A process that runs statements of Python in the folder: a daemon's own openings are no events."""

    def __init__(self, folder: Path, user: HostUser) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder
        )
        self(f"os.setgroups([]); os.setgid({user.gid}); os.setuid({user.uid})")

    def __call__(self, statement: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(statement + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "\n", statement

    def close(self) -> None:
        self._process.communicate()


class Watched:
    """A folder with both kinds of index."""

    def __init__(self, folder: Path, user: HostUser = ROOT) -> None:
        self.folder, self.user = folder, user
        for name in FILES:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("as it was\n" * 500)
        (folder / "l").symlink_to("a")
        for path in (folder, *folder.rglob("*")):
            os.chown(path, user.uid, user.gid, follow_symlinks=False)
        self.root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self.watch, self.index, self.plain = quiet.FolderWatch(), CountedIndex(), FolderIndex()
        self.run = Other(folder, user)

    def hook(self) -> set[str]:
        """What has changed since the last one. Both find it."""
        found = self.watch.scan(self.root, self.user, self.index)
        with acting_as(self.user):
            wanted = self.plain.scan(self.root)
        for index, one in ((self.index, found), (self.plain, wanted)):
            self._take(index, one)
        assert (set(found.changed), found.deleted) == (set(wanted.changed), wanted.deleted)
        return {*found.changed, *found.deleted}

    def settle(self) -> None:
        """Hooks until one needs no look: files that changed just now are looked at until the clock has gone on."""
        until = time.monotonic() + 30
        looks = -1
        while looks != self.index.looks:
            looks = self.index.looks
            self.hook()
            assert time.monotonic() < until, "every hook looks at every file"

    def is_quiet(self) -> bool:
        looks = self.index.looks
        assert self.hook() == set()
        return looks == self.index.looks

    def close(self) -> None:
        self.run.close()
        self.watch.close()
        os.close(self.root)

    def _take(self, index: FolderIndex, found: FolderScan) -> None:
        """As a snapshot does."""
        for path in found.deleted:
            index.note_captured(path, None)
        for path, mark in found.changed.items():
            if stat.S_ISREG(mark[0]):
                directory = os.open(os.path.dirname(path) or ".", os.O_RDONLY, dir_fd=self.root)
                fd = open_file(directory, os.path.basename(path))
                index.note_captured(path, *settled_mark(fd, os.fstat(fd)))
                os.close(fd)
                os.close(directory)
            else:
                index.note_captured(path, mark)
        index.note_compared()


class CountedIndex(FolderIndex):
    looks = 0

    def scan(self, root: int) -> FolderScan:
        self.looks += 1
        return super().scan(root)


@pytest.fixture(params=[ROOT, NOBODY], ids=["root", "user"])
def watched(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Watched]:
    require("root")
    for path in tmp_path, *list(tmp_path.parents)[:3]:
        path.chmod(0o755)
    (tmp_path / "folder").mkdir()
    found = Watched(tmp_path / "folder", request.param)
    (tmp_path / "beside").mkdir()
    os.chown(tmp_path / "beside", request.param.uid, request.param.gid)
    yield found
    found.close()


WAYS = {
    "write": ["open('d/b', 'r+').write('x')"],
    "truncate": ["os.truncate('d/b', 1)"],
    "mode": ["os.chmod('d/e/c', 0o600)"],
    "mode of a directory": ["os.chmod('d/e', 0o700)"],
    "time of a link": ["os.utime('l', (1, 1), follow_symlinks=False)"],
    "new file": ["open('d/e/new', 'x')"],
    "new directory": ["os.mkdir('d/e/new')"],
    "new deep file": ["os.makedirs('x/y'); open('x/y/z', 'x')"],
    "deleted": ["os.unlink('d/b')"],
    "replaced": ["open('d/.new', 'x').write('other'); os.rename('d/.new', 'd/b')"],
    "another file with its number": ["os.unlink('d/b'); open('d/b', 'x')", "open('d/b', 'r+').write('x')"],
    "another directory with its number": ["os.mkdir('d/n')", "os.rmdir('d/n'); os.mkdir('d/n')", "open('d/n/x', 'x')"],
    "directory renamed": ["os.rename('d/e', 'd/f')", "open('d/f/c', 'r+').write('x')"],
    "moved out": ["os.rename('d/e', '../beside/e')"],
    "moved in": ["os.mkdir('../beside/in')", "os.rename('../beside/in', 'd/in')", "open('d/in/x', 'x')"],
    "other target": ["os.unlink('l'); os.symlink('b', 'l')"],
    "time set back": ["at = os.stat('a').st_mtime_ns; open('a', 'r+').write('x'); os.utime('a', ns=(at, at))"],
    "through a link outside": ["os.link('a', '../beside/a')", "open('../beside/a', 'r+').write('x')"],
    "through a mapping that is gone": [
        "f = open('a', 'r+b'); m = mmap.mmap(f.fileno(), 0); f.close(); m[0] = 7; m.close()"
    ],
    "rules": ["open('.gitignore', 'x').write('d/b\\n')", "os.unlink('.gitignore')"],
    "rules that ignore themselves": [
        "open('d/.gitignore', 'x').write('.gitignore\\nnew\\n'); open('d/new', 'x')",
        "open('d/.gitignore', 'w').write('.gitignore\\n')",
    ],
}
"""Statements of another process. The last one is a change; before each of them, hooks need no look."""
WRITERS = {
    "open": ["f = open('a', 'r+b', buffering=0)", "f.write(b'x')", "f.close()"],
    "mapped": ["f = open('a', 'r+b'); m = mmap.mmap(f.fileno(), 0); f.close()", "m[0] = 7", "m.close()"],
    "written and mapped": [
        "f = open('a', 'r+b', buffering=0); f.write(b'x'); m = mmap.mmap(f.fileno(), 0); f.close()",
        "m[4000] = 7",
        "m.close()",
    ],
}
"""Statements of another process: it gets hold of a file, changes it, and lets it go."""


@pytest.mark.parametrize("way", WAYS)
def test_a_change_is_found_in_whatever_way_it_is_made(watched: Watched, way: str) -> None:
    for statement in WAYS[way]:
        watched.settle()
        assert watched.is_quiet()
        watched.run(statement)
    assert watched.hook()


@pytest.mark.parametrize("begun", ["before", "meanwhile"])
@pytest.mark.parametrize("way", WRITERS)
def test_a_writer_that_stays_is_in_doubt_until_it_goes(watched: Watched, way: str, begun: str) -> None:
    """`begun`: before the first hook, or later."""
    hold, change, let_go = WRITERS[way]
    if begun == "meanwhile":
        watched.settle()
    watched.run(hold)
    for _ in range(5):
        looks = watched.index.looks
        watched.hook()
        assert watched.index.looks > looks
    watched.run(change)
    assert watched.hook() == {"a"}
    watched.run(let_go)
    watched.settle()


def test_reading_is_no_reason_to_look(watched: Watched) -> None:
    watched.settle()
    watched.run("[open(name).read() for name in ('a', 'd/b', 'd/e/c')]; os.listdir('d')")
    assert watched.is_quiet()


def test_another_directory_that_is_mounted_over_one_is_looked_at(watched: Watched) -> None:
    (watched.folder.parent / "beside" / "c").write_text("of another directory\n")
    watched.settle()
    mount = ("mount", "--bind", watched.folder.parent / "beside", watched.folder / "d" / "e")
    subprocess.run(mount, check=True)
    try:
        assert watched.hook() == {"d/e/c"}
    finally:
        subprocess.run(["umount", watched.folder / "d" / "e"], check=True)
    assert watched.hook() == {"d/e/c"}


def test_what_cannot_be_watched_is_looked_at(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MOST_MARKS", 3), ("_LOCAL", ())):
        watched.settle()
        monkeypatch.setattr(quiet if name == "MOST_MARKS" else fanotify, name, value)
        watched.run("open('d/b', 'a').write('x')")
        assert watched.hook() == {"d/b"}
        assert not watched.is_quiet()
        assert not watched.is_quiet()
        monkeypatch.undo()


def test_what_a_scan_left_out_is_looked_at(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "LARGEST_FILE_BYTES", 6000)
    watched.run("open('d/big', 'x').write('x' * 7000)")
    for _ in range(5):
        watched.hook()
    watched.run("os.truncate('d/big', 5000)")
    assert watched.hook() == {"d/big"}


@pytest.mark.long  # making so many takes a quarter of a minute
def test_more_events_than_the_kernel_keeps(watched: Watched) -> None:
    watched.settle()
    count = int(Path("/proc/sys/fs/fanotify/max_queued_events").read_text())
    if count > 20_000:
        pytest.skip("this machine keeps more events than a test can make")
    watched.run(f"[(os.mkdir('d/n%d' % n), os.rmdir('d/n%d' % n)) for n in range({count})]; os.mkdir('d/last')")
    assert watched.hook() == {"d/last"}
    watched.settle()


def test_the_watches_that_were_used_last_keep_their_marks(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "MOST_WATCHED", 1)
    watches = quiet.Watches()
    watches.use(watched.watch, 0)
    watched.settle()
    watches.use(quiet.FolderWatch(), 0)
    assert not watched.is_quiet()
    watched.settle()
    watches.close()


def test_random_changes_between_random_hooks(watched: Watched) -> None:
    chance = random.Random(long.SEED)
    names = ["a", "b", "d/a", "d/b", "d/e/c", "d/.gitignore", "x/a", "../beside/a"]

    def name() -> str:
        return repr(chance.choice(names))

    def statement() -> str:
        return chance.choice(
            [
                f"open({name()}, 'w').write('{chance.choice(['x', 'yy', 'b'])}\\n')",
                f"os.unlink({name()})",
                f"os.rename({name()}, {name()})",
                f"os.link({name()}, {name()})",
                f"os.symlink('a', {name()})",
                f"os.chmod({name()}, 0o{chance.choice([600, 644, 755])})",
                f"os.rename('{chance.choice(['d', 'd/e', 'x'])}', '{chance.choice(['x', 'd', 'd/e'])}')",
                f"os.mkdir('{chance.choice(['d', 'd/e', 'x'])}')",
                f"kept.append(open({name()}, 'r+b', buffering=0))",
                f"kept.append(mmap.mmap(open({name()}, 'r+b').fileno(), 0))",
                "kept[0].write(b'z')",
                "kept.pop().close()",
                f"open({name()}).read()",
            ]
        )

    for _ in range(long.size(1000, 20_000)):
        for _ in range(chance.randrange(4)):
            watched.run(f"exec({ATTEMPT.format(statement())!r})")
        watched.hook()
    watched.run("[one.close() for one in kept]; kept.clear()")
    watched.settle()


ATTEMPT = """
try:
    {}
except (OSError, ValueError, IndexError):
    pass
"""


def test_the_watches_of_a_user_take_no_others_place() -> None:
    class Watch:
        closed = False

        def close(self) -> None:
            self.closed = True

    watches = quiet.Watches(12)
    users = [(uid, Watch()) for uid in (0, 1, *[2] * 20, 3, *[2] * 20, *range(4, 8))]
    for uid, watch in users:
        watches.use(watch, uid)
    kept = [uid for uid, watch in users if not watch.closed]
    assert kept == [0, 1, 3, *[2] * 6, *range(4, 8)]
    roots = [Watch() for _ in range(9)]
    for watch in roots:
        watches.use(watch, 0)
    assert [watch.closed for watch in roots] == [True, *[False] * 8]
    assert sum(not watch.closed for uid, watch in users if uid) == 12
    watches.close()
