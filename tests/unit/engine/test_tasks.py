"""Subtasks: what may follow what, dependencies, and bounds."""

from __future__ import annotations

from typing import Any

import pytest

from snapshotd.engine.journal import tasks
from snapshotd.errors import Conflict, LimitExceeded, NotFound, UsageError
from snapshotd.types import SnapshotID

S1, S2, S3 = SnapshotID("1" * 32), SnapshotID("2" * 32), SnapshotID("3" * 32)


def declared(*names: str, **depends: list[str]) -> dict[str, Any]:
    state: dict[str, Any] = {"values": {"k": 1}}
    for name in (*names, *depends):
        state = tasks.change(state, name, "pending", depends.get(name), None, S1)
    return state


def test_a_task_from_its_declaration_to_its_end() -> None:
    empty: dict[str, Any] = {}
    state = tasks.change(empty, "build", "pending", None, "first", S1)
    assert empty == {}
    began = tasks.change(state, "build", "in-progress", None, None, S2)
    done = tasks.change(began, "build", "completed", None, "well", S3)
    assert [(t.status, t.note, t.started_in, t.ended_in) for s in (state, began, done) for t in tasks.tasks_of(s)] == [
        ("pending", "first", None, None),
        ("in-progress", "first", S2, None),
        ("completed", "well", S2, S3),
    ]
    assert tasks.change(done, "build", "completed", None, None, S1) == done


def test_the_rest_of_the_state_and_other_tasks_stay() -> None:
    state = tasks.change(declared("a", "b", "c"), "b", "in-progress", None, None, S2)
    assert state["values"] == {"k": 1}
    assert [(t.name, t.status) for t in tasks.tasks_of(state)] == [
        ("a", "pending"),
        ("b", "in-progress"),
        ("c", "pending"),
    ]


@pytest.mark.parametrize(
    "way", [("completed", "failed"), ("completed", "pending"), ("failed", "completed"), ("skipped", "completed")]
)
def test_what_cannot_follow(way: tuple[str, str]) -> None:
    state = declared("a")
    state = tasks.change(state, "a", way[0], None, None, S1)
    with pytest.raises(Conflict, match=f"cannot become {way[1]}: it is {way[0]}"):
        tasks.change(state, "a", way[1], None, None, S1)


def test_a_failed_task_begins_anew() -> None:
    state = tasks.change(declared("a"), "a", "in-progress", None, None, S1)
    state = tasks.change(state, "a", "failed", None, None, S2)
    (again,) = tasks.tasks_of(tasks.change(state, "a", "in-progress", None, None, S3))
    assert (again.started_in, again.ended_in) == (S3, None)


@pytest.mark.parametrize("status", ["pending", "in-progress", "failed", "skipped"])
def test_a_task_waits_for_what_it_depends_on(status: str) -> None:
    state = tasks.change(declared("a", b=["a"]), "a", status, None, None, S1)
    with pytest.raises(Conflict, match=f"depends on 'a', which is {status}"):
        tasks.change(state, "b", "in-progress", None, None, S1)
    if status in ("pending", "in-progress"):
        state = tasks.change(state, "a", "completed", None, None, S1)
        assert tasks.find(tasks.change(state, "b", "in-progress", None, None, S2), "b").started_in == S2


def test_dependencies_are_declared_before() -> None:
    state = declared("a", b=["a"])
    with pytest.raises(NotFound, match="'nothing', which was not declared"):
        tasks.change(state, "c", "pending", ["nothing"], None, S1)
    with pytest.raises(NotFound, match="'b', which was not declared before"):
        tasks.change(state, "a", "pending", ["b"], None, S1)
    with pytest.raises(NotFound, match="'a'"):
        tasks.change(state, "a", "pending", ["a"], None, S1)


def test_dependents_are_found_across_others() -> None:
    listed = tasks.tasks_of(declared("a", "x", b=["a"], y=["x"], c=["y", "b"]))
    assert tasks.dependents(listed, "a") == {"b", "c"}
    assert tasks.dependents(listed, "c") == set()


def test_kept_tasks_take_their_place_or_come_last() -> None:
    done = tasks.change(
        tasks.change(declared("a", "b"), "a", "completed", None, None, S2), "b", "completed", None, None, S2
    )
    kept = tasks.keep(declared("a", "z"), tasks.tasks_of(done))
    assert [(t.name, t.status) for t in tasks.tasks_of(kept)] == [
        ("a", "completed"),
        ("z", "pending"),
        ("b", "completed"),
    ]


def test_what_a_person_changed_is_carried_over() -> None:
    before = {**declared("a", "b"), "values": {"gone": 1, "same": 1, "other": 1}}
    after = {**tasks.change(before, "a", "completed", None, None, S2), "values": {"same": 1, "other": 2, "new": None}}
    now = {
        **tasks.change(before, "b", "in-progress", None, None, S3),
        "values": {"gone": 1, "same": 3, "other": 1, "own": 4},
    }
    carried = tasks.carry(now, before, after)
    assert carried["values"] == {"same": 3, "other": 2, "new": None, "own": 4}
    assert [(t.name, t.status) for t in tasks.tasks_of(carried)] == [("a", "completed"), ("b", "in-progress")]
    assert tasks.carry({}, {}, {}) == {}


def test_bounds_and_words() -> None:
    state: dict[str, Any] = {"tasks": []}
    for number in range(tasks.MAX_TASKS):
        state["tasks"].append(
            {"name": f"t{number}", "status": "pending", "depends": [], "note": None, "began": None, "ended": None}
        )
    with pytest.raises(LimitExceeded, match="1000"):
        tasks.change(state, "one more", "pending", None, None, S1)
    tasks.change(state, "t7", "in-progress", None, None, S1)
    for name, status, depends in (
        ("", "pending", None),
        ("\n", "pending", None),
        ("n" * 201, "pending", None),
        ("a", "done", None),
        ("a", "pending", ["t1", "t1"]),
        ("a", "pending", [f"t{n}" for n in range(101)]),
    ):
        with pytest.raises(UsageError):
            tasks.change(state, name, status, depends, None, S1)
    with pytest.raises(LimitExceeded):
        tasks.change(state, "t1", "pending", None, "n" * 4001, S1)
    with pytest.raises(NotFound, match=r"'t0', .*, \.\.\."):
        tasks.find(state, "missing")
