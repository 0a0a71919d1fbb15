"""Paths of this machine mean what they mean to the client, also where the daemon does not see what is mounted there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.support import Snap

pytestmark = pytest.mark.runc

AGENT = """# /// script
# dependencies = []
# ///
print(open("/workspace/seen").read())
"""
MOUNT = 'set -e; mount -t tmpfs own "$1"; mkdir "$1/ws" "$1/disk"; mount -t tmpfs disk "$1/disk"; echo ready; read _'
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder on which another file system is mounted where the daemon cannot see it. It holds what lies behind."""
    (tmp_path / "place/ws").mkdir(parents=True)
    (tmp_path / "place/ws/seen").write_text("behind the mount")
    return tmp_path / "place"


@pytest.fixture
def there(snap: Snap, place: Path) -> Iterator[Run]:
    """Runs a program in the mount namespace that has the mount, in that folder."""
    snap("ls")  # the daemon runs before anything is mounted
    own = ["unshare", "--mount", "--propagation", "private", "sh", "-c", MOUNT, "sh", str(place)]
    with subprocess.Popen(own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"

        def run(*argv: str, code: int = 0, text: str | None = None) -> subprocess.CompletedProcess[str]:
            done = subprocess.run(
                ["nsenter", "--mount", f"--target={holder.pid}", "sh", "-c", 'cd "$0"; exec "$@"', str(place), *argv],
                env=snap.env,
                input=text or "",
                capture_output=True,
                text=True,
                timeout=snap.timeout_s,
            )
            assert done.returncode == code, (argv, done.stdout, done.stderr)
            return done

        yield run
        holder.stdin.close()


def test_paths_below_a_mount_that_the_daemon_does_not_see(snap: Snap, place: Path, there: Run) -> None:
    def snapshotd(*args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        return there(sys.executable, "-m", "snapshotd", *args, code=code)

    def write(name: str, text: str) -> None:
        there("tee", name, text=text)

    write("ws/seen", "above")
    write("ws/inside.py", AGENT)
    write("agent.py", AGENT)
    write("requirements.txt", "# nothing\n")
    there("ln", "-s", "ws", "link")
    made = json.loads(snapshotd("create", "--json", "--runtime", "runc", "--workspace", "ws").stdout)
    assert snap("cat", f"{made['snapshot']}:seen").stdout == "above"
    for agent in (["ws/inside.py"], ["--requirements", "requirements.txt", "agent.py"]):
        assert snapshotd("run", "-q", "--runtime", "runc", "--workspace", "link", *agent).stdout == "above\n"
    called = [line["agent"]["argv"][1] for line in snap.json("ls")[-2:]]
    assert sorted(called) == ["/agent/agent.py", "/workspace/inside.py"]

    head = made["snapshot"]
    there("mkdir", "empty")
    for target in ("new", "empty", "disk/new"):
        snapshotd("restore", head, "--to", target)
        assert there("cat", f"{target}/workspace/seen").stdout == "above"
    assert "name a new directory in it" in snapshotd("restore", head, "--to", "disk", code=2).stderr
    assert "not an empty directory" in snapshotd("restore", head, "--to", "link", code=2).stderr
    snapshotd("export", head, "--format", "tar", "-o", "out.tar")
    assert there("tar", "-xOf", "out.tar", "workspace/seen").stdout == "above"

    assert [path.name for path in place.iterdir()] == ["ws"]
    assert (place / "ws/seen").read_text() == "behind the mount"
