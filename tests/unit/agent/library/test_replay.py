"""Programs that are started again: what they get from the record, and where they go live."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import OUTCOMES, STEPS

from tests.agent_daemon import FakeDaemon

Run = Callable[..., Any]


def test_a_replay_gives_every_outcome_again_and_runs_nothing(run_agent: Run, socket_path: Path) -> None:
    first = FakeDaemon()
    with first.serving(socket_path):
        before = run_agent(OUTCOMES).stdout.splitlines()
    second = first.resumed()
    with second.serving(socket_path):
        after = run_agent(OUTCOMES).stdout.splitlines()
    assert after[0] == before[0]
    assert len(before[1]) > 100
    assert after[1] == "[]"
    assert second.sent("call_end") == []
    assert second.old_journal == []
    assert all("parked" in request for request in second.sent("call_begin"))


def test_where_the_journal_ends_the_program_is_live(run_agent: Run, socket_path: Path) -> None:
    first = FakeDaemon()
    with first.serving(socket_path):
        before = run_agent(STEPS.replace("LAST", "3")).stdout.splitlines()
    second = first.resumed()
    with second.serving(socket_path):
        after = run_agent(STEPS.replace("LAST", "5")).stdout.splitlines()
    assert [line for line in before if line.startswith("ran")] == ["ran 0", "ran 1", "ran 2"]
    assert [line for line in after if line.startswith("ran")] == ["ran 3", "ran 4"]
    assert after[0] == before[0]  # time, chance and names
    assert [line for line in after if len(line) == 32] == [line for line in before if len(line) == 32]
    assert second.conversation == first.conversation == [{"role": "user", "content": "go"}]
    parked = [("parked" in request, request["arguments"]["n"]) for request in second.sent("call_begin")]
    assert parked == [
        (True, 0),
        (True, 1),
        (True, 2),
        (True, 3),
        (False, 4),
    ]  # the one that went live was the last to be sent parked
    assert second.state == {"last": 4}


def test_a_call_that_was_cut_off_runs_again_under_its_key(run_agent: Run, socket_path: Path) -> None:
    program = """
        import os
        from snapshotd.agent import current_call, tool
        @tool(side_effect="idempotent")
        def send():
            print(current_call().key, flush=True)
            if KILLED: os._exit(1)
            return 1
        send()
    """
    first = FakeDaemon()
    with first.serving(socket_path):
        before = run_agent(program.replace("KILLED", "True"), check=False).stdout
    assert first.lost == [first.journal[0].id]
    second = first.resumed()
    with second.serving(socket_path):
        after = run_agent(program.replace("KILLED", "False")).stdout
    assert before == after != "\n"
    assert second.named("send")[0]["status"] == "done"


def test_a_program_that_does_something_else_is_told(run_agent: Run, socket_path: Path) -> None:
    program = """
        from snapshotd.agent import SnapshotdError, tool
        @tool
        def step(n): print("ran")
        try: step(NUMBER)
        except SnapshotdError as error: print(error.code)
    """
    first = FakeDaemon()
    with first.serving(socket_path):
        run_agent(program.replace("NUMBER", "1"))
    with first.resumed().serving(socket_path):
        assert run_agent(program.replace("NUMBER", "2")).stdout == "Diverged\n"


def test_results_that_somebody_put_in_place_of_a_generators(run_agent: Run, socket_path: Path) -> None:
    program = """
        from snapshotd.agent import tool
        @tool
        def count():
            yield 1
        print(list(count()), list(count()))
    """
    first = FakeDaemon()
    with first.serving(socket_path):
        run_agent(program)
    first.journal[0].outcome["result"] = ["a", "b"]
    first.journal[1].outcome["result"] = "text"
    with first.resumed().serving(socket_path):
        assert run_agent(program).stdout == "['a', 'b'] []\n"


def test_items_that_were_not_recorded_are_not_left_out_silently(run_agent: Run, socket_path: Path) -> None:
    program = """
        from snapshotd.agent import ReplayedError, tool
        @tool
        def count(): yield from range(10003)
        got = []
        try:
            for item in count(): got.append(item)
        except ReplayedError as error: print(error)
        print(len(got))
    """
    first = FakeDaemon()
    with first.serving(socket_path):
        assert run_agent(program).stdout == "10003\n"
    with first.resumed().serving(socket_path):
        said = run_agent(program).stdout.splitlines()
    assert said[0].startswith("3 items of count were not recorded")
    assert said[1] == "10000"


def test_facts_within_a_tool_are_its_own(daemon: FakeDaemon, server: FakeDaemon, run_agent: Run) -> None:
    run_agent("""
        from snapshotd.agent import message, now, randint, random, state, tool, uuid
        @tool
        def work():
            now(), random(), uuid()
            message("tool", "inside")
            state["k"] = 1
        work()
        assert 0 <= random() < 1 and len(uuid()) == 36
        assert {randint(1, 3) for _ in range(200)} == {1, 2, 3}
        for low, high in ((2, 1), (0, 1 << 53)):
            try: randint(low, high)
            except ValueError: pass
            else: raise SystemExit("accepted")
        message("user", "outside")
    """)
    assert len(daemon.facts) == 202
    (work,) = daemon.calls
    assert [request.get("within") for request in daemon.sent("message")] == [work, None]
    assert daemon.sent("state_set")[0]["within"] == work


def test_arguments_that_are_not_json_are_the_same_in_every_run(run_agent: Run, socket_path: Path) -> None:
    program = """
        from snapshotd.agent import tool
        class Box: pass
        @tool
        def take(value): pass
        for value in (Box(), [Box, print, lambda: 1], {"a", "b", "c", Box}, {"k": {Box()}}, frozenset("xyz"), set()):
            take(value)
    """
    first = FakeDaemon()
    with first.serving(socket_path):
        run_agent(program, PYTHONHASHSEED="1")
    assert first.named("take")[2]["arguments"]["value"] == "{'a', 'b', 'c', <class '__main__.Box'>}"
    with first.resumed().serving(socket_path):
        run_agent(program, PYTHONHASHSEED="2")


@pytest.mark.parametrize("threads", [1, 6])
def test_parallel_calls_are_replayed(threads: int, run_agent: Run, socket_path: Path) -> None:
    program = """
        from concurrent.futures import ThreadPoolExecutor
        from snapshotd.agent import tool
        @tool
        def work(n):
            print("ran", flush=True)
            return n * n
        with ThreadPoolExecutor(THREADS) as pool:
            assert sorted(pool.map(work, range(30))) == [n * n for n in range(30)]
    """.replace("THREADS", str(threads))
    first = FakeDaemon()
    with first.serving(socket_path):
        assert run_agent(program).stdout.count("ran") == 30
    with first.resumed().serving(socket_path):
        assert run_agent(program).stdout == ""
