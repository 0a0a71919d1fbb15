"""Builds that are kept for other state directories: taken once they are there, whole and ours; else built again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from snapshotd.errors import OutOfSpace
from snapshotd.images.shared import SharedBuilds
from tests.capabilities import require

KEY = "a" * 64


class Wanting:
    """A state directory that needs a build."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.built = 0
        self.said: list[str] = []

    def build(self) -> None:
        self.built += 1
        (self.root / "usr/bin").mkdir(parents=True)
        (self.root / "bin").symlink_to("usr/bin")
        program = self.root / "usr/bin/su"
        program.write_bytes(b"#!" * 50_000)
        program.chmod(0o4755)
        os.setxattr(program, "user.note", b"kept")
        os.link(program, self.root / "usr/bin/other")
        os.utime(program, ns=(1, 1_700_000_000_123_456_789))
        self.root.chmod(0o711)

    def fill(self, builds: SharedBuilds, key: str = KEY) -> Wanting:
        self.root.mkdir(parents=True)
        builds.fill(key, self.root, self.build, self.said.append)
        return self

    def check(self) -> None:
        program = self.root / "usr/bin/su"
        st = program.stat()
        assert (st.st_mode & 0o7777, st.st_nlink, st.st_mtime_ns) == (0o4755, 2, 1_700_000_000_123_456_789)
        assert os.getxattr(program, "user.note") == b"kept"
        assert os.readlink(self.root / "bin") == "usr/bin"
        assert self.root.stat().st_mode & 0o7777 == 0o711
        assert sorted(os.listdir(self.root)) == ["bin", "usr"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "images"


@pytest.fixture
def builds(folder: Path) -> SharedBuilds:
    return SharedBuilds(folder)


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.tar.zst"))


def test_the_second_state_directory_takes_what_the_first_one_built(
    builds: SharedBuilds, folder: Path, tmp_path: Path
) -> None:
    assert Wanting(tmp_path / "one").fill(builds).built == 1
    second = Wanting(tmp_path / "two").fill(SharedBuilds(folder))
    assert second.built == 0
    second.check()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [file.stat().st_mode & 0o777 for file in kept(folder)] == [0o600]
    assert Wanting(tmp_path / "three").fill(builds, "b" * 64).built == 1


def test_the_second_of_two_at_once_waits_and_finds_it(builds: SharedBuilds, tmp_path: Path) -> None:
    first, second = Wanting(tmp_path / "one"), Wanting(tmp_path / "two")
    begun, end = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        assert end.wait(60)
        first.build()

    first.root.mkdir()
    one = threading.Thread(target=lambda: builds.fill(KEY, first.root, slow, first.said.append))
    two = threading.Thread(target=lambda: second.fill(builds))
    one.start()
    assert begun.wait(60)
    two.start()
    deadline = time.monotonic() + 60
    while not second.said:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "waiting for it" in second.said[0]
    other = Wanting(tmp_path / "three").fill(builds, "b" * 64)
    assert other.built == 1, "another build waits for none"
    end.set()
    one.join(60)
    two.join(60)
    assert (first.built, second.built) == (1, 0)
    second.check()


def test_who_is_killed_while_it_builds_holds_nobody_up(builds: SharedBuilds, folder: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from snapshotd.images.shared import SharedBuilds\n"
        f"SharedBuilds(Path({str(folder)!r})).fill({KEY!r}, Path({str(tmp_path)!r}), "
        "lambda: (print('building', flush=True), sys.stdin.read()), print)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"building\n"
        process.kill()
    (folder / f"{KEY}.part").write_bytes(b"half of it")
    one = Wanting(tmp_path / "one").fill(builds)
    assert (one.built, one.said) == (1, [])
    assert sorted(path.name for path in folder.iterdir()) == sorted([kept(folder)[0].name, "lock"])


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "exchanged"])
def test_a_damaged_build_is_made_again(builds: SharedBuilds, folder: Path, tmp_path: Path, damage: str) -> None:
    Wanting(tmp_path / "one").fill(builds)
    (file,) = kept(folder)
    data = file.read_bytes()
    if damage == "exchanged":  # a whole build, but another one
        Wanting(tmp_path / "other").fill(builds, "b" * 64)
        shutil.rmtree(tmp_path / "other")
        (tmp_path / "other").mkdir()
        subprocess.run(["tar", "-C", tmp_path / "other", "--zstd", "-cf", tmp_path / "tar", "."], check=True)
        data = (tmp_path / "tar").read_bytes()
    changed = {"flipped": data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], "cut": data[:-9], "empty": b""}
    file.write_bytes(changed.get(damage, data))
    again = Wanting(tmp_path / "again").fill(builds)
    assert again.built == 1
    assert "damaged" in again.said[-1]
    again.check()
    after = Wanting(tmp_path / "after").fill(builds)
    assert after.built == 0
    after.check()


