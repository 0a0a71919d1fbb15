"""Commands in the background of a sandbox, as a user sees them: they go on beside other calls, without a client, and at
the next daemon."""

from __future__ import annotations

import base64
import json
import secrets
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from snapshotd import failpoints
from snapshotd.client import Command, Sandbox, Snapshotd
from snapshotd.client.twofold import run
from snapshotd.engine.runs.command_records import ENDED_MAX
from snapshotd.engine.sandbox.sandbox import BACKGROUND_MAX
from snapshotd.errors import CommandNotFound, Conflict, LimitExceeded, NotFound, UsageError
from tests import way
from tests.e2e.support import Snap, processes_with, wait_until


def sandbox_of(snap: Snap, runtime: str) -> Sandbox:
    box, _ = snap.create("--runtime", runtime)
    return Sandbox.connect(box, client=Snapshotd(snap.state_dir))


def printed(command: Command) -> str:
    """All that it has printed so far."""
    return b"".join(data for _, data in command.output()).decode()


def sleeps(sandbox: Sandbox) -> bool:
    """Whether a `sleep` is alive in there. One that was killed is, until it has run once more."""
    return "sleep\n" in sandbox.exec("cat /proc/[0-9]*/comm").stdout


@pytest.mark.usefixtures("both_clients")
@pytest.mark.same_verbs
def test_it_goes_on_beside_other_calls_and_ends_with_a_snapshot(snap: Snap, runtime: str) -> None:
    sandbox = sandbox_of(snap, runtime)
    command = sandbox.exec("echo begun; cat; echo late >&2; echo done > made; exit 3", background=True, stdin=True)
    assert command.info.status == "running"
    wait_until(lambda: printed(command) == "begun\n", "it prints")
    beside = sandbox.exec("echo x > beside")
    assert sandbox.snapshots()[-1].info.method == way.COPY, "something is alive"
    command.write("some ")
    command.write(b"words\n", end=True)
    result = command.wait()
    assert (result.exit_code, result.stdout, result.stderr) == (3, "begun\nsome words\n", "late\n")
    info = command.info
    assert (info.status, info.exit_code, info.snapshot) == ("failed", 3, result.snapshot_id)
    head = sandbox.head()
    assert head.id == result.snapshot_id != beside.snapshot_id
    assert head.cat("/workspace/made") == b"done\n"
    assert head.info.tool.arguments["background"] is True
    assert [one.id for one in sandbox.commands()] == [command.id]
    sandbox.remove(force=True)


COUNT = "import itertools, time\nfor n in itertools.count():\n    print(n, flush=True)\n    time.sleep(0.002)\n"


@pytest.mark.timeout(300)
def test_it_goes_on_at_the_next_daemon_and_its_follower_misses_nothing(own_snap: Snap, runtime: str) -> None:
    snap = own_snap
    sandbox = sandbox_of(snap, runtime)
    sandbox.exec(f"cat > /tmp/count.py <<'EOF'\n{COUNT}EOF\necho served > index.html")
    command = sandbox.exec(["python3", "/tmp/count.py"], background=True)
    server = sandbox.exec("exec python3 -u -m http.server 8000", background=True)
    seen, follower = b"", command.output(follow=True)
    for kills in range(1, 4):
        while seen.count(b"\n") < 300 * kills:
            seen += next(follower)[1]
        snap.kill_daemon()
        snap("ls")  # there is a next one
    with sandbox.port(8000) as port:
        wait_until(lambda: b"served" in fetched(port.address), "the server answers at the next daemon")
    again = Sandbox.connect(sandbox.id, client=Snapshotd(snap.state_dir)).command(command.id[:6])
    again.signal(signal.SIGINT)
    for _, data in follower:
        seen += data
    lines = seen.decode().split("Traceback")[0].splitlines()
    assert lines == [str(number) for number in range(len(lines))], "every line once"
    info = command.info
    assert (info.status, info.exit_code) == ("failed", 130)
    assert "GET / HTTP" in printed(server)
    head = sandbox.head()
    assert head.id == info.snapshot
    recorded = b"".join(Snapshotd(snap.state_dir).output(head.id, "stdout")).decode()
    assert recorded.splitlines() == lines, "what is recorded is what was followed"
    server.kill()
    assert server.wait().exit_code == 137
    sandbox.remove(force=True)


