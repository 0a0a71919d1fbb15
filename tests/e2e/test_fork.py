"""Forks are independent of each other and of their parent, which keeps running."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.support import AGENT, Snap, wait_until


@pytest.mark.each_runtime
def test_a_fork_sees_neither_sibling_nor_parent(snap: Snap, runtime: str) -> None:
    parent, _ = snap.create("--runtime", runtime)
    base = snap.sh(parent, "echo base > f")["snapshot"]
    left, right = snap.json("fork", base, "--n", "2")["trajectories"]
    snap.sh(parent, "echo parent > f; touch from-parent")
    snap.sh(left, "echo left > f; touch from-left")
    snap.sh(right, "rm f")
    assert snap.sh(parent, "cat f; ls")["stdout"] == "parent\nf\nfrom-parent\n"
    assert snap.sh(left, "cat f; ls")["stdout"] == "left\nf\nfrom-left\n"
    assert snap.sh(right, "ls")["stdout"] == ""
    assert snap("cat", f"{base}:/workspace/f").stdout == "base\n"
    for trajectory in (left, right, parent):
        snap("rm", "--force", trajectory)


def test_the_parent_runs_on_while_it_is_forked(snap: Snap, runtime: str) -> None:
    parent, _ = snap.create("--runtime", runtime)
    base = snap.sh(
        parent, "echo 0 > ticks; (while :; do echo x >> ticks; sleep 0.01; done) >/dev/null 2>&1 & echo $! > pid"
    )["snapshot"]
    forks = snap.json("fork", base, "--n", "2")["trajectories"]
    first = int(snap.sh(parent, "wc -l < ticks")["stdout"])
    wait_until(lambda: int(snap.sh(parent, "wc -l < ticks")["stdout"]) > first + 5, "the parent's loop goes on")
    for fork in forks:
        before = snap.sh(fork, "wc -l < ticks; grep -l 'sleep 0.0[1]' /proc/[0-9]*/cmdline || echo gone")[
            "stdout"
        ].split()
        after = snap.sh(fork, "wc -l < ticks")["stdout"].split()
        assert before == [after[0], "gone"], "a fork has files, not processes"
        snap("rm", "--force", fork)
    snap("rm", "--force", parent)


@pytest.mark.long  # two of them: the first test
def test_eight_forks_work(snap: Snap, runtime: str) -> None:
    parent, _ = snap.create("--runtime", runtime)
    base = snap.sh(parent, "seq 100 > numbers")["snapshot"]
    made = snap.json("fork", base, "--n", "8")
    assert len(made["trajectories"]) == 8
    for number, fork in enumerate(made["trajectories"]):
        done = snap.sh(fork, f"echo {number} > mine; tail -1 numbers; echo $SNAPSHOTD_FORK_INDEX/$SNAPSHOTD_FORK_COUNT")
        assert done["stdout"] == f"100\n{number}/8\n"
    for number, fork in enumerate(made["trajectories"]):
        assert snap("cat", f"{fork}:/workspace/mine").stdout == f"{number}\n"
        snap("rm", "--force", fork)
    snap("rm", "--force", parent)


def test_forks_of_an_agent_run_with_their_own_arguments(snap: Snap, runtime: str, tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT + 'shell(f"echo {sys.argv[1:]} >> args")\n')
    events = [line for line in snap("run", "--json", "--runtime", runtime, agent, "first").stdout.splitlines()]
    assert events
    trajectory = snap.json("ls")[-1]["id"]
    start = snap.json("log", trajectory)[0]["id"]
    made = snap.json("fork", start, "--n", "2", "--", "--variant", "{index}")
    for number, fork in enumerate(made["trajectories"]):
        snap("attach", fork)
        assert snap("cat", f"{fork}:/workspace/args").stdout == f"[--variant, {number}]\n"
        assert [s["tool"]["name"] for s in snap.json("log", fork)] == ["shell", "exit"]


def test_a_program_that_cannot_start_leaves_no_fork(snap: Snap, runtime: str) -> None:
    parent, snapshot = snap.create("--runtime", runtime)
    before = {t["id"] for t in snap.json("ls")}
    assert "no-such-program" in snap("fork", snapshot, "--n", "3", "--", "no-such-program", code=127).stderr
    assert {t["id"] for t in snap.json("ls")} == before
    snap("rm", "--force", parent)


def test_numbers_out_of_range_start_nothing(snap: Snap, runtime: str) -> None:
    parent, snapshot = snap.create("--runtime", runtime)
    before = len(snap.json("ls"))
    for number in ("0", "-1", "10000", "many"):
        assert snap("fork", snapshot, "--n", number, code=2).stderr
    assert len(snap.json("ls")) == before
    snap("rm", "--force", parent)


def test_variants_differ_in_environment_arguments_and_name(snap: Snap, runtime: str, tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    program = "shell(\"echo first > f\")\nshell(f\"echo {os.environ.get('MODE', 'none')} {sys.argv[1:]} >> f\")\n"
    agent.write_text(AGENT + program)
    snap("run", "--runtime", runtime, "-e", "MODE=source", agent, "given")
    middle = snap.json("log", snap.json("ls")[-1]["id"])[1]["id"]
    file = tmp_path / "ways.toml"
    file.write_text('[cold]\nenv.MODE = "{variant}-{index}"\n[warm]\nargs = ["--way", "{variant}"]\n')
    key = "ghp_" + "a1B2" * 9
    more = ("--variant", "warm:name=hot-{index}", "--variant", "same", "--variant", f"same:env.KEY={key}")
    made = snap.json("fork", "--resume", middle, "--variants", file, *more, "--name", f"{runtime}-way")
    assert made["variants"] == ["cold", "warm", "same"]
    for fork, content, name, mode in zip(
        made["trajectories"],
        ("cold-0 [given]", "source [--way, warm]", "source [given]"),
        (f"{runtime}-way-cold", "hot-1", f"{runtime}-way-same"),
        ("cold-0 0", "source 0", "source 40"),
        strict=True,
    ):
        snap("attach", fork)
        assert snap("cat", f"{fork}:/workspace/f").stdout == f"first\n{content}\n"
        assert snap.sh(name, "echo $MODE ${#KEY}")["stdout"] == f"{mode}\n", (
            "it holds when the sandbox starts again, too"
        )
        snap("rm", "--force", fork)


@pytest.mark.runc
def test_variants_are_all_made_or_none(snap: Snap) -> None:
    parent, snapshot = snap.create("--runtime", "runc", "--name", "trunk-of-variants")
    before = {t["id"] for t in snap.json("ls")}

    def fork(*variants: str, code: int) -> str:
        words = [word for one in variants for word in ("--variant", one)]
        return snap("fork", snapshot, *words, code=code).stderr

    assert "no-such-program" in fork("a:args=true", "b:args=no-such-program", code=127)
    assert "trunk-of-variants" in fork("a", "b:name=trunk-of-variants", code=6)
    assert "the name 'x'" in fork("a:name=x", "b:name=x", code=2)
    assert "malformed" in fork("a:name={nothing}", code=2)
    assert "cannot be a variant" in fork("a/b", code=2)
    assert {t["id"] for t in snap.json("ls")} == before
    snap("rm", "--force", parent)
