"""What an agent changed comes home: `apply` from a real sandbox to a folder that went on changing."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.client import Snapshot, Snapshotd
from tests.e2e.support import Snap, daemon_with

pytestmark = pytest.mark.runc

TEXT = "".join(f"line {number}\n" for number in range(9))


@pytest.fixture(scope="module")
def place(small_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Snap]:
    with daemon_with(small_root, tmp_path_factory.mktemp("apply") / "state") as snap:
        yield snap


def git(where: Path, *args: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@t")
    done = subprocess.run(["git", "-C", str(where), *identity, *args], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The user's folder, a git repository."""
    home = tmp_path / "home"
    home.mkdir()
    for name in ("app.txt", "old.txt", "keep.txt"):
        (home / name).write_text(TEXT)
    (home / "data.bin").write_bytes(b"\0one")
    git(home, "init", "-q")
    git(home, "config", "user.name", "t")
    git(home, "config", "user.email", "t@t")
    git(home, "add", ".")
    git(home, "commit", "-qm", "first")
    return home


WORK = r"""set -e
perl -pi -e 's/line 1$/line one/' app.txt
mv old.txt new.txt
printf '\000two' > data.bin
mkdir -p lib && echo lib > lib/x && ln -s ../app.txt lib/link && ln -s /etc/passwd passwd
mknod pipe p
cp keep.txt tool && chmod 4755 tool
mkdir -p .git/hooks && echo 'touch /pwned' > .git/hooks/post-commit
echo elsewhere > /tmp/elsewhere
echo raw > "$(printf 'b\377d')"
"""


def test_a_clean_merge_with_a_commit_and_then_a_conflict(place: Snap, home: Path) -> None:
    trajectory, first = place.create("--runtime", "runc", "--workspace", home)
    done = place.sh(trajectory, WORK)["snapshot"]
    everything = place.json("apply", done, "--to", home, "--path", "/", "--base", first, "--dry-run", code=6)
    assert "tmp/elsewhere" in {item["path"] for item in everything["changes"]}
    (home / "app.txt").write_text(TEXT.replace("line 7", "line seven"))
    (home / "mine.txt").write_text("mine")
    git(home, "add", "mine.txt")
    listed = [
        "A b\\xffd",
        "A lib/",
        "A lib/link@",
        "A lib/x",
        "A new.txt",
        "A tool",
        "D old.txt",
        "M app.txt  (merged)",
        "M data.bin",
    ]

    before = (home / "app.txt").read_text()
    preview = place("apply", done, "--to", home, "--dry-run")
    assert sorted(preview.stdout.splitlines()) == listed
    assert "9 changes would be applied" in preview.stderr
    assert ((home / "app.txt").read_text(), (home / "new.txt").exists()) == (before, False)

    applied = place("apply", done, "--to", home, "--commit", "Take the work home")
    assert sorted(applied.stdout.splitlines()) == listed
    for warning in ("passwd: a link that leads out", "pipe: a fifo", "tool: its set-user-id"):
        assert f"warning: {warning}" in applied.stderr
    assert "in .git directories, which could run" in applied.stderr
    assert (home / "app.txt").read_text() == TEXT.replace("line 7", "line seven").replace("line 1\n", "line one\n")
    assert (home / "data.bin").read_bytes() == b"\0two"
    assert (os.readlink(home / "lib" / "link"), (home / "lib" / "x").read_text()) == ("../app.txt", "lib\n")
    assert (home / "tool").stat().st_mode & 0o7777 == 0o755
    assert sorted(os.listdir(bytes(home))) == sorted(
        [b".git", b"app.txt", b"b\xffd", b"data.bin", b"keep.txt", b"lib", b"mine.txt", b"new.txt", b"tool"]
    )
    message = git(home, "log", "-1", "--format=%B")
    assert message.startswith("Take the work home\n")
    assert f"Snapshotd-Trajectory: {trajectory}\nSnapshotd-Snapshot: {done}\n" in message
    assert git(home, "status", "--porcelain") == "A  mine.txt\n"

    again = place.json("apply", done, "--to", home, "--commit")
    assert (again["changes"], again["conflicts"], again["commit"], again["base"]) == ([], [], None, first)
    assert again["applied"] is True

    place.sh(trajectory, "perl -pi -e 's/line 3/line three/' app.txt; echo x > lib/y")
    (home / "app.txt").write_text((home / "app.txt").read_text().replace("line 3", "line III"))
    before = (home / "app.txt").read_text()
    refused = place("apply", trajectory, "--to", home, "--base", done, code=6)
    assert refused.stdout.splitlines() == ["A lib/y", "C app.txt  (changed on both sides in the same lines)"]
    assert "1 conflict: nothing was written" in refused.stderr
    told = place.json("apply", trajectory, "--to", home, "--base", done, code=6)
    assert (told["applied"], [item["path"] for item in told["conflicts"]]) == (False, ["app.txt"])
    assert ((home / "app.txt").read_text(), (home / "lib" / "y").exists()) == (before, False)

    place("apply", trajectory, "--to", home / "lib", "--path", "/workspace/lib", "--base", done)
    assert (home / "lib" / "y").read_text() == "x\n"
    place("rm", "--force", trajectory)


def test_a_forks_changes_are_those_since_the_workspace_was_copied_in(place: Snap, home: Path) -> None:
    trajectory, first = place.create("--runtime", "runc", "--workspace", home)
    place.sh(trajectory, "echo 1 > one")
    fork = place.json("fork", trajectory)["trajectories"][0]
    fork = fork["id"] if isinstance(fork, dict) else fork
    place.sh(fork, "echo 2 > two")
    client = Snapshotd(state_dir=place.state_dir, autostart=False)
    done = Snapshot.get(fork, client=client).apply(home)
    assert (done.base, sorted(item.path for item in done.changes)) == (first, [b"one", b"two"])
    place("stop", fork, trajectory)
    place("rm", "--force", fork)
    place("rm", "--force", trajectory)


def test_what_makes_no_sense(place: Snap, home: Path) -> None:
    trajectory, _ = place.create("--runtime", "runc", "--workspace", home)
    place.sh(trajectory, "echo 1 > one")
    for args, code, said in (
        (("--to", home / "missing"), 2, "No such file or directory; name one that exists"),
        (("--to", home / "app.txt"), 2, "Not a directory"),
        (("--to", home, "--path", "/workspace/app.txt"), 2, "is a file; apply takes directories"),
        (("--to", home, "--path", "/nowhere"), 4, "does not exist"),
        (("--to", home, "--path", "/workspace/../etc"), 2, ".."),
        (("--to", home, "--base", "nobody"), 4, "nobody"),
        (("--to", home.parent, "--commit", "m", "--dry-run"), 2, "not a git repository"),
        (("--to", home.parent, "--commit"), 2, "not a git repository"),
    ):
        refused = place("apply", trajectory, *args, code=code)
        assert said in refused.stderr, args
    assert sorted(os.listdir(home)) == [".git", "app.txt", "data.bin", "keep.txt", "old.txt"]
    place("rm", "--force", trajectory)
