"""What a program that runs again meets: in order, with room for calls that ran side by side."""

from __future__ import annotations

from typing import Any

import pytest

from snapshotd.engine.replay import Mismatch, Replay, shown
from snapshotd.types import CallID, CallStatus, Entry, EntryKind, SnapshotID


def entry(name: str, began: int, ended: int | None, arguments: Any = None, *, kind: EntryKind = EntryKind.TOOL, **fields: Any) -> Entry:
    fields = {"status": CallStatus.DONE, **fields}
    return Entry(CallID(f"{name}-{began}"), kind, name, arguments, SnapshotID("s"), began, ended_at_ns=ended, **fields)


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
    for name, arguments, kind in (("b", {"x": 1}, EntryKind.TOOL), ("a", {"x": 2}, EntryKind.TOOL), ("a", {"x": 1}, EntryKind.MODEL)):
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


def test_side_by_side_in_any_order_but_not_past_what_had_ended_before() -> None:
    recorded = [entry("a", 1, 10), entry("b", 2, 5), entry("c", 6, 9), entry("d", 11, 12)]
    replay = Replay(recorded)
    assert meet(replay, "b") == "b-2"
    assert meet(replay, "c") == "c-6"
    with pytest.raises(Mismatch):
        meet(replay, "d")  # a had ended before d began
    assert [meet(replay, name) for name in ("a", "d")] == ["a-1", "d-11"]
    replay = Replay(recorded)
    with pytest.raises(Mismatch):
        meet(replay, "c")  # b had ended before c began, and is still to come
    assert meet(replay, "a") == "a-1"


def test_equal_calls_side_by_side_are_met_oldest_first() -> None:
    replay = Replay([entry("a", 1, 10), entry("a", 2, 9), entry("a", 3, 8)])
    assert [meet(replay, "a") for _ in range(3)] == ["a-1", "a-2", "a-3"]


def test_what_was_cut_off_is_passed_over() -> None:
    replay = Replay([
        entry("a", 1, None, status=None), entry("b", 2, 3, status=CallStatus.UNKNOWN), entry("c", 4, 5, status=CallStatus.FAILED),
    ])  # fmt: skip
    assert meet(replay, "c") == "c-4"
    assert replay.exhausted


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
    replay = Replay([
        entry("before", 1, 2), entry("one", 4, 5), entry("two", 6, 7), entry("build", 3, 8, kind=EntryKind.TASK), entry("after", 9, 10),
    ])  # fmt: skip
    assert replay.skip_task("build") is None, "the program is not there yet"
    assert meet(replay, "before") == "before-1"
    skipped = replay.skip_task("build")
    assert skipped is not None
    assert skipped.id == "build-3"
    assert meet(replay, "after") == "after-9"
    assert replay.matched == 5


def test_a_task_takes_only_its_own_calls_where_those_are_named() -> None:
    replay = Replay([
        entry("one", 2, 3, details={"task": "build"}), entry("other", 4, 9, details={"task": "docs"}),
        entry("build", 1, 5, kind=EntryKind.TASK),
    ])  # fmt: skip
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
    assert replay.fact("uuid") is None, "another kind is asked for than comes next"
    assert replay.fact("now") == (1.5,)
    assert replay.fact("uuid") == ("u",)
    assert replay.fact("now") is None, "those of b are asked for after a"
    meet(replay, "a")
    assert replay.fact("now") == (2.5,)
    meet(replay, "b")
    assert replay.fact("now") is None


def test_long_values_are_cut_in_messages() -> None:
    assert shown({"a": "x"}) == '{"a": "x"}'
    assert len(shown("x" * 1000, 50)) == 53