def test_an_old_build_is_made_again(builds: SharedBuilds, folder: Path, tmp_path: Path) -> None:
    """Its packages have had security updates."""
    Wanting(tmp_path / "one").fill(builds)
    (file,) = kept(folder)
    os.utime(file, (time.time(), time.time() - 15 * 86400))
    assert Wanting(tmp_path / "two").fill(builds).built == 1
    assert Wanting(tmp_path / "three").fill(builds).built == 0


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o707])
def test_a_directory_that_is_open_to_others_is_not_used(
    builds: SharedBuilds, folder: Path, tmp_path: Path, mode: int
) -> None:
    folder.mkdir(parents=True)
    folder.chmod(mode)
    one = Wanting(tmp_path / "one").fill(builds)
    assert (one.built, one.said) == (
        1,
        [f"builds in {folder} are not used: it belongs to another user, or is open to others"],
    )
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_directory_or_build_of_another_user_is_not_used(builds: SharedBuilds, folder: Path, tmp_path: Path) -> None:
    Wanting(tmp_path / "one").fill(builds)
    (file,) = kept(folder)
    os.chown(file, 1234, 1234)
    two = Wanting(tmp_path / "two").fill(builds)
    assert two.built == 1
    assert kept(folder)[0].stat().st_uid == 0
    os.chown(folder, 1234, 1234)
    three = Wanting(tmp_path / "three").fill(builds)
    assert three.built == 1
    assert "belongs to another user" in three.said[0]


def test_a_link_is_not_followed(builds: SharedBuilds, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.parent.mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    assert Wanting(tmp_path / "one").fill(builds).built == 1
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_what_was_used_least_lately_goes_when_there_is_too_much(folder: Path, tmp_path: Path) -> None:
    Wanting(tmp_path / "measure").fill(SharedBuilds(tmp_path / "m" / "images"))
    (one,) = kept(tmp_path / "m" / "images")
    builds = SharedBuilds(folder, limit_bytes=one.stat().st_size * 5 // 2)
    for key in "abc":
        if key == "c":
            assert Wanting(tmp_path / "used").fill(builds, "a" * 64).built == 0
        Wanting(tmp_path / key).fill(builds, key * 64)
    assert [file.name[0] for file in kept(folder)] == ["a", "c"]


def test_a_failed_build_keeps_nothing(builds: SharedBuilds, folder: Path, tmp_path: Path) -> None:
    def fail() -> None:
        raise OutOfSpace("the disk is full")

    with pytest.raises(OutOfSpace):
        builds.fill(KEY, tmp_path, fail, print)
    assert kept(folder) == []


@pytest.mark.timeout(60)
def test_a_disk_that_is_full_is_said_at_once(builds: SharedBuilds, tmp_path: Path) -> None:
    """tar says a line for each of the files that it cannot write: more than a pipe holds."""
    require("root")

    class Large(Wanting):
        def build(self) -> None:
            for number in range(5000):
                (self.root / f"a-name-of-some-length-{number:060}").write_bytes(os.urandom(600))

    Large(tmp_path / "one").fill(builds)
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "shared-test", str(small)], check=True)
    try:
        with pytest.raises(OutOfSpace, match="the disk is full"):
            Large(small / "two").fill(builds)
    finally:
        subprocess.run(["umount", str(small)], check=True)