def fetched(address: str) -> bytes:
    try:
        with urllib.request.urlopen(f"http://{address}/", timeout=30) as answer:
            data: bytes = answer.read()
            return data
    except OSError:
        return b""


def test_a_kill_ends_what_left_its_session_and_its_parent(snap: Snap, runtime: str) -> None:
    sandbox = sandbox_of(snap, runtime)
    mark = str(secrets.randbelow(10**12) + 10**12)

    def sleeping() -> list[str]:
        return sorted(line.split()[-1] for _, line in processes_with(mark) if line.startswith("sleep "))

    other = sandbox.exec(f"(setsid sleep 1000.{mark} &); sleep 2000.{mark}", background=True)
    command = sandbox.exec(f"(setsid sleep 3000.{mark} >/dev/null 2>&1 &); sleep 4000.{mark}", background=True)
    wait_until(lambda: len(sleeping()) == 4, "all sleep")
    command.kill()
    assert command.wait().exit_code == 137
    wait_until(lambda: sleeping() == [f"1000.{mark}", f"2000.{mark}"], "the killed ones have ended, and no others")
    with snap.start("exec", sandbox.id, "--", "sh", "-c", f"(setsid sleep 5000.{mark} &); sleep 6000.{mark}") as client:
        wait_until(lambda: len(sleeping()) == 4, "all sleep")
        snap("kill", sandbox.id, next(one.info.id for one in sandbox.commands() if not one.info.background))
        assert client.wait(60) == 137
        wait_until(lambda: sleeping() == [f"1000.{mark}", f"2000.{mark}"], "the killed ones have ended, and no others")
        client.communicate()
    other.kill()
    assert other.wait().exit_code == 137
    wait_until(lambda: not sleeping(), "the killed ones have ended")
    sandbox.remove(force=True)


@pytest.mark.usefixtures("both_clients")
@pytest.mark.same_verbs
def test_a_foreground_command_whose_client_went_away_is_listed_and_killed(snap: Snap, runtime: str) -> None:
    sandbox = sandbox_of(snap, runtime)
    client = snap.start("exec", sandbox.id, "--", "sh", "-c", "echo begun; echo half > half; sleep 1000 & sleep 1000")
    assert client.stdout is not None
    assert client.stdout.readline() == "begun\n"
    (listed,) = snap.json("ps", sandbox.id)
    assert (listed["status"], listed["background"], listed["argv"][0]) == ("running", False, "sh")
    client.send_signal(signal.SIGINT)
    assert "snapshotd ps" in client.communicate(timeout=60)[1]
    (command,) = sandbox.commands()
    assert (command.id, command.info.status) == (listed["id"], "running")
    for refused in (lambda: command.write("x"), lambda: command.wait()):
        with pytest.raises(UsageError, match="in the foreground"):
            refused()
    command.kill()
    wait_until(lambda: sandbox.head().info.tool.name == "exec", "its snapshot is taken")
    head = sandbox.head()
    assert (head.info.tool.exit_code, head.cat("/workspace/half")) == (137, b"half\n")
    assert not sleeps(sandbox), "it is ended with all that it started"
    assert sandbox.commands() == []
    with pytest.raises(NotFound):
        sandbox.command(command.id)
    command.kill()
    sandbox.remove(force=True)


