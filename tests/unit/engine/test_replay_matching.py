"""What a program that runs again meets: in order, with room for calls that ran side by side."""

from __future__ import annotations

from typing import Any

import pytest

from snapshotd.engine.journal.replay import Elsewhere, Mismatch, Replay, clip
from snapshotd.types import CallID, CallStatus, EntryKind, JournalEntry, SnapshotID


def entry(
    name: str, began: int, ended: int | None, arguments: Any = None, *, kind: EntryKind = EntryKind.TOOL, **fields: Any
) -> JournalEntry:
    fields = {"status": CallStatus.DONE, **fields}
    return JournalEntry(
        CallID(f"{name}-{began}"), kind, name, arguments, SnapshotID("s"), began, ended_at_ns=ended, **fields
    )


def meet(replay: Replay, name: str, arguments: Any = None, kind: EntryKind = EntryKind.TOOL) -> str | None:
    found = replay.match(kind, name, arguments)
    return None if found is None else found.id


def test_in_order_to_the_end() -> None:
    replay = Replay([entry("a", 1, 2), entry("b", 3, 4), entry("a", 5, 6)])
    assert [meet(replay, name) for name in ("a", "b", "a")] == ["a-1", "b-3", "a-5"]
    assert replay.exhausted
    assert replay.matched == 3
    assert meet(replay, "anything") is None


def test_another_name_other_arguments_another_kind() -> None:
    for name, arguments, kind in (
        ("b", {"x": 1}, EntryKind.TOOL),
        ("a", {"x": 2}, EntryKind.TOOL),
        ("a", {"x": 1}, EntryKind.MODEL),
    ):
        replay = Replay([entry("a", 1, 2, {"x": 1}), entry("b", 3, 4, {"x": 1})])
        with pytest.raises(Mismatch) as caught:
            meet(replay, name, arguments, kind)
        assert caught.value.recorded.id == "a-1"
        assert meet(replay, "a", {"x": 1}) == "a-1", "a mismatch takes nothing"


@pytest.mark.parametrize(("recorded", "asked"), [(1, True), (1, 1.0), (0, False), ([], {}), (None, 0), ("1", 1)])
def test_json_values_that_python_calls_equal_are_not(recorded: Any, asked: Any) -> None:
    with pytest.raises(Mismatch):
        meet(Replay([entry("a", 1, 2, {"x": recorded})]), "a", {"x": asked})


def test_the_order_of_keys_does_not_matter() -> None:
    assert meet(Replay([entry("a", 1, 2, {"x": 1, "y": 2})]), "a", {"y": 2, "x": 1}) == "a-1"


def test_calls_that_overlapped_come_in_any_order_and_nothing_passes_them() -> None:
    recorded = [entry("a", 1, 10), entry("b", 2, 5), entry("c", 6, 9), entry("d", 11, 12), entry("e", 13, 14)]
    for order in (("a", "c", "b"), ("c", "b", "a"), ("b", "a", "c")):
        replay = Replay(recorded)
        for done, name in enumerate(order):
            with pytest.raises(Mismatch) as caught:
                meet(replay, "d")  # all of them had ended before it began
            assert caught.value.recorded.name in order[done:]
            assert meet(replay, name) is not None
        with pytest.raises(Mismatch):
            meet(replay, "e")
        assert [meet(replay, name) for name in ("d", "e")] == ["d-11", "e-13"]


def test_calls_within_a_task_keep_their_order() -> None:
    replay = Replay([entry("one", 2, 3), entry("two", 4, 5), entry("build", 1, 6, kind=EntryKind.TASK)])
    with pytest.raises(Mismatch):
        meet(replay, "two")
    with pytest.raises(Mismatch):
        meet(replay, "build", kind=EntryKind.TASK)
    assert [meet(replay, "one"), meet(replay, "two"), meet(replay, "build", kind=EntryKind.TASK)] == [
        "one-2",
        "two-4",
        "build-1",
    ]


def test_equal_calls_side_by_side_are_met_oldest_first() -> None:
    replay = Replay([entry("a", 1, 10), entry("a", 2, 9), entry("a", 3, 8)])
    assert [meet(replay, "a") for _ in range(3)] == ["a-1", "a-2", "a-3"]


def test_what_was_cut_off_is_passed_over() -> None:
    replay = Replay(
        [
            entry("a", 1, None, status=None),
            entry("b", 2, 3, status=CallStatus.UNKNOWN),
            entry("c", 4, 5, status=CallStatus.FAILED),
        ]
    )
    assert meet(replay, "c") == "c-4"
    assert replay.exhausted


@pytest.mark.parametrize(("status", "ended"), [(None, None), (None, 9), (CallStatus.UNKNOWN, 10)])
def test_what_was_cut_off_comes_after_what_ran_beside_it(status: CallStatus | None, ended: int | None) -> None:
    replay = Replay(
        [entry("b", 1, 2), entry("a", 3, ended, status=status), entry("c", 4, 5), entry("b", 6, 7), entry("d", 11, 12)]
    )
    with pytest.raises(Mismatch):
        meet(replay, "a")  # b had ended before
    assert meet(replay, "b") == "b-1"
    for other in ("c", "b"):
        for _ in range(2):
            with pytest.raises(Elsewhere):
                meet(replay, "a")
        with pytest.raises(Mismatch):
            meet(replay, "a", {"other": 1})
        assert meet(replay, other) is not None
    if ended is not None:
        with pytest.raises(Mismatch):
            meet(replay, "a")  # d began after its end
    assert meet(replay, "d") == "d-11"
    assert meet(replay, "a") is None


