"""`exec` as a user sees it: who runs the command."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

import pytest

from snapshotd.client import Sandbox, Snapshotd
from snapshotd.errors import CommandNotRunnable, UsageError
from tests.e2e.support import Snap, processes_with, wait_until

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


@pytest.mark.long  # one with a service: unit/daemon/test_services.py
def test_a_sandbox_in_which_nothing_happens_is_stopped_with_a_last_snapshot(snap: Snap) -> None:
    trajectory, first = snap.create("--runtime", "runc", "--idle-timeout", "1")
    forked = snap.json("fork", first)["trajectories"][0]

    def runs(which: str) -> bool:
        return which in {item["trajectory"] for item in snap.json("ps")}

    wait_until(lambda: not runs(trajectory), "it is stopped")
    assert runs(forked), "a fork has half an hour"
    ticks = "(while :; do date > tick.txt; sleep 0.1; done) >/dev/null 2>&1 & sleep 3; echo done"
    words = ("--idle-timeout", "1", trajectory, "--", "sh", "-c", ticks)
    assert snap("exec", *words).stdout == "done\n", "a command is no idleness, however long"
    wait_until(lambda: not runs(trajectory), "what runs in the background keeps no sandbox")
    assert snap.json("log", trajectory)[-1]["tool"]["name"] == "stop"
    snap("exec", "--idle-timeout", "0", trajectory, "true")
    snap("exec", "--idle-timeout", "1", forked, "true")
    wait_until(lambda: not runs(forked), "a command gives it another time")
    assert runs(trajectory), "0 is never"
    snap("rm", "--force", forked)
    snap("rm", "--force", trajectory)


def test_arguments_that_the_kernel_does_not_take_are_named(snap: Snap, runtime: str) -> None:
    trajectory, _ = snap.create("--runtime", runtime)
    client = Snapshotd(snap.state_dir)
    with pytest.raises(CommandNotRunnable, match="arguments are too long for the kernel, which takes 128 KiB for one"):
        client.exec(trajectory, ["true", "x" * 200_000])
    assert len(client.log(trajectory)) == 1
    client.remove(trajectory, force=True)


@pytest.mark.long  # that changes are seen at all: test_fidelity.py
def test_a_patch_of_the_same_size_within_the_same_second_is_what_python_runs(snap: Snap) -> None:
    """Python compares whole seconds and the size with what it has compiled before."""
    trajectory, _ = snap.create("--runtime", "runc")
    write = "echo 'X = {}' > mod.py; touch -d @1700000000 mod.py; "
    patched = write.format(1) + "python3 -c 'import mod'; " + write.format(2)
    look = "python3 -c 'import mod; print(mod.X)'; ls -d __pycache__"
    assert snap("exec", trajectory, "sh", "-c", patched + look, code=2).stdout == "2\n"
    forked = snap.json("fork", trajectory)["trajectories"][0]
    assert snap("exec", forked, "sh", "-c", look, code=2).stdout == "2\n"
    told = snap("exec", "-e", "PYTHONDONTWRITEBYTECODE=", trajectory, "sh", "-c", patched + look)
    assert told.stdout == "1\n__pycache__\n", "it does as it is told"
    snap("rm", "--force", forked)
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


@pytest.mark.long  # by the client: the next test
def test_a_command_that_takes_too_long_ends_with_all_that_it_started(snap: Snap, runtime: str) -> None:
    """Also with what left its process group, its session and its parent, and what takes no SIGTERM."""
    trajectory, _ = snap.create("--runtime", runtime)
    mark = str(secrets.randbelow(10**12) + 10**12)
    greedy = (
        f"echo begun; printf half > half.txt; sleep 1000.{mark} & setsid sh -c '(setsid sleep 2000.{mark} >/dev/null 2>&1 &)';"
        f"trap '' TERM HUP; while :; do sleep 3000.{mark}; done"
    )
    ended = snap.json("exec", "--timeout", "2.5", trajectory, "--", "sh", "-c", greedy, code=124)
    assert processes_with(mark) == []
    assert (ended["exit_code"], ended["timed_out"], ended["stdout"]) == (124, True, "begun\n")
    assert "2.5 s" in ended["error"]
    tool = snap.json("show", ended["snapshot"])["tool"]
    assert (tool["status"], tool["exit_code"]) == ("timed-out", 124)
    assert snap("cat", f"{ended['snapshot']}:half.txt").stdout == "half"
    assert snap("show", "--output", "stdout", ended["snapshot"]).stdout == "begun\n"
    assert "timed-out" in snap("log", trajectory).stdout

    forked = snap("exec", "--snapshot", ended["snapshot"], "--timeout=500ms", "sh", "-c", greedy, code=125)
    assert "500ms" in forked.stderr
    forked = snap("exec", "--snapshot", ended["snapshot"], "--timeout=2", "sh", "-c", greedy, code=124)
    assert (forked.stdout, processes_with(mark)) == ("begun\n", [])
    assert snap.sh(trajectory, "cat half.txt")["stdout"] == "half", "it goes on"
    own = snap.json("exec", "--timeout", "1h", trajectory, "--", "sh", "-c", "exit 124", code=124)
    assert own["timed_out"] is False, "it is the command's own exit code"
    snap("rm", "--force", trajectory)


def test_a_timeout_leaves_what_other_commands_started(snap: Snap, runtime: str) -> None:
    trajectory, _ = snap.create("--runtime", runtime)
    mark = str(secrets.randbelow(10**12) + 10**12)
    snap.sh(trajectory, f"setsid sleep 1000.{mark} >/dev/null 2>&1 &")
    sandbox = Sandbox.connect(trajectory, client=Snapshotd(snap.state_dir))

    def sleeping() -> list[str]:
        return sorted(line.split()[-1] for _, line in processes_with(mark) if line.startswith("sleep "))

    with snap.follow("exec", trajectory, "--", "sh", "-c", f"echo up; sleep 2000.{mark}") as beside:
        assert beside.stdout is not None
        assert beside.stdout.readline() == "up\n"
        wait_until(lambda: len(sleeping()) == 2, "both sleep")
        greedy = f"(setsid sleep 3000.{mark} &) ; sleep 4000.{mark} & setsid sleep 5000.{mark}"
        ended = sandbox.exec(greedy, timeout=1)
        assert (ended.exit_code, ended.timed_out, sandbox.head().info.tool.status) == (124, True, "timed-out")
        assert sleeping() == [f"1000.{mark}", f"2000.{mark}"], "what left its session and its parent has ended, too"
        snap("stop", trajectory)
        assert beside.wait(60) == 137
    assert processes_with(mark) == []
    snap("rm", trajectory)


@pytest.mark.usefixtures("both_clients")
@pytest.mark.same_verbs
def test_a_command_is_given_its_input(snap: Snap, runtime: str) -> None:
    sandbox = Sandbox.connect(snap.create("--runtime", runtime)[0], client=Snapshotd(snap.state_dir))
    assert sandbox.exec("cat", input="grüße").stdout == "grüße"
    large = bytes(range(256)) * 4096
    assert sandbox.exec("cat > in; wc -c < in", input=large).stdout.strip() == str(len(large))
    assert sandbox.files.read("in") == large
    assert sandbox.head().exec(["cat"], input=b"\xff").stdout_bytes == b"\xff"
    assert [sandbox.exec("cat", **given).stdout for given in ({"input": ""}, {})] == ["", ""]
    assert sandbox.exec("exit 3", input=large).exit_code == 3, "a command need not read it"
    with pytest.raises(UsageError, match=r"Command\.write"):
        sandbox.exec("cat", input="", background=True)
    sandbox.remove(force=True)


@pytest.mark.long  # an input by the client: the test before
@pytest.mark.runc
def test_a_command_reads_a_file_of_this_machine(snap: Snap, tmp_path: Path) -> None:
    trajectory, first = snap.create()
    source = tmp_path / "data"
    source.write_bytes(data := secrets.token_bytes(3 << 20))
    for place in ([trajectory], ["--snapshot", first]):
        printed = snap("exec", "--input", source, *place, "--", "sha256sum").stdout
        assert printed.split()[0] == hashlib.sha256(data).hexdigest()
    assert snap("exec", "--input", source, trajectory, "--", "head", "-c", "0").stdout == "", "it need not read all"
    assert snap("exec", "--input", "-", trajectory, "--", "wc", "-c").stdout.split() == ["0"]
    for refused, options in (
        (f"{tmp_path} cannot be read: Is a directory; ", ["--input", tmp_path]),
        ("no such file cannot be read: No such file or directory; ", ["--input", "no such file"]),
        ("leave out --input, or -i, -t and -d", ["--input", source, "-i"]),
        ("leave out --input, or -i, -t and -d", ["--input", source, "-d"]),
    ):
        assert refused in snap("exec", *options, trajectory, "--", "true", code=125).stderr
    assert len(snap.json("log", trajectory)) == 4, "what is refused leaves no snapshot"
    snap("rm", "--force", trajectory)