@pytest.mark.usefixtures("both_clients")
@pytest.mark.same_verbs
def test_its_timeout_is_told_from_a_124_of_its_own(snap: Snap, runtime: str) -> None:
    sandbox = sandbox_of(snap, runtime)
    late = sandbox.exec("sleep 1000", background=True, timeout=0.1)
    own = sandbox.exec("exit 124", background=True, timeout=1000)
    results = [one.wait() for one in (late, own)]
    assert [(one.exit_code, one.timed_out) for one in results] == [(124, True), (124, False)]
    sandbox.remove(force=True)


@pytest.mark.usefixtures("both_clients")
@pytest.mark.same_verbs
def test_stop_and_a_rewind_end_it(snap: Snap, runtime: str) -> None:
    sandbox = sandbox_of(snap, runtime)
    first = sandbox.exec("echo 1 > n")
    command = sandbox.exec("echo begun; echo 2 > n; setsid sleep 1000 & sleep 1000", background=True)
    wait_until(lambda: printed(command) == "begun\n", "it prints")
    taken = sandbox.rewind(first.snapshot_id or "")
    assert sandbox.exec("cat n; ps -e 2>/dev/null | grep -c sleep").stdout.split()[0] == "1"
    info = command.info
    assert (info.status, info.exit_code) == ("interrupted", 137)
    assert [one.info.tool.name for one in sandbox.snapshots()][-4:] == ["exec", "exec", "rewind", "exec"]
    assert sandbox.snapshots()[-3].id == info.snapshot
    assert taken.cat("/workspace/n") == b"1\n"

    again = sandbox.exec("echo begun; sleep 1000", background=True)
    wait_until(lambda: printed(again) == "begun\n", "it prints")
    follower = again.output(follow=True)
    assert next(follower) == ("stdout", b"begun\n")
    sandbox.stop()
    assert list(follower) == [], "a follower learns of the end"
    assert (again.info.status, again.info.exit_code) == ("interrupted", 137)
    assert again.info.snapshot is not None
    for refused in (lambda: again.signal(15), lambda: again.write("x")):
        with pytest.raises((Conflict, UsageError)):
            refused()
    again.kill()
    assert [one.id for one in sandbox.commands()] == [command.id, again.id]
    sandbox.remove()
    assert not (snap.state_dir / "commands" / sandbox.id).exists()


@pytest.mark.long  # a signal: test_its_words_on_the_command_line
def test_a_signal_reaches_what_the_command_started(snap: Snap, runtime: str) -> None:
    sandbox = sandbox_of(snap, runtime)
    trap = "trap 'echo caught; exit 7' TERM; echo begun; sleep 1000 & wait"
    command = sandbox.exec(trap, background=True)
    wait_until(lambda: printed(command) == "begun\n" and sleeps(sandbox), "it prints, and its child has begun")
    command.signal(signal.SIGTERM)
    result = command.wait()
    assert (result.exit_code, result.stdout) == (7, "begun\ncaught\n")
    wait_until(lambda: not sleeps(sandbox), "its child has got the signal, too")
    deaf = sandbox.exec("trap '' TERM INT; setsid sleep 1000 & echo begun; sleep 1000", background=True)
    wait_until(lambda: printed(deaf) == "begun\n", "it prints")
    deaf.signal(signal.SIGTERM)
    assert deaf.info.status == "running"
    deaf.kill()
    assert deaf.wait().exit_code == 137
    wait_until(lambda: not sleeps(sandbox), "nothing that it started is alive")
    sandbox.exec("echo x > y")
    assert sandbox.head().info.method == way.PIVOT
    slow = sandbox.exec("echo kept > kept; sleep 1000", background=True, timeout=3)
    result = slow.wait()
    assert (result.exit_code, slow.info.status) == (124, "timed-out")
    assert sandbox.head().cat("/workspace/kept") == b"kept\n"
    sandbox.remove(force=True)


