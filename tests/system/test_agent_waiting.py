"""Parking for real where the answer takes long or comes from the record: the root is pivoted while an agent waits for a
person, and at the beginning of every replayed call."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from snapshotd.layers.pivot import layout_of, pivot
from tests.agent_daemon import FakeDaemon
from tests.parking_box import Box

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes mount and pid namespaces")

PROGRAM = """
    import os
    from snapshotd.agent import Denied, approve, model, tool
    log = open("log", "a")
    where = os.getcwd()
    def check(written):
        assert os.getcwd() == where, os.getcwd()
        log.write(written); log.flush()
        assert open("log").read().endswith(written)
    @tool
    def step(n): return n
    @tool(approve=True)
    def pay(n): return n
    check("a")
    assert approve("Sure?")
    check("b")
    assert pay(1) == 1
    check("c")
    try: pay(2)
    except Denied: pass
    check("d")
    assert model("m", 1, call=lambda: 2) == 2 and step(3) == 3
    check("e")
"""


@pytest.fixture
def daemon(box: Box) -> Iterator[FakeDaemon]:
    """In the place of the box's own."""
    box.server.close()
    made = FakeDaemon()
    with made.serving(box.shared / "agent.sock"):
        yield made


def pivoted(box: Box) -> None:
    box._stack = box._stack.push(box._upper)
    box._upper = box._layer()
    pivot(box._target, box._store, box._stack, box._upper, layout_of(box._target), seal=True)


def parked(requests: list[dict[str, Any]]) -> list[Any]:
    return [request.get("parked", request.get("unparked_because")) for request in requests]


def test_the_root_may_change_while_a_person_is_asked(box: Box, daemon: FakeDaemon) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(box.run, PROGRAM)
        for approved in (True, True, False):
            question = daemon.question()
            pivoted(box)
            daemon.decide(question, approved)
        running.result(60)
    assert parked(daemon.sent("approve")) == [True]
    assert [request["parked"] for request in daemon.sent("call_begin") if request["name"] == "pay"] == [True, True]
    assert len(daemon.pids) == 1  # parked, nothing else of it runs: there is no need for another connection


def test_the_root_changes_at_every_replayed_call(box: Box, daemon: FakeDaemon) -> None:
    program = PROGRAM.replace("try: pay(2)\n    except Denied: pass", "pass")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(box.run, program)
        for _ in range(2):
            daemon.decide(daemon.question(), True)
        running.result(60)
    daemon.close()
    again = daemon.resumed()
    again.at_replayed = lambda: pivoted(box)
    with again.serving(box.shared / "agent.sock"):
        box.run(program)
    assert again.old_journal == []
    assert parked([*again.sent("approve"), *again.sent("call_begin")]) == [True] * 4


@pytest.mark.parametrize("death", ["arriving", "after"])
def test_the_root_may_change_while_no_daemon_is_there(box: Box, daemon: FakeDaemon, death: str) -> None:
    """A process that was parked stays so until a daemon answers: nothing of the old root is in use while it looks for
    one."""
    requests = ("approve", "call_begin", "call_end")
    daemon.deaths = dict.fromkeys(requests, death)
    daemon.at_death = lambda pid: pivoted(box)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(box.run, PROGRAM)
        for approved in (True, True, False):
            daemon.decide(daemon.question(), approved)
        running.result(60)
    assert daemon.deaths == {}
    for op in requests:
        first, second = daemon.sent(op)[:2]
        assert (first["parked"], first.get("again"), second["parked"], second["again"]) == (True, None, True, True)
    assert len(daemon.pids) == 4  # on one connection after the other
