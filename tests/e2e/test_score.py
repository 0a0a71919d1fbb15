"""Scores: a command in a throw-away fork of each snapshot, with files that only the fork has."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from snapshotd.client import Snapshotd
from snapshotd.errors import NotFound, UsageError
from tests.e2e.support import Snap, processes_with, wait_until

REPORT = """
import sys, pathlib
sys.path.insert(0, "/workspace")
from answer import answer
cases = ["" if answer(n) == n * n else "<failure/>" for n in range(int(sys.argv[2]))]
pathlib.Path(sys.argv[1]).write_text("<testsuite>" + "".join(f"<testcase>{c}</testcase>" for c in cases) + "</testsuite>")
sys.exit(any(cases))
"""


@pytest.fixture(scope="module")
def tries(snap: Snap) -> list[str]:
    """Forks of one state with three answers; the last one is right."""
    trajectory, _ = snap.create("--runtime", "runc", "--name", "question")
    client = Snapshotd(state_dir=snap.state_dir, autostart=False)
    snap.sh(
        trajectory, "echo 'from hidden import answer' > answer.py; echo '<testsuite><testcase/></testsuite>' > r.xml"
    )
    forks = [one.id for one in client.fork(trajectory, 3, name="try").trajectories]
    for fork, body in zip(forks, ("n + n", "n * 2 if n else 1", "n * n"), strict=True):
        snap.sh(
            fork, f"echo 'answer = lambda n: {body}' > answer.py; mkdir -p /tmp/score; ln -s /workspace /tmp/score/mine"
        )
    return forks


@pytest.fixture
def hidden(tmp_path: Path) -> Path:
    folder = tmp_path / "hidden"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "check.py").write_text(REPORT)
    (folder / "run.sh").write_text('#!/bin/sh\nexec python3 "$(dirname "$0")/deep/check.py" "$@"\n')
    (folder / "run.sh").chmod(0o755)
    return folder


@pytest.mark.runc
def test_hidden_tests_rank_the_branches(snap: Snap, tries: list[str], hidden: Path) -> None:
    before = [snap.json("show", one)["id"] for one in tries]
    check = ("/tmp/score/run.sh", "r.xml", "4")
    found = snap.json("score", "--with", hidden, "--junit", "r.xml", *tries, "--", *check, code=0)
    assert [(row["ref"], row["rank"], row["score"]) for row in found] == [
        (tries[2], 1, 1.0),
        (tries[0], 2, 0.5),
        (tries[1], 3, 0.25),
    ]
    assert found[1]["runs"][0]["tests"] == {"passed": 2, "failed": 2, "errors": 0, "skipped": 0}
    assert [row["runs"][0]["exit_code"] for row in found] == [0, 1, 1]
    assert [snap.json("show", one)["id"] for one in tries] == before
    alone = snap.json("score", *tries, "--", "test", "-e", "/tmp/score/run.sh")
    assert {row["score"] for row in alone} == {0.0}, "the scorer's files are nowhere but in its own forks"
    clean = snap.json(
        "score", "--with", f"{hidden}:/workspace/h", tries[0], "--", "sh", "-c", "ls h && ! ls /tmp/score/h"
    )
    assert clean[0]["score"] == 1.0
    planted = snap.json("score", "--with", hidden, tries[0], "--", "test", "-e", "/tmp/score/mine")
    assert planted[0]["score"] == 0.0, "a file that the agent has put there is gone"
    shown = snap("score", "--with", hidden, "--junit", "r.xml", "try-0", "try-2", "--", *check)
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert rows[0] == ["RANK", "REF", "SNAPSHOT", "SCORE", "TESTS", "EXIT", "TIME"]
    assert [row[:2] + row[3:7] for row in rows[1:]] == [
        ["1", "try-2", "1", "4", "passed", "0"],
        ["2", "try-0", "0.5", "2", "passed,", "2"],
    ]
    assert "try-0: 0.5 (exit code 1" in shown.stderr


@pytest.mark.long  # of branches: the first test
@pytest.mark.runc
def test_numbers_of_every_snapshot_and_repeated_runs(snap: Snap) -> None:
    trajectory, _ = snap.create("--runtime", "runc")
    for number in range(3):
        snap.sh(trajectory, f"echo {number} > f{number}")
    found = snap.json("score", "--each", "--number", trajectory, "--", "sh", "-c", "ls | wc -l; echo done")
    log = snap.json("log", "--all", trajectory)
    assert [(row["ref"], row["score"]) for row in found] == [(one["id"], 3 - at) for at, one in enumerate(log[::-1])]
    (again,) = snap.json("score", "--repeat", "3", "--parallel", "2", trajectory, "--", "true")
    assert (again["score"], again["standard_error"], again["pass_at"]) == (1.0, 0.0, {"1": 1.0, "3": 1.0})
    assert len(again["runs"]) == 3
    shown = snap("score", "--repeat", "2", trajectory, "--", "false").stdout.splitlines()
    assert shown[0].split() == ["RANK", "REF", "SNAPSHOT", "SCORE", "PASS@1", "PASS@2", "EXIT", "TIME"]
    assert "0 ± 0  0.00    0.00    1 " in shown[1]


@pytest.mark.long  # numbers: the test before
@pytest.mark.runc
def test_a_row_without_a_score_says_why_and_the_rest_goes_on(snap: Snap, tries: list[str], hidden: Path) -> None:
    def errors(*words: str | Path) -> dict[str, str | None]:
        return {row["ref"]: row["error"] for row in snap.json("score", *words, code=1)}

    script = "grep -q 'n \\* n' answer.py && echo 5 || echo five"
    found = snap.json("score", "--number", "nobody", *tries, "--", "sh", "-c", script, code=1)
    assert [(row["ref"], row["score"]) for row in found] == [
        (tries[2], 5.0),
        ("nobody", None),
        (tries[0], None),
        (tries[1], None),
    ]
    assert "nobody" in found[1]["error"]
    assert "is a number (exit code 0); its last line is 'five'" in found[2]["error"]
    assert "no-such-thing" in str(errors(tries[0], "--", "no-such-thing")[tries[0]])
    assert "command not found: no-such" in str(errors("--with", hidden, tries[0], "--", "no-such")[tries[0]])
    assert "(exit code 127)" in str(errors(tries[0], "--", "sh", "-c", "no-such-thing")[tries[0]])
    stale = errors("--junit", "r.xml", tries[0], "--", "true")
    assert "there is no JUnit report at r.xml" in str(stale[tries[0]]), "one that the agent left is not read"
    bomb = "printf '<!DOCTYPE a [<!ENTITY b \"c\">]><a>&b;</a>' > r.xml"
    assert "document type" in str(errors("--junit", "r.xml", tries[0], "--", "sh", "-c", bomb)[tries[0]])
    endless = "ln -s /dev/zero r.xml"
    assert "there is no JUnit report" in str(errors("--junit", "r.xml", tries[0], "--", "sh", "-c", endless)[tries[0]])
    nowhere = errors("--with", f"{hidden}:/proc/x", tries[0], "--", "true")
    assert "cannot be put at /proc/x" in str(nowhere[tries[0]])
    assert "no score: " in snap("score", "nobody", tries[0], "--", "true", code=1).stderr


@pytest.mark.runc
def test_scores_that_are_refused(snap: Snap, tries: list[str], hidden: Path) -> None:
    for words in (
        (tries[0],),
        ("--", "true"),
        ("--number", "--junit", "r.xml", tries[0], "--", "true"),
        ("--with", hidden / "run.sh", tries[0], "--", "true"),
        ("--with", f"{hidden}:/tmp/..", tries[0], "--", "true"),
        ("--repeat", "0", tries[0], "--", "true"),
    ):
        refused = snap("score", *words, code=UsageError.exit_code)
        assert len(refused.stderr.splitlines()) == 1


@pytest.mark.runc
@pytest.mark.parametrize("verb", ["score", "bisect"])
def test_ctrl_c_ends_commands_that_never_end(snap: Snap, tries: list[str], verb: str) -> None:
    length = f"{os.getpid()}.{time.monotonic_ns()}"
    sleeping = f"sleep {length}"
    running = snap.follow(verb, "--parallel", "2", tries[0], *tries[1:] * (verb == "score"), "--", "sleep", length)

    def sleepers() -> int:
        return sum(line.startswith(sleeping) for _, line in processes_with(sleeping))

    wait_until(lambda: sleepers() == 2, "two forks run")
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == 130
    running.communicate()
    wait_until(lambda: not sleepers(), "the forks are gone")


@pytest.mark.runc
def test_a_folder_that_no_fork_takes_leaves_no_thread(snap: Snap, tries: list[str], tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(2 << 20))
    client = Snapshotd(state_dir=snap.state_dir, autostart=False)
    found = client.score(tries, ["true"], with_files=tmp_path, with_path="/proc/x")
    assert {row.mean for row in found} == {None}
    wait_until(lambda: "stdin" not in {thread.name for thread in threading.enumerate()}, "no input is sent")


@pytest.mark.runc
def test_a_tag_moves_only_where_the_command_passes(snap: Snap) -> None:
    trajectory, first = snap.create("--runtime", "runc")
    assert snap.json("tag", "--if", "test -w . && touch here", first, "passing")["tagged"]
    snap.sh(trajectory, "echo 1 > broken")
    refused = snap("tag", "--if", "echo seen; test ! -e broken", trajectory, "passing", code=1)
    assert (refused.stdout, snap.json("show", "passing")["id"]) == ("", first)
    assert "seen" in refused.stderr
    assert "the tag passing stays as it is" in refused.stderr
    answer = snap.json("tag", "--if", "exit 3", trajectory, "nothing", code=1)
    assert (answer["exit_code"], answer["tagged"]) == (3, False)
    snap("show", "nothing", code=NotFound.exit_code)
    head = snap.sh(trajectory, "rm broken")["snapshot"]
    assert snap.json("tag", "--if", "test ! -e broken", trajectory, "passing")["snapshot"] == head
    assert snap.json("show", "passing")["id"] == head
    assert snap("exec", "--snapshot", first, "--", "test", "-e", "here", code=1).stdout == ""
    snap("tag", "--delete", "passing", "--if", "true", code=UsageError.exit_code)


@pytest.mark.long  # commands that never end: test_ctrl_c_ends_commands_that_never_end
@pytest.mark.runc
def test_a_run_that_takes_too_long_has_no_score(snap: Snap, tries: list[str]) -> None:
    script = "grep -q 'n \\* n' answer.py || sleep 600"
    found = snap.json("score", "--timeout", "4", tries[0], tries[2], "--", "sh", "-c", script, code=1)
    assert [(row["ref"], row["score"]) for row in found] == [(tries[2], 1.0), (tries[0], None)]
    assert "did not end within" in found[1]["error"]