def test_a_request_that_its_sender_repeated_is_passed_over_and_a_failed_model_call_of_a_program_is_not() -> None:
    turns = [
        entry("m", 1, 2, kind=EntryKind.MODEL, status=CallStatus.FAILED, details={"gateway": True}),
        entry("m", 3, 4, kind=EntryKind.MODEL, details={"gateway": True}),
        entry("m", 5, 6, kind=EntryKind.MODEL, status=CallStatus.FAILED),
    ]
    replay = Replay(turns)
    assert [meet(replay, "m", kind=EntryKind.MODEL) for _ in range(2)] == ["m-3", "m-5"]
    assert replay.exhausted


def test_a_completed_task_is_skipped_with_everything_in_it() -> None:
    replay = Replay(
        [
            entry("before", 1, 2),
            entry("one", 4, 5),
            entry("two", 6, 7),
            entry("build", 3, 8, kind=EntryKind.TASK),
            entry("after", 9, 10),
        ]
    )
    assert replay.skip_task("build") is None, "the program is not there yet"
    assert meet(replay, "before") == "before-1"
    skipped = replay.skip_task("build")
    assert skipped is not None
    assert skipped.id == "build-3"
    assert meet(replay, "after") == "after-9"
    assert replay.matched == 5


def test_a_task_takes_only_its_own_calls_where_those_are_named() -> None:
    replay = Replay(
        [
            entry("one", 2, 3, details={"task": "build"}),
            entry("other", 4, 9, details={"task": "docs"}),
            entry("build", 1, 5, kind=EntryKind.TASK),
        ]
    )
    assert replay.skip_task("build") is not None
    assert meet(replay, "other") == "other-4"


@pytest.mark.parametrize("status", [CallStatus.FAILED, CallStatus.UNKNOWN])
def test_a_task_that_did_not_complete_is_not_skipped(status: CallStatus) -> None:
    replay = Replay([entry("one", 2, 3), entry("build", 1, 4, kind=EntryKind.TASK, status=status)])
    assert replay.skip_task("build") is None
    assert replay.skip_task("unheard of") is None
    assert meet(replay, "one") == "one-2"


def test_facts_come_back_where_they_were_recorded() -> None:
    facts = ({"kind": "now", "value": 1.5}, {"kind": "uuid", "value": "u"})
    replay = Replay([entry("a", 1, 2, facts=facts), entry("b", 3, 4, facts=({"kind": "now", "value": 2.5},))])
    assert replay.take_fact("uuid") is None, "another kind is asked for than comes next"
    assert replay.take_fact("now") == (1.5,)
    assert replay.take_fact("uuid") == ("u",)
    assert replay.take_fact("now") is None, "those of b are asked for after a"
    meet(replay, "a")
    assert replay.take_fact("now") == (2.5,)
    meet(replay, "b")
    assert replay.take_fact("now") is None


def test_long_values_are_cut_in_messages() -> None:
    assert clip({"a": "x"}) == '{"a": "x"}'
    assert len(clip("x" * 1000, 50)) == 53


def _turn(began: int, request: str, status: CallStatus, **details: Any) -> JournalEntry:
    return entry(
        "m",
        began,
        began + 1,
        {"digest": request},
        kind=EntryKind.MODEL,
        status=status,
        details={"gateway": True, **details},
    )


def test_requests_that_were_repeated_on_the_wire_are_met_once() -> None:
    """Those at the end are asked again; what failed for good, while the program went on, fails again."""
    failed, done = CallStatus.FAILED, CallStatus.DONE
    recorded = [
        _turn(1, "a", failed),
        _turn(3, "a", failed),
        _turn(5, "a", done),
        _turn(7, "b", failed),
        _turn(9, "b", failed),
        _turn(11, "c", done),
        _turn(13, "d", failed),
    ]
    replay = Replay(recorded)
    met = [meet(replay, "m", {"digest": request}, EntryKind.MODEL) for request in "abbcd"]
    assert met == ["m-5", "m-7", "m-9", "m-11", None]


def test_a_failed_model_call_of_the_library_is_an_outcome() -> None:
    replay = Replay([entry("m", 1, 2, 1, kind=EntryKind.MODEL, status=CallStatus.FAILED)])
    assert meet(replay, "m", 1, EntryKind.MODEL) == "m-1"


def test_what_ended_after_the_last_snapshot_is_loose() -> None:
    replay = Replay([entry("a", 1, 2, snapshot=SnapshotID("s")), entry("b", 3, 4)])
    assert not replay.loose
    meet(replay, "a")
    assert replay.loose
    meet(replay, "b")
    assert replay.loose
    assert replay.exhausted
