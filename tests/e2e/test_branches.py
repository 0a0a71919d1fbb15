"""Forks side by side: comparison call by call, and the call that broke it."""

from __future__ import annotations

import asyncio
import html
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import pytest

from snapshotd.client import AsyncSnapshotd, Snapshotd
from snapshotd.errors import UsageError
from tests.e2e.support import Snap

T = TypeVar("T")

CALLS = 64
CULPRIT = 41


@pytest.fixture(scope="module")
def plain(snap: Snap) -> Snapshotd:
    return Snapshotd(state_dir=snap.state_dir, autostart=False)


def asynchronous(snap: Snap, work: Callable[[AsyncSnapshotd], Awaitable[T]]) -> T:
    async def run() -> T:
        return await work(AsyncSnapshotd(state_dir=snap.state_dir, autostart=False))

    return asyncio.run(run())


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
    others = asynchronous(snap, lambda client: client.bisect(box, ["test", "-e", "good"], good=good, parallel=3))
    assert (others.first_bad.id, others.rounds <= 3) == (found["first_bad"]["id"], True)
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
    refused = snap("bisect", box, "--", "no-such-program", code=UsageError.exit_code)
    assert "since its program 'no-such-program' is not there, where it should pass" in refused.stderr
    snap("bisect", box, code=UsageError.exit_code)


@pytest.mark.long  # one that is steady: test_bisect_names_the_call_that_broke_it
@pytest.mark.runc
def test_a_flaky_command_is_said(snap: Snap, box: str) -> None:
    """It passes by the clock's last digit, except at the ends."""
    log = snap.json("log", "--all", box)
    script = f"n=$(cat step 2>/dev/null || echo 0); [ $n = 0 ] || {{ [ $n != {CALLS} ] && [ $(($(date +%s%N) / 1000 % 2)) = 0 ]; }}"
    found = snap.json("bisect", "--good", log[1]["id"], "--repeat", "20", box, "--", "sh", "-c", script)
    assert found["flaky"]


SAID = "call 5, the same tool with other arguments."


def steps(client: Snapshotd, trajectory: str, *scripts: str) -> None:
    for script in scripts:
        client.exec(trajectory, ["sh", "-c", script])


@pytest.mark.runc
def test_what_branches_were_forked_with_is_their_first_difference(snap: Snap, plain: Snapshotd) -> None:
    """Markers are no calls, and forks without a step have their own names."""
    base, _ = plain.create(runtime="runc", name="hinted")
    plain.exec(base.id, ["touch", "a"])
    hints = {label: {"add_messages": [{"role": "user", "content": f"try {label}"}]} for label in ("left", "right")}
    forks = [fork.id for fork in plain.fork("hinted", name="h-{variant}", variants=hints).trajectories]
    for fork in forks:
        plain.exec(fork, ["touch", "b"])
    shown = snap("compare", "h-left", "h-right").stdout
    assert "forked with user: try left" in shown
    assert "forked with user: try right" in shown
    assert "First difference: what they were forked with." in shown
    assert " edit" not in shown
    found = snap.json("compare", "h-left", "h-right")
    assert [one["call_count"] for one in found["branches"]] == [1, 1]
    assert [one["forked_with"] for one in found["branches"]] == ["user: try left", "user: try right"]
    assert [call["difference"] for call in found["pairs"][0]["calls"]] == ["same"]
    log = snap.json("log", "h-left")
    assert [(one["tool"]["name"], one["kind"]) for one in log] == [("edit", "marker"), ("exec", "call")]
    assert "user: try left" in snap("log", "h-left").stdout
    assert "user: try left" in snap("tree").stdout
    plain.fork("hinted", 2, name="still-{index}")
    head, *_ = snap("compare", "still-0", "still-1").stdout.splitlines()[2:]
    assert head.split() == ["CALL", "STILL-0", "STILL-1"]
    of_one = [one["id"][:12] for one in snap.json("log", "hinted")]
    head, *_ = snap("compare", *of_one).stdout.splitlines()[2:]
    assert head.split() == ["CALL", *(one.upper() for one in of_one)]
    for name in ("h-left", "h-right", "still-0", "still-1", "hinted"):
        plain.remove(name, force=True)