@pytest.mark.long  # errors: unit/daemon/test_commands.py
@pytest.mark.runc
def test_what_cannot_run_leaves_nothing_and_too_many_are_refused(snap: Snap) -> None:
    sandbox = sandbox_of(snap, "runc")
    with pytest.raises(CommandNotFound):
        sandbox.exec(["no-such-program"], background=True)
    with pytest.raises(UsageError, match="stranger"):
        sandbox.exec("true", background=True, user="stranger")
    assert sandbox.commands() == []
    assert len(sandbox.snapshots()) == 1
    running = [sandbox.exec(["sleep", "1000"], background=True) for _ in range(BACKGROUND_MAX)]
    with pytest.raises(LimitExceeded, match=str(BACKGROUND_MAX)):
        sandbox.exec("true", background=True)
    for command in running:
        command.kill()
    for command in running:
        command.wait()
    last = [sandbox.exec(["echo", str(number)], background=True) for number in range(3)]
    assert [command.wait().stdout for command in last] == ["0\n", "1\n", "2\n"]
    wait_until(lambda: len(sandbox.commands()) == ENDED_MAX, "the oldest are forgotten")
    listed = [one.id for one in sandbox.commands()]
    assert listed[-3:] == [command.id for command in last]
    with pytest.raises(NotFound):
        sandbox.command(running[0].id)
    assert len(sandbox.snapshots()) == 1 + BACKGROUND_MAX + 3, "a forgotten one has its snapshot"
    deaf = sandbox.exec(["sleep", "1000"], background=True, stdin=True)
    with pytest.raises(UsageError, match="started without an input"):
        last[0].write("x")
    with pytest.raises(UsageError, match=r"Command\.wait"):
        sandbox.exec("true", background=True, check=True)  # type: ignore[call-overload]
    client = Snapshotd(snap.state_dir)
    path = f"/trajectories/{sandbox.id}/commands/{deaf.id}/stdin"
    body = {"data_b64": base64.b64encode(bytes(256 << 10)).decode(), "end": True}
    taken = run(client._transport.request("POST", path, body=body))["bytes"]
    assert 0 < taken < 256 << 10, "a command that does not read holds nobody up for long"
    sandbox.exec("true")
    deaf.kill()
    deaf.wait()
    sandbox.remove(force=True)


@pytest.mark.runc
def test_a_command_of_a_lost_sandbox_has_an_unknown_outcome(own_snap: Snap) -> None:
    snap = own_snap
    sandbox = sandbox_of(snap, "runc")
    command = sandbox.exec("echo begun; sleep 1000", background=True)
    ended = sandbox.exec("echo ended", background=True)
    ended.wait()
    wait_until(lambda: printed(command) == "begun\n", "it prints")
    follower = command.output(follow=True)
    next(follower)
    snap.crash()
    assert list(follower) == []
    info = command.info
    assert (info.status, info.exit_code, info.snapshot) == ("unknown", None, None)
    assert "not known" in (info.error or "")
    assert printed(command) == "begun\n"
    assert command.wait().exit_code == -1
    assert (ended.info.status, ended.info.exit_code) == ("done", 0)
    assert "its end is not known" in snap("wait", sandbox.id, command.id, code=125).stderr
    sandbox.remove(force=True)


WALKED = ("engine.command.", "engine.output.", "engine.step.")
SEEN_ELSEWHERE = ("engine.step.", "engine.output.shown", "engine.command.started", "engine.command.committed")
"""The short set dies in the middle of a step under an agent (test_kills.py), and here at what comes just before
the others."""


