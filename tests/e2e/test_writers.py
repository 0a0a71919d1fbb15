"""Two writers on one trajectory: at each step exactly one goes on, and the other is told where the head is and how to
go another way."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from snapshotd.client import Snapshotd
from snapshotd.client.results import ExecInfo
from snapshotd.errors import Conflict
from snapshotd.types import short
from tests import long
from tests.e2e.support import Snap

pytestmark = pytest.mark.runc
STEPS = long.size(50, 1000)
PROCESS_STEPS = max(10, STEPS // 10)
WAIT_S = 120.0
WRITER = """
import sys
from snapshotd.client import Snapshotd
from snapshotd.errors import Conflict

state_dir, trajectory, name, steps = sys.argv[1:]
client = Snapshotd(state_dir)
won = 0
while True:
    head = client.trajectory(trajectory).head
    if client.snapshot(head).seq >= int(steps):
        break
    try:
        client.exec(trajectory, ["sh", "-c", "echo %s >> log" % name], if_head=head)
        won += 1
    except Conflict as error:
        assert "snapshotd fork" in error.message, error.message
print(won)
"""


@pytest.mark.timeout(1800)
def test_exactly_one_wins_at_each_step(snap: Snap) -> None:
    client = Snapshotd(snap.state_dir)
    trajectory, head = snap.create("--runtime", "runc")
    together = threading.Barrier(2, timeout=WAIT_S)

    def write(writer: int, step: int, head: str) -> ExecInfo | Conflict:
        together.wait()
        try:
            return client.exec(trajectory, ["sh", "-c", f"echo {step} {writer} >> log"], if_head=head)
        except Conflict as exc:
            return exc

    won: list[int] = []
    with ThreadPoolExecutor(2) as pool:
        for step in range(STEPS):
            answers = [
                future.result(WAIT_S) for future in [pool.submit(write, writer, step, head) for writer in range(2)]
            ]
            (winner,) = [writer for writer, answer in enumerate(answers) if isinstance(answer, ExecInfo)]
            taken, refusal = answers[winner], answers[1 - winner]
            assert isinstance(taken, ExecInfo)
            assert taken.snapshot is not None
            assert isinstance(refusal, Conflict)
            _names_the_head(refusal.message, trajectory, head, taken.snapshot.id)
            assert taken.snapshot.parent == head
            head = taken.snapshot.id
            won.append(winner)
    assert [one.seq for one in client.log(trajectory)] == list(range(STEPS + 1))
    expected = "".join(f"{step} {winner}\n" for step, winner in enumerate(won))
    assert b"".join(client.cat(head, b"/workspace/log")).decode() == expected, (
        "what the losers would have done has not happened"
    )
    client.remove(trajectory, force=True)


def _names_the_head(message: str, trajectory: str, asked: str, head: str) -> None:
    """The loser came while the winner was at it, or after that."""
    assert short(trajectory) in message
    assert f"snapshotd fork {short(asked)}" in message
    late, meanwhile = f"the head of {short(trajectory)} is {short(head)} and no", f"from its head {short(asked)}"
    assert late in message or meanwhile in message


@pytest.mark.timeout(600)
def test_two_processes_take_turns_without_losing_a_step(snap: Snap) -> None:
    trajectory, _ = snap.create("--runtime", "runc")
    command = [sys.executable, "-c", WRITER, str(snap.state_dir), trajectory]
    writers = [
        subprocess.Popen(
            [*command, name, str(PROCESS_STEPS)],
            env=snap.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b")
    ]
    said = [writer.communicate(timeout=500) for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0], said
    log = snap.json("log", "--all", trajectory)
    assert [one["seq"] for one in log] == list(range(PROCESS_STEPS + 1))
    assert [one["parent"] for one in log[1:]] == [one["id"] for one in log[:-1]]
    lines = snap("cat", f"{log[-1]['id']}:/workspace/log").stdout.split()
    assert [lines.count(name) for name in ("a", "b")] == [int(out) for out, _ in said]
    snap("rm", "--force", trajectory)


def test_the_command_line_refuses_an_old_head_and_offers_a_fork(snap: Snap, runtime: str) -> None:
    trajectory, first = snap.create("--runtime", runtime)
    second = snap.json("exec", "--if-head", first, trajectory, "--", "sh", "-c", "echo one > file")["snapshot"]
    refused = snap("exec", "--if-head", first, trajectory, "--", "sh", "-c", "echo two > file", code=125).stderr
    assert short(second) in refused
    assert f"`snapshotd fork {short(first)}`" in refused
    assert [one["id"] for one in snap.json("log", trajectory)] == [first, second]
    (other,) = snap.json("fork", first)["trajectories"]
    assert (
        snap.json("exec", "--if-head", first, other, "--", "sh", "-c", "echo two > file; cat file")["stdout"] == "two\n"
    )
    assert snap("cat", f"{trajectory}:/workspace/file").stdout == "one\n"
    for one in (other, trajectory):
        snap("rm", "--force", one)
