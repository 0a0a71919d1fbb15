"""Forks side by side: comparison call by call, and the call that broke it."""

from __future__ import annotations

import pytest

from snapshotd.client import Snapshotd
from snapshotd.errors import UsageError
from tests.e2e.support import Snap

CALLS = 64
CULPRIT = 41


@pytest.fixture(scope="module")
def box(snap: Snap) -> str:
    """A trajectory of many calls, of which one breaks `test -e good`."""
    trajectory, _ = snap.create("--runtime", "runc")
    client = Snapshotd(state_dir=snap.state_dir, autostart=False)
    client.exec(trajectory, ["touch", "good"])
    for number in range(1, CALLS + 1):
        client.exec(trajectory, ["sh", "-c", f"echo {number} > step" + ("; rm good" if number == CULPRIT else "")])
    return trajectory


@pytest.mark.runc
def test_bisect_names_the_call_that_broke_it(snap: Snap, box: str) -> None:
    good = snap.json("log", "--all", box)[1]["id"]
    found = snap.json("bisect", "--good", good, "--repeat", "1", box, "--", "test", "-e", "good")
    assert found["first_bad"]["tool"]["arguments"]["argv"][-1].endswith("rm good")
    assert (found["rounds"] <= 7, found["flaky"], found["unknown"]) == (True, False, [])
    assert [change["path"] for change in found["changes"] if change["change"] == "deleted"] == ["/workspace/good"]
    side_by_side = snap.json("bisect", "--good", good, "--parallel", "3", box, "--", "test", "-e", "good")
    assert side_by_side["first_bad"]["id"] == found["first_bad"]["id"]
    assert side_by_side["rounds"] <= 3
    shown = snap("bisect", "--good", good, box, "--", "test", "-e", "good")
    assert "rm good" in shown.stdout
    assert "D /workspace/good" in shown.stdout
    assert "passes (0)" in shown.stderr


@pytest.mark.runc
def test_what_bisect_refuses(snap: Snap, box: str) -> None:
    refused = snap("bisect", box, "--", "true", code=UsageError.exit_code)
    assert "passes at snapshot" in refused.stderr
    refused = snap("bisect", box, "--", "false", code=UsageError.exit_code)
    assert "fails at snapshot" in refused.stderr
    refused = snap("bisect", box, "--", "sh", "-c", "exit 125", code=UsageError.exit_code)
    assert "cannot tell" in refused.stderr
    snap("bisect", box, code=UsageError.exit_code)


@pytest.mark.runc
def test_a_flaky_command_is_said(snap: Snap, box: str) -> None:
    """It passes by the clock's last digit, except at the ends."""
    log = snap.json("log", "--all", box)
    script = f"n=$(cat step 2>/dev/null || echo 0); [ $n = 0 ] || {{ [ $n != {CALLS} ] && [ $(($(date +%s%N) / 1000 % 2)) = 0 ]; }}"
    found = snap.json("bisect", "--good", log[1]["id"], "--repeat", "20", box, "--", "sh", "-c", script)
    assert found["flaky"]


@pytest.mark.runc
def test_compare_names_the_first_difference(snap: Snap) -> None:
    trajectory, _ = snap.create("--runtime", "runc", "--name", "base")
    for number in range(4):
        snap.sh(trajectory, f"echo {number} > f{number}")
    left, right = snap.json("fork", "base", "--n", "2")["trajectories"]
    for fork, fifth in ((left, "echo left > f"), (right, "echo right > f")):
        snap.sh(fork, fifth)
        if fork == right:
            snap.sh(fork, "echo one more > extra")
        for number in range(6, 9):
            snap.sh(fork, f"echo {number} > f{number}")
        snap.sh(fork, "cat f")
    found = snap.json("compare", left, right)
    (pair,) = found["pairs"]
    assert found["fork_point"]["tool"]["arguments"]["argv"][-1] == "echo 3 > f3"
    assert pair["first_difference"]["number"] == 5
    assert [call["difference"] for call in pair["calls"]] == ["arguments", "right", "same", "same", "same", "outcome"]
    assert sorted(change["path"] for change in pair["files"]) == ["/workspace/extra", "/workspace/f"]
    assert [one["calls"] for one in found["branches"]] == [5, 6]
    assert [one["added"] for one in found["branches"]] == [4, 5]
    shown = snap("compare", left, right).stdout
    assert "First difference: call 5, the same tool with other arguments." in shown
    assert "A /workspace/extra" in shown
    assert "| calls | 5 | 6 |" in snap("compare", "--markdown", left, right).stdout
    page = snap.state_dir.parent / "page.html"
    snap("compare", "--html", page, left, right)
    assert "call 5" in page.read_text()
    assert "http" not in page.read_text().replace("http-equiv", "")
    alone, _ = snap.create("--runtime", "runc")
    assert snap.json("compare", left, alone)["fork_point"] is None
    snap("compare", left, code=UsageError.exit_code)
    snap("rm", "--force", alone, left, right, "base")