@pytest.mark.runc
@pytest.mark.parametrize(
    "point",
    [
        pytest.param(name, marks=[pytest.mark.long] * name.startswith(SEEN_ELSEWHERE))
        for name in failpoints.NAMES
        if name.startswith(WALKED)
    ],
)
def test_killed_at_a_failpoint(own_snap: Snap, point: str) -> None:
    """It is there, with one outcome, one snapshot and all of its output; or it was never started."""
    snap = own_snap
    box, _ = snap.create("--runtime", "runc")
    snap.kill_daemon()
    armed = Snap(snap.state_dir, {**snap.env, "SNAPSHOTD_FAILPOINT": point})
    begun = armed("exec", "--detach", box, "--", "sh", "-c", "seq 1 500; echo x > made; echo late >&2", code=None)
    log = snap.state_dir / "daemon.log"
    wait_until(lambda: f"failpoint {point} reached" in log.read_text(), "it is reached")
    client = Snapshotd(snap.state_dir)
    sandbox = Sandbox.connect(box, client=client)
    commands = sandbox.commands()
    assert len(commands) == 1, "its intent is durable"
    for command in commands:
        result = command.wait()
        info = command.info
        assert (info.status == "unknown") == (point == "engine.command.begun")
        if info.status == "unknown":
            assert begun.returncode != 0, "nobody was told of it"
            continue
        assert (result.exit_code, result.stderr) == (0, "late\n")
        assert result.stdout.split() == [str(n) for n in range(1, 501)]
        taken = [one for one in sandbox.snapshots() if one.id == info.snapshot]
        assert len(taken) == 1
        assert b"".join(client.output(taken[0].id, "stdout")) == result.stdout_bytes
        assert taken[0].cat("/workspace/made") == b"x\n"
    names = [one.info.tool.arguments.get("background") for one in sandbox.snapshots()]
    assert names.count(True) == sum(one.info.snapshot is not None for one in commands)
    sandbox.remove(force=True)


