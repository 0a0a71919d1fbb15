"""What a user's shell does to a command: it gives it an input, stops to read its output, or ends it."""

from __future__ import annotations

import hashlib
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import long
from tests.e2e.support import Snap, processes_with, wait_until
from tests.leftovers import nothing_left


def test_all_of_a_long_output_is_followed(own_snap: Snap) -> None:
    """It is more than the events of a run hold: 1 MiB in the short set, and as much as without a setting in the long
    one."""
    limit, line = long.size(1 << 20, 256 << 20), b"0123456789" * 100
    count = limit // len(line)  # with each line's number, and in base64
    own_snap.stop_daemon()
    snap = Snap(own_snap.state_dir, {**own_snap.env, "SNAPSHOTD_FOLLOW_LIMIT": str(limit)})
    script = f"import sys\nfor n in range({count}): sys.stdout.write('%06d' % n + {line.decode()!r})\nprint('end', file=sys.stderr)"
    trajectory = snap("run", "--detach", "--runtime", "runc", "--", "python3", "-c", script).stdout.strip()
    wanted = hashlib.sha256()
    for number in range(count):
        wanted.update(b"%06d" % number + line)
    attached = snap.start("attach", "-q", trajectory)
    assert attached.stdout is not None
    found = hashlib.file_digest(attached.stdout.buffer, "sha256")  # type: ignore[attr-defined]
    assert found.hexdigest() == wanted.hexdigest()
    assert attached.communicate()[1] == "end\n"
    assert attached.returncode == 0
    (events,) = (snap.state_dir / "runs").glob(f"{trajectory}*")
    assert limit <= events.stat().st_size < limit * 1.1, "the rest came from the record"
    snap.stop_daemon()


