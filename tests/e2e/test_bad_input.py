"""Bad input: one sentence saying what, which, why and what next; the right exit code; nothing changed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.support import Snap


def _says(snap: Snap, *args: str | Path, code: int, words: tuple[str, ...]) -> None:
    before = [t["id"] for t in snap.json("ls")]
    result = snap(*args, code=code)
    lines = [line for line in result.stderr.splitlines() if line]
    assert lines[-1].startswith("snapshotd: "), result.stderr
    for word in words:
        assert word in lines[-1], (word, lines[-1])
    assert "Traceback" not in result.stderr
    assert [t["id"] for t in snap.json("ls")] == before, "nothing was changed"


def test_unknown_and_ambiguous_ids(snap: Snap) -> None:
    for verb in ("show", "log", "stop", "diff"):
        _says(snap, verb, "feedfeedfeed", code=4, words=("feedfeedfeed",))
    _says(snap, "fork", "feedfeedfeed", code=4, words=("feedfeedfeed",))
    _says(snap, "cat", "feedfeedfeed:/x", code=4, words=("feedfeedfeed",))
    _says(snap, "exec", "feedfeedfeed", "--", "true", code=125, words=("feedfeedfeed",))
    _says(snap, "show", "../../etc/passwd", code=4, words=())


def test_agent_file_missing_or_no_file(snap: Snap, tmp_path: Path) -> None:
    _says(snap, "run", "--runtime", "runc", tmp_path / "nowhere.py", code=125, words=("nowhere.py", "No such file"))
    _says(snap, "run", "--runtime", "runc", tmp_path, code=125, words=("file",))


def test_missing_image_runtime_and_workspace(snap: Snap, tmp_path: Path) -> None:
    _says(snap, "create", "--runtime", "runc", "--image", "no-such-image", code=125, words=("no-such-image",))
    assert snap("create", "--runtime", "nonsense", code=125).stderr
    _says(snap, "create", "--runtime", "runc", "--workspace", tmp_path / "missing", code=125, words=("missing",))
    (tmp_path / "file").write_text("")
    _says(snap, "create", "--runtime", "runc", "--workspace", tmp_path / "file", code=125, words=("file",))


def test_a_workspace_with_odd_entries_is_taken_and_what_cannot_be_is_left(snap: Snap, tmp_path: Path) -> None:
    workspace = tmp_path / "w"
    workspace.mkdir()
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(workspace / "socket"))
    os.mkfifo(workspace / "fifo")
    os.symlink("/nowhere/at/all", workspace / "dangling")
    os.symlink("/etc/passwd", workspace / "outside")
    os.mknod(workspace / "device", 0o600 | 0o020000, os.makedev(1, 3))
    (workspace / os.fsdecode(b"\xff\n\x1b[31m")).write_bytes(b"odd")
    trajectory, first = snap.create("--runtime", "runc", "--workspace", workspace)
    names = snap.json(
        "exec", trajectory, "--", "python3", "-c", "import os; print(sorted(map(repr, os.listdir(b'.'))))"
    )["stdout"]
    assert "dangling" in names
    assert "\\xff\\n\\x1b[31m" in names.replace("\\\\", "\\")
    assert "'socket'" not in names.replace("b'", "'")
    assert "\x1b" not in snap("diff", first).stdout, "control characters are escaped for people"
    assert snap("exec", trajectory, "--", "readlink", "outside").stdout == "/etc/passwd\n"
    snap("rm", "--force", trajectory)
    server.close()


def test_command_exit_codes_are_dockers(snap: Snap, runtime: str) -> None:
    trajectory, _ = snap.create("--runtime", runtime)
    before = len(snap.json("log", trajectory))
    assert "no-such-program" in snap("exec", trajectory, "--", "no-such-program", code=127).stderr
    assert snap("exec", trajectory, "--", "/etc/passwd", code=126).stderr
    assert snap("exec", trajectory, "--", "/etc", code=126).stderr
    assert len(snap.json("log", trajectory)) == before, "a command that never ran leaves no snapshot"
    snap("exec", trajectory, "--", "sh", "-c", "exit 41", code=41)
    snap("exec", trajectory, "--", "sh", "-c", "kill -9 $$", code=137)
    snap("rm", "--force", trajectory)


def test_bad_values_are_refused_with_the_reason(snap: Snap) -> None:
    for option, value in (
        ("--memory", "lots"),
        ("--memory", "-1"),
        ("--cpus", "0"),
        ("--cpus", "nan"),
        ("--pids", "0"),
        ("--env", "=x"),
        ("--name", "../x"),
        ("--name", "a b"),
    ):
        assert snap("create", "--runtime", "runc", option, value, code=125).stderr, (option, value)


def test_names_and_tags_are_not_taken_twice(snap: Snap) -> None:
    trajectory, snapshot = snap.create("--runtime", "runc", "--name", "only-one")
    _says(snap, "create", "--runtime", "runc", "--name", "only-one", code=125, words=("only-one",))
    snap("tag", snapshot, "marked")
    other = snap.sh(trajectory, "true")["snapshot"]
    _says(snap, "tag", other, "marked", code=6, words=("marked",))
    snap("tag", "--move", other, "marked")
    assert snap.json("show", "marked")["id"] == other
    _says(
        snap,
        "rm",
        "--force",
        "marked",
        code=2,
        words=("marked", "snapshotd tag --delete marked", "snapshotd rm only-one"),
    )
    _says(snap, "rm", "--force", other[:12], code=2, words=(other[:12], "snapshotd rm only-one"))
    _says(snap, "tag", other, "only-one", code=6, words=("only-one",))
    _says(
        snap,
        "create",
        "--runtime",
        "runc",
        "--name",
        "marked",
        code=125,
        words=("marked", "snapshotd tag --delete marked"),
    )
    _says(snap, "fork", "only-one", "--name", "marked", code=6, words=("marked",))
    _says(snap, "rm", "only-one", code=6, words=("running",))
    (fork,) = snap.json("fork", "marked")["trajectories"]
    _says(snap, "rm", "--force", "only-one", code=6, words=("fork",))
    snap("rm", "--force", fork)
    snap("rm", "--force", "only-one")


def test_restore_does_not_touch_what_is_there(snap: Snap, tmp_path: Path) -> None:
    trajectory, snapshot = snap.create("--runtime", "runc")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    _says(snap, "restore", snapshot, "--to", tmp_path / "full", code=2, words=("not an empty directory",))
    assert os.listdir(tmp_path / "full") == ["mine"]
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    _says(snap, "restore", snapshot, "--to", tmp_path / "link", code=2, words=("link",))
    _says(snap, "restore", snapshot, "--to", tmp_path / "no" / "parent", code=2, words=("parent",))
    snap("rm", "--force", trajectory)


def test_a_second_daemon_is_told_about_the_first(snap: Snap) -> None:
    pid = snap.daemon_pid()
    result = snap("daemon", code=6)
    assert str(pid) in result.stderr
    assert str(snap.state_dir) in result.stderr
    assert snap.daemon_pid() == pid


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_not_root_is_said_clearly(tmp_path: Path) -> None:
    code = (
        "import os, sys; sys.path.insert(0, sys.argv.pop(1)); from snapshotd.cli.main import main\n"
        "import snapshotd.cli.commands.running.ls, snapshotd.client.autostart, snapshotd.client.client\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534); sys.exit(main())"
    )
    root = Path(__file__).parents[2]
    readable = subprocess.run(
        ["setpriv", "--reuid=65534", "--clear-groups", "test", "-r", str(root / "pyproject.toml")], check=False
    )
    if readable.returncode != 0:
        pytest.skip("the checkout cannot be read by another user")
    result = subprocess.run(
        [sys.executable, "-c", code, str(root), "--state-dir", str(tmp_path / "x"), "ls"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode in (8, 9), result.stderr
    assert "root" in result.stderr


@pytest.mark.long  # the sentence: unit/images/test_docker_unreachable.py
def test_no_docker_engine_is_said_with_the_fix(own_snap: Snap) -> None:
    snap = Snap(own_snap.state_dir, {**own_snap.env, "DOCKER_HOST": "unix:///nowhere/docker.sock"})
    snap.stop_daemon()
    result = snap("create", "--runtime", "docker", code=125)
    assert "/nowhere/docker.sock" in result.stderr
    made = json.loads(snap("create", "--runtime", "auto", "--json").stdout)
    assert snap.json("show", made["snapshot"])["id"] == made["snapshot"]
    snap("rm", "--force", made["trajectory"])
    snap.stop_daemon()


@pytest.mark.long  # its sentence: unit/test_config.py
def test_a_bad_setting_is_named_when_the_daemon_starts(own_snap: Snap) -> None:
    """By the command that would start one, and good ones are shown."""
    own_snap.stop_daemon()
    bad = Snap(own_snap.state_dir, {**own_snap.env, "SNAPSHOTD_WARM": "two"})("ls", code=2)
    assert bad.stderr == (
        "snapshotd: SNAPSHOTD_WARM is 'two', but it takes a whole number from 0 to 64; set that, or unset it for the default\n"
    )
    snap = Snap(own_snap.state_dir, {**own_snap.env, "SNAPSHOTD_WARM": "1", "SNAPSHOTD_OUTPUT_LIMIT": str(2 << 20)})
    trajectory, _ = snap.create("--runtime", "runc")
    settings = snap.json("daemon", "--status")["settings"]
    assert (settings["SNAPSHOTD_WARM"], settings["SNAPSHOTD_FORKS_AT_ONCE"]) == (1, 8)
    assert settings["SNAPSHOTD_STATE_DIR"] == str(snap.state_dir)
    lines = snap("daemon", "--status").stdout.splitlines()
    assert "SNAPSHOTD_WARM             1" in lines
    assert "SNAPSHOTD_LAYER_BUDGET     default" in lines
    printed = snap("exec", trajectory, "--json", "--", "head", "-c", "3145728", "/dev/zero")
    snapshot = json.loads(printed.stdout)["snapshot"]
    assert 2 << 20 <= len(snap("show", "--output", "stdout", snapshot).stdout) < (2 << 20) + (1 << 17)
    snap("rm", "--force", trajectory)
    snap.stop_daemon()


@pytest.mark.long  # the same disk below a client: system/test_disk_full.py
def test_a_full_disk_says_so_and_works_again_when_there_is_space(
    tmp_path: Path, root_tar: Path, engine_env: dict[str, str]
) -> None:
    image = tmp_path / "disk.img"
    with open(image, "wb") as f:
        f.truncate(1200 << 20)
    mount = tmp_path / "disk"
    mount.mkdir()
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(mount)], check=True)
    try:
        snap = Snap(mount / "state", engine_env)
        snap("image", "import", root_tar, "--name", "default")
        trajectory, _ = snap.create("--runtime", "runc", "--disk", "4G")  # more than there is: the disk is what ends it
        kept = snap.sh(trajectory, "echo kept > kept")["snapshot"]
        full = snap("exec", trajectory, "--", "sh", "-c", "head -c 2G /dev/zero | tr '\\0' x > big", code=None)
        assert full.returncode != 0
        assert "No space left" in full.stderr or "disk is full" in full.stderr
        assert snap("cat", f"{kept}:/workspace/kept").stdout == "kept\n"
        snap.kill_daemon()
        assert snap("cat", f"{kept}:/workspace/kept").stdout == "kept\n", "it starts again on a full disk"
        snap("rm", "--force", trajectory)
        again, _ = snap.create("--runtime", "runc")
        assert snap.sh(again, "echo works > f; cat f")["stdout"] == "works\n"
        snap("rm", "--force", again)
        snap.stop_daemon()
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)