@pytest.mark.runc
def test_its_words_on_the_command_line(snap: Snap) -> None:
    box, _ = snap.create("--runtime", "runc", "--name", "hands")
    begun = snap("exec", "--detach", "-i", "hands", "cat").stdout.strip()
    assert snap("ps", "-q", "--no-trunc", "hands").stdout == f"{begun}\n"
    attached = subprocess.Popen(
        [sys.executable, "-m", "snapshotd", "attach", "-i", "hands", begun[:8]],
        env=snap.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    following = snap.follow("logs", "-f", "hands", begun[:8])
    out, errors = attached.communicate("some words\n", timeout=snap.timeout_s)
    assert (attached.returncode, out) == (0, "some words\n"), errors
    assert errors.startswith("■ done, exit code 0, snapshot "), errors
    assert following.communicate(timeout=snap.timeout_s) == ("some words\n", "")
    assert snap("logs", "hands", begun).stdout == "some words\n"
    assert snap("wait", "hands", begun).returncode == 0
    slow = snap.json("exec", "--detach", "hands", "--", "sh", "-c", "echo begun; sleep 1000")
    assert (slow["status"], slow["argv"]) == ("running", ["sh", "-c", "echo begun; sleep 1000"])
    leaving = snap.follow("attach", "hands", slow["id"])
    assert leaving.stdout is not None
    assert leaving.stdout.readline() == "begun\n"
    leaving.send_signal(signal.SIGINT)
    leaving.communicate(timeout=snap.timeout_s)
    assert leaving.returncode == 130
    assert snap.json("ps", "hands")[-1]["status"] == "running", "a client that goes away ends nothing"
    assert snap("kill", "-s", "int", "hands", slow["id"]).stdout == slow["id"] + "\n"
    assert snap("attach", "-q", "hands", slow["id"], code=130).stdout == "begun\n"
    table = snap("ps", "hands").stdout.splitlines()
    assert [line.split()[:3] for line in table[1:]] == [[begun[:12], "done", "0"], [slow["id"][:12], "failed", "130"]]
    assert snap("ps", "-q", "hands").stdout == ""
    for words in (
        ("kill", "hands"),
        ("kill", "-s", "NOPE", "hands", begun),
        ("kill", "hands", "ffff"),
        ("kill", "hands", begun),
        ("logs", "hands", "zz"),
        ("attach", "-i", "hands"),
        ("exec", "--detach", "-t", "hands", "true"),
        ("exec", "--detach", "--snapshot", "hands", "--", "true"),
    ):
        refused = snap(*words, code=None)
        assert (refused.returncode != 0, refused.stdout) == (True, ""), words
        assert refused.stderr.startswith("snapshotd: "), refused.stderr
    snap("rm", "--force", box)


@pytest.mark.runc
def test_its_secrets_are_recorded_nowhere(snap: Snap) -> None:
    secret = "ghp_" + "a1B2c3D4e5" * 3 + "f6G7h8"
    sandbox = sandbox_of(snap, "runc")
    command = sandbox.exec(f"echo {secret}; cat", background=True, stdin=True)
    command.write(f"again {secret}\n", end=True)
    result = command.wait()
    assert "ghp_" not in result.stdout
    assert result.stdout.count("again") == 1
    for path in (snap.state_dir / "commands").rglob("*.ndjson"):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            text = base64.b64decode(event["data_b64"]).decode() if event["event"] == "output" else line
            assert secret not in text
    assert secret not in json.dumps(sandbox.head().info.tool.arguments)
    sandbox.remove(force=True)


AGENT = """
import pathlib, time
print("on", flush=True)
while not pathlib.Path("/tmp/go").exists():
    time.sleep(0.02)
print("off", flush=True)
"""


@pytest.mark.long  # beside other calls: the first test
def test_one_beside_an_agent_goes_on_with_it_and_ends_with_it(own_snap: Snap, runtime: str, tmp_path: Path) -> None:
    snap = own_snap
    (tmp_path / "agent.py").write_text(AGENT)
    snap("run", "--detach", "--runtime", runtime, "--name", f"both-{runtime}", tmp_path / "agent.py")
    sandbox = Sandbox.connect(f"both-{runtime}", client=Snapshotd(snap.state_dir))
    wait_until(lambda: snap("logs", sandbox.id).stdout == "on\n", "it runs")
    command = sandbox.exec("echo begun; sleep 1000", background=True)
    short = sandbox.exec("read go; echo $go", background=True, stdin=True)
    wait_until(lambda: printed(command) == "begun\n", "it prints")
    snap.kill_daemon()
    snap("ls")
    assert [one.info.status for one in sandbox.commands()] == ["running", "running"]
    short.write("went\n")
    assert (short.wait().exit_code, short.wait().stdout) == (0, "went\n")
    sandbox.exec("touch /tmp/go")
    assert snap("wait", sandbox.id).returncode == 0
    assert command.wait().stdout == "begun\n"
    assert (command.info.status, command.info.exit_code) == ("interrupted", 137)
    log = [(one.info.tool.name, one.info.tool.status) for one in sandbox.snapshots()]
    assert sorted(log[-2:]) == [("exec", "interrupted"), ("exit", "done")]
    sandbox.remove(force=True)


@pytest.mark.long  # full disks: system/test_disk_full.py
@pytest.mark.runc
def test_a_full_disk_ends_it_and_nothing_else(own_snap: Snap) -> None:
    snap = own_snap
    sandbox = sandbox_of(snap, "runc")
    beside = sandbox.exec("cat", background=True, stdin=True)
    logs = snap.state_dir / "commands" / sandbox.id
    snap.stop_daemon()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", logs], check=True)
    try:
        command = sandbox.exec("head -c 1000000 /dev/zero; sleep 1000", background=True)
        client = Snapshotd(snap.state_dir)
        wait_until(lambda: "running" not in [one.status for one in client.commands(sandbox.id)], "it is ended")
        assert {one.status for one in client.commands(sandbox.id) if one.id == command.id} <= {"unknown"}
        wait_until(lambda: not sleeps(sandbox), "its processes are gone")
        snap.stop_daemon()
    finally:
        subprocess.run(["umount", logs], check=True)
    assert beside.info.status == "interrupted", "that was the first stop"
    sandbox.remove(force=True)
