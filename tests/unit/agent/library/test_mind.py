"""Tasks, state and the key-value store, inside and outside of a sandbox."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import STORE, TASKS

from tests.agent_daemon import FakeDaemon

Run = Callable[..., Any]


@pytest.fixture(params=["inside", "outside"])
def place(request: pytest.FixtureRequest, socket_path: Path, tmp_path: Path) -> dict[str, str]:
    """The environment of a program inside and outside of a sandbox."""
    if request.param == "outside":
        return {"SNAPSHOTD_AGENT_SOCKET": str(tmp_path / "none")}
    request.getfixturevalue("server")
    return {}


def test_state(place: dict[str, str], run_agent: Run) -> None:
    run_agent(
        """
        import os
        from snapshotd.agent import state
        assert len(state) == 0 and "k" not in state and state.get("k", 5) == 5
        state["k"] = {"list": [1, (2, 3)], "none": None}
        state["k"]["list"].append(4)                        # a copy
        assert state["k"] == {"list": [1, [2, 3]], "none": None}
        nested = state["k"]
        nested["more"] = True
        state["k"] = nested
        state["big"] = "x" * 100000
        state.update(a=1, b=2)
        assert state.setdefault("a", 9) == 1 and state.pop("b") == 2
        assert sorted(state) == ["a", "big", "k"] and dict(state)["k"]["more"]
        for key, value in [("k", {1, 2}), ("k", object()), ("k", float("nan")), ("k", "\\udc80"), ("", 1), (3, 1), ("a\\n", 1)]:
            try: state[key] = value
            except (TypeError, ValueError): pass
            else: raise SystemExit("accepted %r" % [key, value])
        for key in ("absent", "b"):
            try: del state[key]
            except KeyError: pass
            else: raise SystemExit("deleted %r" % key)
        assert state["k"]["more"]
        child = os.fork()
        if not child:
            assert state["a"] == 1
            state["a"] = 2
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        state.refresh()
        state["last"] = repr(state)
    """,
        **place,
    )


def test_state_is_written_through_and_read_once(daemon: FakeDaemon, server: FakeDaemon, run_agent: Run) -> None:
    daemon.state = {"old": [1]}
    run_agent("""
        from snapshotd.agent import state
        for _ in range(50): assert state["old"] == [1]
        state["new"] = "n"
        del state["old"]
    """)
    assert daemon.state == {"new": "n"}
    assert len(daemon.sent("state")) == 1


def test_store(place: dict[str, str], run_agent: Run) -> None:
    run_agent(STORE, **place)


SAID = [
    "build",
    "step 1",
    "{'built': 1}",
    "check",
    "step 2",
    "2",
    "step 4",
    "None",
    "step 3",
    "broken no",
    "Conflict",
    "Conflict",
    "Conflict",
    "build completed [] None",
    "test it completed ['build'] None",
    "with completed ['build', 'test it'] None",
    "optional skipped [] not today",
    "outer skipped [] both",
    "inner skipped [] both",
]


def test_tasks(place: dict[str, str], run_agent: Run) -> None:
    lines = run_agent(TASKS, **place).stdout.splitlines()
    assert sorted(lines[: len(SAID)]) == sorted(SAID)
    assert lines[len(SAID)].startswith("broken failed [] ValueError: ")


def test_completed_tasks_are_skipped_in_a_replay(run_agent: Run, socket_path: Path) -> None:
    first = FakeDaemon()
    with first.serving(socket_path):
        before = run_agent(TASKS).stdout.splitlines()
    tasks = [call for call in first.calls.values() if call["kind"] == "task"]
    assert [(call["name"], call["status"], call["result"]) for call in tasks] == [
        ("build", "done", {"built": 1}),
        ("test it", "done", 2),
        ("with", "done", [5]),
        ("optional", "done", None),
        ("outer", "done", None),
        ("inner", "done", None),
        ("broken", "failed", None),
    ]
    assert {call["request"]["arguments"]["n"]: call["request"].get("task") for call in first.named("step")} == {
        1: "build",
        2: "test it",
        4: "with",
        3: "broken",
    }
    # its status is changed before its call ends, so that the snapshot has it
    assert first.events.index(("task", "build", "completed")) < first.events.index(("end", "build", "done"))
    second = first.resumed()
    with second.serving(socket_path):
        after = run_agent(TASKS).stdout.splitlines()
    assert "{'built': 1}" in after
    assert "build" not in after
    assert "check" not in after
    assert [
        line for line in after if line.startswith("step")
    ] == []  # their calls are answered from the record, or skipped with the task
    assert [line for line in before if line.startswith("broken no")] == [
        line for line in after if line.startswith("broken no")
    ]


def test_a_child_that_is_forked_in_a_task_does_not_end_it(
    daemon: FakeDaemon, server: FakeDaemon, run_agent: Run
) -> None:
    run_agent("""
        import os
        from snapshotd.agent import task
        with task("work"):
            child = os.fork()
            if child:
                assert os.waitpid(child, 0)[1] == 0
        if not child:
            os._exit(0)
    """)
    assert daemon.events == [
        ("task", "work", "in-progress"),
        ("begin", "work"),
        ("task", "work", "completed"),
        ("end", "work", "done"),
    ]
