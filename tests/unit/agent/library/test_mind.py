"""Tasks, state and the key-value store, inside and outside of a sandbox."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
    run_agent("""
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
    """, **place)


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


STORE = """
    from snapshotd.agent import SnapshotdError, store
    assert store.get("k") is None and store.get("k", 7) == 7 and store.entry("k") is None
    assert store.put("k", {"color": "red"}) == 1
    assert store.put("k", {"color": "blue"}, expected_version=1) == 2
    assert store.get("k")["color"] == "blue" and store.get("k", version=1)["color"] == "red" and store.get("k", version=9) is None
    assert store.entry("k") == ("k", {"color": "blue"}, 2, "default")
    assert store.put("k", 5, namespace="other") == 1
    store.put("l", {"color": "blue"}); store.put("m", {"color": "red"})
    assert [entry.key for entry in store.search()] == ["k", "l", "m"]
    assert [entry.key for entry in store.search(limit=1)] == ["k"]
    assert [entry.key for entry in store.search("l")] == ["l"] and [entry.key for entry in store.search("", after="l", limit=1)] == ["m"]
    assert [entry.key for entry in store.search(where={"color": "blue"})] == ["k", "l"]
    def conflict(function):
        try: function()
        except SnapshotdError as error: return error.code
        raise SystemExit("accepted")
    assert conflict(lambda: store.put("k", 1, expected_version=0)) == "Conflict"
    assert conflict(lambda: store.delete("k", expected_version=1)) == "Conflict"
    assert conflict(lambda: store.delete("absent")) == "NotFound"
    store.delete("k", expected_version=2)
    assert store.get("k") is None and store.get("k", namespace="other") == 5
    assert store.put("k", "again", expected_version=0) == 4
    store.put("brief", 1, ttl_s=3600)
    store.put("large", "x" * 100000)
    assert len(store.get("large")) == 100000
    for value in ({1}, float("inf")):
        try: store.put("k", value)
        except (TypeError, ValueError): pass
        else: raise SystemExit("accepted")
"""


def test_store(place: dict[str, str], run_agent: Run) -> None:
    run_agent(STORE, **place)


TASKS = """
    import asyncio
    from snapshotd.agent import SnapshotdError, model, task, tasks, tool
    @tool
    def step(n): print("step", n); return n
    @task
    def build(n):
        print("build")
        return {"built": step(n)}
    @task("test it", depends=["build"])
    async def check(n):
        print("check")
        return step(n)
    @task("optional")
    def optional():
        task.skip("not today")
    @task("broken")
    def broken():
        step(3)
        raise ValueError("no")
    task.plan("build", "test it", "with")
    with_plan = [entry["status"] for entry in tasks()]
    print(build(1))
    print(asyncio.run(check(2)))
    with task("with", depends=["build", "test it"]) as t:
        step(4)
        t.result = [5]
    print(optional())
    with task("outer") as outer:
        with task("inner"):
            outer.skip("both")
        raise SystemExit("not skipped")
    try: broken()
    except ValueError as error: print("broken", error)
    for needed in ("broken", "optional", "nobody"):
        try:
            with task("late", depends=[needed]): print("ran")
        except SnapshotdError as error: print(error.code)
    for entry in tasks(): print(entry["name"], entry["status"], entry["depends"], entry["note"])
    for wrong in (lambda: task("x", depends="build"), lambda: task(""), lambda: task("x")(iter_ ), lambda: task().__enter__(), task.skip):
        try: wrong()
        except (TypeError, ValueError, SnapshotdError): pass
        else: raise SystemExit("accepted")
""".replace("    task.plan(", "    def iter_(): yield 1\n    task.plan(", 1)
SAID = [
    "build", "step 1", "{'built': 1}", "check", "step 2", "2", "step 4", "None", "step 3", "broken no", "Conflict", "Conflict", "Conflict",
    "build completed [] None", "test it completed ['build'] None", "with completed ['build', 'test it'] None",
    "optional skipped [] not today", "outer skipped [] both", "inner skipped [] both",
]  # fmt: skip


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
        ("build", "done", {"built": 1}), ("test it", "done", 2), ("with", "done", [5]), ("optional", "done", None), ("outer", "done", None),
        ("inner", "done", None), ("broken", "failed", None),
    ]  # fmt: skip
    assert {call["request"]["arguments"]["n"]: call["request"].get("task") for call in first.named("step")} == {
        1: "build", 2: "test it", 4: "with", 3: "broken"}  # fmt: skip
    # its status is changed before its call ends, so that the snapshot has it
    assert first.events.index(("task", "build", "completed")) < first.events.index(("end", "build", "done"))
    second = first.resumed()
    with second.serving(socket_path):
        after = run_agent(TASKS).stdout.splitlines()
    assert "{'built': 1}" in after
    assert "build" not in after
    assert "check" not in after
    assert [line for line in after if line.startswith("step")] == []  # their calls are answered from the record, or skipped with the task
    assert [line for line in before if line.startswith("broken no")] == [line for line in after if line.startswith("broken no")]


def test_a_child_that_is_forked_in_a_task_does_not_end_it(daemon: FakeDaemon, server: FakeDaemon, run_agent: Run) -> None:
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
    assert daemon.events == [("task", "work", "in-progress"), ("begin", "work"), ("task", "work", "completed"), ("end", "work", "done")]
