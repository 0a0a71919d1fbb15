"""Places for a state directory that are unlike others: it works there, or says in one sentence what stands in the way."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.hooked import Claude
from tests.e2e.support import Snap, ended, wait_until
from tests.loop_disk import loop_disk

pytestmark = pytest.mark.runc
NO_ENGINE = {"DOCKER_HOST": "unix:///run/snapshotd-no-such-engine.sock"}


@contextlib.contextmanager
def tmpfs(place: Path, options: str) -> Iterator[Path]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", place], check=True)
    try:
        yield place
    finally:
        # A daemon that could not start tells its client why before it ends.
        wait_until(lambda: subprocess.run(["umount", place], check=False).returncode == 0, "nobody uses it any more")


@pytest.mark.parametrize("kind", ["tmpfs", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("xfs", "ext4"))])
def test_a_place_in_memory_or_from_which_nothing_may_be_executed(kind: str, tmp_path: Path) -> None:
    """Programs of sandboxes run all the same: the mount of a sandbox's root is its own. A machine with nothing but Python
    and the packages of `setup` has the image at once."""
    with contextlib.ExitStack() as opened:
        if kind == "tmpfs":
            place = opened.enter_context(tmpfs(tmp_path, "size=1g,noexec,nosuid,nodev"))
        else:
            place = opened.enter_context(loop_disk(kind, 1500 << 20)).mount_point
            subprocess.run(["mount", "-o", "remount,noexec,nosuid,nodev", place], check=True)
        snap = opened.enter_context(ended(Snap(place / "state", NO_ENGINE)))
        said = snap("create", "--image", "minimal", "--name", "box").stderr
        assert said == "snapshotd: making the image minimal of this machine's own programs\n"
        script = "cp /bin/sh own; ./own -c 'echo ran'; mkdir d; echo one > d/f"
        assert snap.sh("box", script)["stdout"] == "ran\n"
        first = snap.json("log", "box")[-1]["id"]
        assert snap.sh("box", "mv d e; ls")["stdout"] == "e\nown\n"
        snap("rewind", "box", first)
        assert snap.sh("box", "./own -c 'cat d/f'")["stdout"] == "one\n"
        snap("fork", "box", "--name", "other")
        assert snap.sh("other", "cat d/f")["stdout"] == "one\n"


@pytest.mark.long  # later: system/test_disk_full.py
def test_a_disk_that_is_full_before_the_first_start(tmp_path: Path) -> None:
    with tmpfs(tmp_path, "size=4m") as place:
        with contextlib.suppress(OSError), open(place / "filler", "wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
        snap = Snap(place / "state", NO_ENGINE)
        failed = snap("create", "--image", "minimal", code=125)
        assert "because the disk is full: free some space and try again" in failed.stderr
        (place / "filler").unlink()
        with ended(snap):
            assert snap("ls").returncode == 0
            failed = snap("create", "--image", "minimal", code=125)  # a disk of 4 MiB
            assert "the image minimal cannot be written" in failed.stderr
            assert "No space left on device" in failed.stderr


@pytest.mark.long  # hooks without an image: test_hooks.py
def test_hooks_and_restores_need_no_image(tmp_path: Path) -> None:
    """On a machine that has never made one, and cannot: it has no mirror, and no place to keep one."""
    builds = tmp_path / "builds"
    builds.write_text("no folder")
    with ended(Snap(tmp_path / "state", NO_ENGINE | {"SNAPSHOTD_IMAGE_BUILDS": str(builds)})) as snap:
        snap("ls")  # starts it
        (folder := tmp_path / "project").mkdir()
        claude = Claude(snap, folder)
        claude.says("make a note")
        claude.call("echo one > note")
        last = claude.steps()[-1]["id"]
        snap("restore", last, "--to", tmp_path / "out")
        assert snap("cat", f"{last}:note").stdout == "one\n"
        snap("export", claude.trajectory, "--output", tmp_path / "bundle")
        assert {image["source"] for image in snap.json("image", "ls")} == {"nothing, for what was imported"}
    with ended(Snap(tmp_path / "other", NO_ENGINE)) as snap:
        snap("import", tmp_path / "bundle")
        snap("restore", last, "--to", tmp_path / "again")
        assert [path.name for path in (tmp_path / "again").rglob("note")] == ["note"]