@pytest.mark.runc
def test_forks_that_part_at_call_5_of_20(snap: Snap, plain: Snapshotd, tmp_path: Path) -> None:
    """Every form names the call and what differed, and shows the fifth call of both."""
    base, _ = plain.create(runtime="runc", name="base")
    steps(plain, base.id, *(f"echo {number} > f" for number in range(1, 5)))
    left, right = (fork.id for fork in plain.fork("base", 2).trajectories)
    for fork, fifth in ((left, "echo left > side"), (right, "echo right > side")):
        steps(plain, fork, fifth, *(f"echo {number} > f" for number in range(6, 20)), "cat side")
    found = snap.json("compare", left, right)
    (pair,) = found["pairs"]
    assert found["fork_point"]["tool"]["arguments"]["argv"][-1] == "echo 4 > f"
    assert (pair["first_difference"]["number"], pair["first_difference"]["difference"]) == (5, "arguments")
    assert [call["difference"] for call in pair["calls"]] == ["arguments", *["same"] * 14, "outcome"]
    assert pair["calls"][-1]["number"] == 20
    assert [change["path"] for change in pair["changes"]] == ["/workspace/side"]
    assert [one["call_count"] for one in found["branches"]] == [16, 16]
    page = tmp_path / "page.html"
    snap("compare", "--html", page, left, right)
    text, markdown = (snap("compare", *form, left, right).stdout for form in ((), ("--markdown",)))
    for shown in (text, markdown, html.unescape(page.read_text())):
        assert SAID in shown
        assert "echo left > side" in shown
        assert "echo right > side" in shown
        assert "/workspace/side" in shown
    assert "| calls | 16 | 16 |" in markdown
    assert "http" not in page.read_text().replace("http-equiv", "")
    others = asynchronous(snap, lambda client: client.compare(left, right))
    (first,) = [each.first_difference for each in others.pairs]
    assert first is not None
    assert (first.number, first.difference) == (5, "arguments")
    plain.remove(left, force=True)
    plain.remove(right, force=True)
    plain.remove("base", force=True)


@pytest.mark.runc
def test_one_extra_call_in_the_middle_does_not_throw_the_rest_off(snap: Snap, plain: Snapshotd) -> None:
    """Two runs that have nothing in common but what they do."""
    runs = [plain.create(runtime="runc")[0].id for _ in range(2)]
    for run, extra in zip(runs, ((), ("echo more > extra",)), strict=True):
        steps(plain, run, *(f"echo {n} > f" for n in range(5)), *extra, *(f"echo {n} > f" for n in range(5, 10)))
    found = snap.json("compare", *runs)
    (pair,) = found["pairs"]
    assert found["fork_point"] is None
    assert [call["difference"] for call in pair["calls"]] == [*["same"] * 5, "right", *["same"] * 5]
    assert (pair["first_difference"]["number"], pair["first_difference"]["right"]["tool"]["arguments"]["argv"][-1]) == (
        6,
        "echo more > extra",
    )
    assert "A /workspace/extra" in snap("compare", *runs).stdout
    snap("compare", runs[0], code=UsageError.exit_code)
    for run in runs:
        plain.remove(run, force=True)


@pytest.mark.runc
def test_times_are_a_sides_own(snap: Snap, plain: Snapshotd) -> None:
    """Those of a fork begin with it, not with the snapshot that it was made from, and are never below zero."""
    older, first = snap.create("--runtime", "runc")
    for number in range(3):
        snap.sh(older, f"echo {number} > step")
    (fork,) = snap.json("fork", first)["trajectories"]
    snap.sh(fork, "echo 1 > step")
    newer, _ = snap.create("--runtime", "runc")
    snap.sh(newer, "true")

    def took(since: str, ref: str) -> float:
        return (datetime.fromisoformat(plain.snapshot(ref).created_at) - datetime.fromisoformat(since)).total_seconds()

    branches = {one.ref: one.seconds for one in plain.compare(older, fork).branches}
    assert branches == {
        older: took(plain.snapshot(first).created_at, older),
        fork: took(plain.trajectory(fork).created_at, fork),
    }
    assert 0 < branches[fork] < branches[older]
    unrelated = plain.compare(newer, older)
    assert [one.seconds for one in unrelated.branches] == [
        took(plain.trajectory(one).created_at, one) for one in (newer, older)
    ]
    assert [(one.added, one.changed) for one in unrelated.branches] == [(0, 0), (1, 0)], "each against its own first"