def _shell(snap: Snap, line: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A line of bash in which `snapshotd` is this one."""
    program = f'snapshotd() {{ {shlex.quote(sys.executable)} -m snapshotd "$@"; }}; {line}'
    return subprocess.run(["bash", "-c", program], env=snap.env, capture_output=True, text=True, timeout=60, **options)


@pytest.mark.parametrize("number", long.some([signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP], 2))
def test_a_throw_away_fork_ends_with_its_client(snap: Snap, box: str, number: signal.Signals) -> None:
    silent = f"1001.{os.getpid()}{number}"
    client = snap.follow("exec", "--snapshot", box, "--", "sleep", silent)
    wait_until(lambda: any("snapshotd" not in line for _, line in processes_with(f"sleep {silent}")), "it runs")
    client.send_signal(number)
    client.communicate()
    wait_until(lambda: not processes_with(f"sleep {silent}"), "it ended")


@pytest.mark.long  # their client's end: the test before
def test_a_daemon_that_is_told_to_stop_ends_throw_away_forks(own_snap: Snap) -> None:
    trajectory, _ = own_snap.create("--runtime", "runc")
    own_snap.stop_daemon()
    log = own_snap.state_dir / "daemon.log"
    silent = f"1002.{os.getpid()}"
    client = own_snap.start("exec", "--snapshot", trajectory, "--", "sleep", silent)
    wait_until(lambda: any("snapshotd" not in line for _, line in processes_with(f"sleep {silent}")), "it runs")
    own_snap("daemon", "--stop")
    assert not processes_with(f"sleep {silent}")
    assert "the daemon" in client.communicate()[1]
    assert client.returncode == 125
    assert "Exception in ASGI" not in log.read_text()
    nothing_left(own_snap.state_dir, running=False)


@pytest.mark.long  # a run: the next test
def test_a_command_whose_output_nobody_reads_any_more_ends(snap: Snap, box: str) -> None:
    assert _shell(snap, f"snapshotd exec -q {box} -- yes | head -1; echo ${{PIPESTATUS[0]}}").stdout == "y\n141\n"
    assert [(s["tool"]["name"], s["tool"]["exit_code"]) for s in snap.json("log", box)][1:] == [("exec", 141)]
    caught = "trap 'echo >&2 caught' PIPE; while echo y; do :; done 2>/dev/null; echo >&2 on; exit 5"
    done = _shell(snap, f"snapshotd exec -q {box} -- bash -c {shlex.quote(caught)} | head -1; echo ${{PIPESTATUS[0]}}")
    assert done.stdout == "y\n5\n"
    assert done.stderr.endswith("on\n"), "its other stream goes on"
    assert (
        _shell(snap, f"snapshotd exec -q --snapshot {box} -- yes | head -1; echo ${{PIPESTATUS[0]}}").stdout
        == "y\n141\n"
    )


@pytest.mark.parametrize("options", ["-q", "--json"])
def test_a_run_whose_output_nobody_reads_any_more_is_stopped(snap: Snap, runtime: str, options: str) -> None:
    done = _shell(snap, f"snapshotd run {options} --runtime {runtime} -- yes | head -1; echo ${{PIPESTATUS[0]}}")
    assert done.stdout.splitlines()[1:] == ["141"]
    last = snap.json("ls")[-1]
    assert last["status"] == "stopped"
    snap("rm", last["id"])


def test_who_follows_a_run_may_leave_it(snap: Snap, runtime: str) -> None:
    trajectory = snap(
        "run", "--detach", "--runtime", runtime, "--", "sh", "-c", "while echo y; do sleep 0.01; done"
    ).stdout.strip()
    assert _shell(snap, f"snapshotd attach -q {trajectory} | head -1; echo ${{PIPESTATUS[0]}}").stdout == "y\n141\n"
    assert [t["status"] for t in snap.json("ls") if t["id"] == trajectory] == ["running"]
    snap("rm", "--force", trajectory)


def test_standard_input_reaches_a_command(snap: Snap, box: str) -> None:
    assert _shell(snap, f"echo hi | snapshotd exec -q -i {box} -- cat").stdout == "hi\n"
    done = _shell(snap, f"echo hi | snapshotd exec -q -i --snapshot {box} -u 1000 -- cat /dev/stdin")
    assert (done.stdout, done.stderr) == ("hi\n", "")
    data = os.urandom(3_000_001)
    wanted = hashlib.sha256(data).hexdigest()
    with subprocess.Popen(
        [sys.executable, "-m", "snapshotd", "exec", "-q", "-i", box, "--", "sha256sum"],
        env=snap.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as client:
        assert client.communicate(data)[0].split()[0].decode() == wanted
    assert _shell(snap, f"snapshotd exec -q -i {box} -- cat <&-").stdout == ""
    assert _shell(snap, f"yes | snapshotd exec -q -i {box} -- head -1; echo ${{PIPESTATUS[*]}}").stdout == "y\n141 0\n"


@pytest.mark.parametrize("options", [[], ["-i"]])
def test_an_input_that_stays_open_holds_nothing_up(snap: Snap, box: str, options: list[str]) -> None:
    read_end, write_end = os.pipe()
    with open(write_end, "wb"), open(read_end, "rb") as never_ends:
        done = _shell(snap, f"snapshotd exec -q {' '.join(options)} {box} -- echo done", stdin=never_ends)
        assert (done.returncode, done.stdout) == (0, "done\n")
        if not options:
            assert _shell(snap, f"snapshotd exec -q {box} -- cat", stdin=never_ends).returncode == 0, (
                "it has none, and not this one"
            )


@pytest.mark.long  # one that is given: two tests above
def test_an_input_that_nobody_would_get_is_refused(snap: Snap, box: str, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("hi\n")
    before = snap.json("ls")
    read_end, write_end = os.pipe()
    os.write(write_end, b"hi\n")
    for line, given in (
        (f"snapshotd exec {box} -- cat < {tmp_path}/data", subprocess.DEVNULL),
        (f"snapshotd exec {box} -- cat", read_end),
        (f"snapshotd exec --snapshot {box} -- cat <<< hi", subprocess.DEVNULL),
    ):
        done = _shell(snap, line, stdin=given)
        assert (done.returncode, done.stdout) == (125, "")
        assert "-i" in done.stderr
    os.close(read_end)
    os.close(write_end)
    done = _shell(snap, f"snapshotd run -- cat < {tmp_path}/data")
    assert (done.returncode, done.stdout) == (125, "")
    assert "< /dev/null" in done.stderr
    assert snap.json("ls") == before
    for given in ("< /dev/null", "<&-", "< <(:)"):
        assert _shell(snap, f"snapshotd exec -q {box} -- cat {given}").returncode == 0, given
