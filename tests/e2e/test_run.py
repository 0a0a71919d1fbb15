"""Running agents: with the library, without it, failing, with an open log file, with dependencies of their own."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import way
from tests.e2e.support import AGENT, Snap, wait_until


def _run(
    snap: Snap, runtime: str, agent: Path, *args: str, options: tuple[str, ...] = (), code: int = 0
) -> list[dict[str, object]]:
    result = snap("run", "--json", "--runtime", runtime, *options, agent, *args, code=code)
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.each_runtime
def test_an_agent_gets_a_snapshot_per_call_with_its_conversation(snap: Snap, runtime: str, tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(
        AGENT
        + 'message("user", "make files")\n'
        + 'for n in range(3):\n    message("assistant", {"step": n})\n    print(shell(f"echo {n} > f{n}"))\n'
    )
    events = _run(snap, runtime, agent)
    assert events[0]["event"] == "started"
    finished = events[-1]
    trajectory = str(finished["trajectory"])
    assert finished == {
        "event": "finished",
        "trajectory": trajectory,
        "exit_code": 0,
        "snapshot_count": 5,
        "status": "finished",
    }
    wait_until(lambda: all(one["files"] is not None for one in snap.json("log", trajectory)), "all is counted")
    log = snap.json("log", trajectory)
    assert [s["tool"]["name"] for s in log] == ["start", "shell", "shell", "shell", "exit"]
    assert log[1]["tool"]["arguments"] == {"script": "echo 0 > f0"}
    assert [s["files"]["added"] for s in log[1:4]] == [1, 1, 1]
    assert all(s["parent"] == before["id"] for before, s in itertools.pairwise(log))
    assert snap.json("show", log[2]["id"])["message_count"] == 3
    assert "does not exist" in snap("cat", f"{log[1]['id']}:/workspace/f1", code=4).stderr
    assert snap("cat", f"{log[2]['id']}:/workspace/f1").stdout == "1\n"


@pytest.mark.long  # a pivot: test_fidelity.py
def test_an_open_log_file_and_a_working_directory_keep_the_fast_path(snap: Snap, runtime: str, tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(
        AGENT
        + 'os.makedirs("deep/er", exist_ok=True); os.chdir("deep/er")\nlog = open("../run.log", "a", buffering=1)\n'
        + 'for n in range(5):\n    log.write(f"before {n}\\n")\n    shell(f"echo {n} > here{n}")\n    log.write(f"after {n}\\n")\n'
        + 'assert os.getcwd() == "/workspace/deep/er"\n'
    )
    trajectory = str(_run(snap, runtime, agent)[-1]["trajectory"])
    log = snap.json("log", trajectory)
    assert [snap.json("show", s["id"])["method"] for s in log[1:6]] == [way.PIVOT] * 5
    assert (
        snap("cat", f"{log[3]['id']}:/workspace/deep/run.log").stdout
        == "before 0\nafter 0\nbefore 1\nafter 1\nbefore 2\n"
    )
    assert snap("cat", f"{trajectory}:/workspace/deep/run.log").stdout.splitlines()[-1] == "after 4"


def test_a_crash_starts_no_program_of_the_host(snap: Snap, runtime: str) -> None:
    limits = snap("run", "--runtime", runtime, "--", "cat", "/proc/self/limits").stdout.splitlines()
    core = next(line.split() for line in limits if line.startswith("Max core file size"))
    assert core[4:6] == ["1", "1"], "1 is what keeps the kernel from it, and 0 is not"


def test_a_script_that_never_heard_of_us_gets_start_and_exit(snap: Snap, runtime: str, tmp_path: Path) -> None:
    agent = tmp_path / "plain.py"
    agent.write_text(
        "import sys\nprint('out', flush=True)\nprint('err', file=sys.stderr)\nopen('made', 'w').write('x')\nsys.exit(3)\n"
    )
    result = snap("run", "--runtime", runtime, agent, code=3)
    assert result.stdout == "out\n"
    assert "err\n" in result.stderr
    trajectory = snap.json("ls")[-1]["id"]
    log = snap.json("log", trajectory)
    tools = [(s["tool"]["name"], s["tool"]["status"], s["tool"]["exit_code"]) for s in log]
    assert tools == [("start", "done", None), ("exit", "failed", 3)]
    assert snap("cat", f"{trajectory}:/workspace/made").stdout == "x"


def test_a_command_runs_like_an_agent(snap: Snap, runtime: str, tmp_path: Path) -> None:
    (tmp_path / "given").write_text("host\n")
    script = "cat given; echo $A; echo more >> given"
    result = snap("run", "--runtime", runtime, "--workspace", tmp_path, "--env", "A=b", "--", "sh", "-c", script)
    assert result.stdout == "host\nb\n"
    assert (tmp_path / "given").read_text() == "host\n", "the workspace is copied, not mounted"


def test_a_killed_agent_is_reported_with_its_signal(snap: Snap, runtime: str, tmp_path: Path) -> None:
    agent = tmp_path / "dies.py"
    agent.write_text("import os\nos.kill(os.getpid(), 9)\n")
    assert snap("run", "--runtime", runtime, agent, code=137).returncode == 137


def test_outside_a_sandbox_the_same_file_runs_with_one_warning(tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT + 'print(shell("echo works")["output"])\nshell("true")\n')
    result = subprocess.run([sys.executable, str(agent)], capture_output=True, text=True, check=True)
    assert result.stdout == "works\n\n"
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("how", ["inline", "file"])
def test_dependencies_are_installed_once_and_the_agent_needs_no_network(
    snap: Snap, full_image: str, tmp_path: Path, how: str
) -> None:
    agent = tmp_path / "agent.py"
    header = '# /// script\n# dependencies = ["six==1.16.0"]\n# ///\n' if how == "inline" else ""
    agent.write_text(header + "import six, socket\nprint(six.__version__)\n")
    options: tuple[str, ...] = ("--image", full_image)
    if how == "file":
        (tmp_path / "requirements.txt").write_text("six==1.16.0\n")
        options += ("--requirements", str(tmp_path / "requirements.txt"))
    assert snap("run", "--runtime", "runc", *options, agent).stdout == "1.16.0\n"
    assert snap("run", "--runtime", "runc", *options, agent).stdout == "1.16.0\n"


@pytest.mark.long  # those that do: the test before
def test_dependencies_that_do_not_exist_are_said_in_pips_words(snap: Snap, full_image: str, tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text('# /// script\n# dependencies = ["snapshotd-no-such-package==9"]\n# ///\nprint(1)\n')
    before = len(snap.json("ls"))
    assert (
        "snapshotd-no-such-package" in snap("run", "--runtime", "runc", "--image", full_image, agent, code=125).stderr
    )
    assert len(snap.json("ls")) == before


def test_a_detached_run_can_be_attached_to(snap: Snap, runtime: str, tmp_path: Path) -> None:
    agent = tmp_path / "slow.py"
    agent.write_text(AGENT + 'print("hello", flush=True)\nshell("sleep 0.2")\nsys.exit(7)\n')
    trajectory = snap("run", "--detach", "--runtime", runtime, agent).stdout.strip()
    assert snap("attach", trajectory, code=7).stdout == "hello\n"
    assert snap("attach", trajectory, code=7).stdout == "hello\n"


def test_stop_takes_a_last_snapshot_and_exec_goes_on_from_it(snap: Snap, runtime: str) -> None:
    trajectory, _ = snap.create("--runtime", runtime)
    snap.sh(trajectory, "(sleep 0.3; echo late > late) > /dev/null 2>&1 & true")
    wait_until(
        lambda: snap("exec", trajectory, "--", "test", "-e", "late", code=None).returncode == 0, "the late write"
    )
    snap("stop", trajectory)
    assert snap.sh(trajectory, "cat late")["stdout"] == "late\n"
    snap("rm", "--force", trajectory)


def test_stop_cuts_a_command_off_and_both_sides_see_what_it_did(snap: Snap, runtime: str) -> None:
    trajectory, _ = snap.create("--runtime", runtime)
    running = snap.follow("exec", trajectory, "--", "sh", "-c", "echo half > half; echo said; exec sleep 1000")
    assert running.stdout is not None
    assert running.stdout.readline() == "said\n"
    snap("stop", trajectory)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 137
    assert "exec  interrupted" in errors
    (call,) = [one for one in snap.json("log", trajectory) if one["tool"]["name"] == "exec"]
    assert (call["tool"]["status"], call["tool"]["exit_code"]) == ("interrupted", 137)
    assert snap("show", "--output", "stdout", call["id"]).stdout == "said\n"
    assert snap("cat", f"{call['id']}:/workspace/half").stdout == "half\n"
    snap("rm", "--force", trajectory)


@pytest.mark.long  # hard links: test_variety.py
def test_hard_links_survive_a_change_of_both_names(snap: Snap, runtime: str) -> None:
    trajectory, _ = snap.create("--runtime", runtime)
    snap.sh(trajectory, "mkdir d; echo x > d/a; ln d/a d/b; ln d/a c; echo y > single; cp -p single twin")
    snap("exec", "--wait", "stored", trajectory, "--", "true")  # then the layer's link groups are known
    snap.sh(trajectory, "chmod 600 d/a d/b c; chmod 600 single twin")
    links = snap.sh(trajectory, "stat -c %i d/a d/b c | sort -u | wc -l; stat -c %i single twin | sort -u | wc -l")
    assert links["stdout"] == "1\n2\n"
    snap.sh(trajectory, "echo more >> c")
    assert snap.sh(trajectory, "cat d/a c")["stdout"] == "x\nx\nmore\n", (
        "a single name that is written splits off, as in Docker"
    )
    snap("rm", "--force", trajectory)


def test_rewind_gives_back_older_files_in_place(snap: Snap, runtime: str) -> None:
    trajectory, _ = snap.create("--runtime", runtime)
    old = snap.sh(trajectory, "echo old > f; mkdir d; touch d/x")["snapshot"]
    new = snap.sh(trajectory, "echo new > f; rm -r d; touch g")["snapshot"]
    snap("rewind", trajectory, old)
    assert snap.sh(trajectory, "cat f; ls")["stdout"] == "old\nd\nf\n"
    snap("rewind", trajectory, new)
    assert snap.sh(trajectory, "cat f; ls")["stdout"] == "new\nf\ng\n"
    snap("rm", "--force", trajectory)


@pytest.mark.long  # renames: model/test_overlay_walk.py
def test_a_directory_of_an_earlier_step_is_renamed_like_any_other(snap: Snap, runtime: str) -> None:
    trajectory, _ = snap.create("--runtime", runtime)
    snap.sh(trajectory, "mkdir -p a/b; echo x > a/b/c")
    names = [("a", "b"), *((f"r{n}", f"b{n}") for n in range(4))]
    for (outer, inner), (new_outer, new_inner) in itertools.pairwise(names):
        snap.sh(trajectory, f"python3 -c \"import os; os.rename('{outer}', '{new_outer}')\"")
        snap.sh(trajectory, f"python3 -c \"import os; os.rename('{new_outer}/{inner}', '{new_outer}/{new_inner}')\"")
    assert snap.sh(trajectory, "cat r3/b3/c; ls")["stdout"] == "x\nr3\n"
    snap("rm", "--force", trajectory)


@pytest.mark.long  # commands are: test_exec.py
@pytest.mark.runc
def test_a_run_as_another_user(snap: Snap, runc_ready: None) -> None:
    """Its forks run as the same one."""
    told = snap("run", "-q", "--name", "as-nobody", "--user", "nobody", "--", "bash", "-c", "id -un; echo x > /tmp/x")
    assert told.stdout == "nobody\n"
    fork = snap("fork", "--resume", "as-nobody").stdout.strip()
    assert snap("attach", "-q", fork).stdout == "nobody\n"
    unknown = snap("run", "--user", "no-such-user", "--", "id", code=125)
    assert "no-such-user" in unknown.stderr


SPEAKING = (
    AGENT
    + """
for number in range(20):
    print("call", number)  # two writes, since its output is not buffered
    shell("echo %d > n%d" % (number, number))
print("end")
"""
)


def test_the_line_of_a_snapshot_comes_before_the_next_calls_and_in_the_middle_of_none(
    snap: Snap, runtime: str, tmp_path: Path
) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(SPEAKING)
    argv = [sys.executable, "-m", "snapshotd", "run", "--runtime", runtime, str(agent)]
    printed = subprocess.run(
        argv, env=snap.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240
    )
    lines = [line.split() for line in printed.stdout.splitlines() if not line.startswith("snapshotd:")]
    expected = [["▶"], ["●", "0"]]
    for number in range(20):
        expected += [["call", str(number)], ["●", str(number + 1)]]
    assert [line[:1] if line[0] == "▶" else line[:2] for line in lines[:-3]] == expected, printed.stdout
    assert lines[-3:][0] == ["end"]
    assert [line[0] for line in lines[-2:]] == ["●", "■"]
    shown = [line for line in lines if line[0] == "●" and "shell" in line]
    assert [line[-4:] for line in shown] == [["echo", str(n), ">", f"n{n}"] for n in range(20)]
    assert all("+1" in line for line in shown), "its changed files are counted"
