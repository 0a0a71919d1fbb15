"""`exec` as a user sees it: who runs the command."""

from __future__ import annotations

from tests.e2e.support import Snap, wait_until

FILL = """
import os, sys, time
filler = os.fork() == 0
while True:
    try:
        if os.fork() == 0:
            time.sleep(1000)
    except OSError:
        if not filler:
            sys.exit(2)
        time.sleep(0.01)
"""
"""Takes every process that the sandbox may have, and again what becomes free."""


def test_a_command_runs_as_a_user_named_in_the_sandbox(snap: Snap, runtime: str) -> None:
    trajectory, _ = snap.create("--runtime", runtime)
    snap.sh(trajectory, "echo worker:x:4321:4322::/home/worker:/bin/sh >> /etc/passwd")
    snap.sh(trajectory, "echo extra:x:77: >> /etc/group; echo more:x:78:a,worker >> /etc/group")
    look = ("--", "sh", "-c", "id -u; id -g; id -G; echo $HOME")

    def seen(user: str, *place: str) -> list[str]:
        return snap("exec", "-u", user, *(place or (trajectory,)), *look).stdout.split("\n")[:-1]

    assert seen("worker") == seen("4321") == ["4321", "4322", "4322 78", "/home/worker"]
    assert seen("worker:extra") == ["4321", "77", "77", "/home/worker"]
    assert seen("4000:78") == ["4000", "78", "78", "/"]
    assert seen("nobody")[0] == "65534"
    assert seen("root")[0] == "0"
    head = snap.json("log", trajectory)[-1]["id"]
    assert seen("worker", "--snapshot", head) == seen("worker")

    before = len(snap.json("log", trajectory))
    for user, words in (
        ("stranger", "stranger"),
        ("worker:strangers", "strangers"),
        (":extra", ":extra"),
        ("99999999999", "99999999999"),
    ):
        refused = snap("exec", "-u", user, trajectory, "--", "true", code=125).stderr
        assert refused.startswith("snapshotd: "), refused
        assert words in refused, refused
    snap.sh(trajectory, "ln -sf /proc/self/environ /etc/group; rm /etc/passwd; ln -s /dev/tty /etc/passwd")
    assert "/etc/passwd" in snap("exec", "-u", "worker", trajectory, "--", "true", code=125).stderr
    assert len(snap.json("log", trajectory)) == before + 1, "a command that never ran leaves no snapshot"
    snap("rm", "--force", trajectory)


def test_a_limit_that_a_command_reached_is_named(snap: Snap, runtime: str) -> None:
    trajectory, _ = snap.create("--runtime", runtime, "--memory", "128M", "--pids", "24")
    greedy = ("--", "python3", "-c", "x = b'x' * (1 << 29)")
    killed = snap("exec", trajectory, *greedy, code=137)
    assert "out of memory" in killed.stderr, killed.stderr
    assert "128 MiB" in killed.stderr
    last = snap.json("log", trajectory)[-1]["id"]
    assert "out of memory" in snap("show", last).stdout
    assert "128 MiB" in snap.json("exec", "--snapshot", last, *greedy, code=137)["error"]
    assert "error" not in snap.json("exec", trajectory, "--", "sh", "-c", "kill -9 $$", code=137), (
        "another command's end"
    )

    full = snap("exec", trajectory, "--", "python3", "-c", FILL, code=2).stderr
    assert "24 processes" in full, full
    refused: list[str] = []

    def is_refused() -> bool:
        tried = snap("exec", trajectory, "--", "true", code=None)
        refused.extend([tried.stderr] if tried.returncode == 125 else [])
        return tried.returncode == 125

    wait_until(is_refused, "the place of the command is taken, too")
    assert "24 processes" in refused[0], refused
    snap("rm", "--force", trajectory)


def test_a_run_that_was_out_of_memory_says_so(snap: Snap) -> None:
    ended = snap(
        "run", "--runtime", "runc", "--memory", "128M", "--", "python3", "-c", "x = b'x' * (1 << 29)", code=137
    )
    assert "out of memory" in ended.stderr, ended.stderr
    assert "128 MiB" in ended.stderr
