"""Retention: which snapshots keep their files and why; what a catalog protects; policies as text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotd.api.storage import Policy
from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.engine.storage.retention import (
    RetentionDecision,
    find_protected,
    format_policy,
    get_policy,
    parse_policy,
    plan,
    set_policy,
    trim,
)
from snapshotd.errors import UsageError
from snapshotd.types import (
    ApprovalStatus,
    CallStatus,
    RecordID,
    Snapshot,
    SnapshotID,
    SnapshotState,
    TrajectoryID,
    TreeID,
    duration,
    short,
)
from tests.records import begin, committed, fork, make_approval, make_call, make_image, started

NOW_NS = 1_760_000_000_000_000_000
DAY_NS = 86_400 * 1_000_000_000
_, MODEL = begin(make_image())


def make(seq: int, *, line: str = "a", state: str = "stored", failed: bool = False, age_ns: int = 0) -> Snapshot:
    status = CallStatus.FAILED if failed else CallStatus.DONE
    return replace(
        MODEL,
        id=SnapshotID(f"{line}{seq}"),
        trajectory=TrajectoryID(line),
        seq=seq,
        state=SnapshotState(state),
        call=make_call(status=status),
        created_at_ns=NOW_NS - age_ns,
    )


def kept(decisions: Sequence[RetentionDecision]) -> list[int]:
    return [item.snapshot.seq for item in decisions if item.keep]


TEN = [make(seq, failed=seq in (2, 5, 7), age_ns=(9 - seq) * DAY_NS) for seq in range(10)]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Policy(), list(range(10))),
        (Policy(max_bytes=1), list(range(10))),
        (Policy(keep_last=3), [7, 8, 9]),
        (Policy(keep_last=0), []),
        (Policy(keep_last=99), list(range(10))),
        (Policy(keep_within_s=86400 * 2.5), [7, 8, 9]),
        (Policy(keep_within_s=86400 * 2), [8, 9]),
        (Policy(keep_every=4), [0, 4, 8]),
        (Policy(keep_failed=2), [5, 7]),
        (Policy(keep_last=1, keep_every=5, keep_failed=1), [0, 5, 7, 9]),
    ],
)
def test_rules(policy: Policy, expected: list[int]) -> None:
    assert kept(plan(TEN, policy, protected={}, now_ns=NOW_NS)) == expected


def test_every_decision_has_its_reason_in_words() -> None:
    policy = Policy(keep_last=2, keep_within_s=3 * 86400, keep_every=6, keep_failed=1)
    said = plan([make(0, state="captured"), *TEN[1:]], policy, protected={SnapshotID("a1"): "tag v1"}, now_ns=NOW_NS)
    unmet = "not among the newest 2, older than 3d, no milestone (every 6), not among the newest 1 failed"
    assert [(item.snapshot.seq, item.keep, item.rule, item.reason) for item in said] == [
        (0, True, False, "not stored yet"),
        (1, True, False, "tag v1"),
        (2, False, False, unmet),
        (3, False, False, unmet),
        (4, False, False, unmet),
        (5, False, False, unmet),
        (6, True, True, "milestone (every 6)"),
        (7, True, True, "younger than 3d"),
        (8, True, True, "newest 2"),
        (9, True, True, "newest 2"),
    ]


def test_each_trajectory_has_its_own_newest() -> None:
    mixed = [make(seq, line=line) for seq in range(4) for line in ("a", "b")]
    decisions = plan(mixed, Policy(keep_last=1), protected={}, now_ns=NOW_NS)
    assert [item.snapshot for item in decisions] == mixed
    assert [item.snapshot.id for item in decisions if item.keep] == ["a3", "b3"]


def test_what_has_no_files_uses_up_no_place() -> None:
    line = [make(0), make(1), make(2, state="lost"), make(3, state="pruned"), make(4, state="captured")]
    decisions = plan(line, Policy(keep_last=2), protected={}, now_ns=NOW_NS)
    assert [item.keep for item in decisions] == [False, True, True, True, True]
    assert "lost" in decisions[2].reason
    assert "pruned before" in decisions[3].reason


def test_a_snapshot_from_the_future_is_young() -> None:
    assert kept(plan([make(0, age_ns=-DAY_NS)], Policy(keep_within_s=1), protected={}, now_ns=NOW_NS)) == [0]


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, 10), (100, 10), (99, 9), (95, 9), (31, 3), (30, 3), (20, 2), (5, 2), (1, 2)]
)
def test_trim_drops_the_oldest_that_only_rules_keep(limit: int | None, expected: int) -> None:
    stays = {SnapshotID("a0"): "tag old", SnapshotID("a9"): "head of a"}
    decisions = plan(TEN, Policy(keep_last=10), protected=stays, now_ns=NOW_NS)
    trimmed = trim(decisions, lambda some: 10 * len(some), limit)
    assert len(kept(trimmed)) == expected
    gone = [item.snapshot.seq for item in trimmed if not item.keep]
    assert gone == list(range(1, 1 + len(gone)))
    assert all("over the limit" in item.reason for item in trimmed if not item.keep)


def test_trim_takes_the_oldest_of_all_trajectories_and_asks_few_times() -> None:
    many = [make(seq, line=line, age_ns=(1000 - seq) * DAY_NS + (line == "b")) for line in "ab" for seq in range(1000)]
    asked: list[int] = []

    def sizes(some: set[SnapshotID]) -> int:
        asked.append(len(some))
        return len(some)

    trimmed = trim(plan(many, Policy(), protected={}, now_ns=NOW_NS), sizes, 1997)
    assert [item.snapshot.id for item in trimmed if not item.keep] == ["a0", "b0", "b1"]
    assert len(asked) <= 13


def test_trim_gives_nothing_up_for_no_gain() -> None:
    """As when the packs are too young to be touched: the size does not depend on what goes, or only on some of it."""
    decisions = plan(TEN, Policy(keep_last=10), protected={}, now_ns=NOW_NS)
    assert kept(trim(decisions, lambda some: 1000, 10)) == list(range(10))
    assert kept(trim(decisions, lambda some: 1000 - 100 * ("a2" not in some), 10)) == list(range(3, 10))


# -- properties --------------------------------------------------------------------------------------------------------

LINES = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from(list(SnapshotState)), st.booleans(), st.integers(-1, 30)),
    max_size=24,
).map(
    lambda items: [
        make(seq, line=line, state=state, failed=failed, age_ns=age * DAY_NS)
        for seq, (line, state, failed, age) in enumerate(items)
    ]
)
POLICIES = st.builds(
    Policy,
    keep_last=st.none() | st.integers(0, 12),
    keep_within_s=st.none() | st.floats(0.001, 1e7),
    keep_every=st.none() | st.integers(1, 9),
    keep_failed=st.none() | st.integers(1, 9),
    max_bytes=st.none() | st.integers(1, 400),
)


def bytes_of(some: set[SnapshotID]) -> int:
    return sum(7 + len(each) for each in some)


def decided(line: Sequence[Snapshot], policy: Policy, stays: dict[SnapshotID, str]) -> list[RetentionDecision]:
    return trim(plan(line, policy, protected=stays, now_ns=NOW_NS), bytes_of, policy.max_bytes)


@given(line=LINES, policy=POLICIES, data=st.data())
def test_the_protected_stay_and_only_stored_ones_go(line: list[Snapshot], policy: Policy, data: st.DataObject) -> None:
    stays = {item.id: "why" for item in line if data.draw(st.booleans())}
    decisions = decided(line, policy, stays)
    assert [item.snapshot for item in decisions] == line
    for item in decisions:
        assert item.reason
        if not item.keep:
            assert item.snapshot.id not in stays
            assert item.snapshot.state is SnapshotState.STORED


@given(line=LINES, policy=POLICIES)
def test_planning_again_drops_nothing_more(line: list[Snapshot], policy: Policy) -> None:
    after = [
        item.snapshot if item.keep else replace(item.snapshot, state=SnapshotState.PRUNED)
        for item in decided(line, policy, {})
    ]
    assert all(item.keep for item in decided(after, policy, {}))


@given(line=LINES, policy=POLICIES, data=st.data())
def test_a_more_generous_rule_keeps_what_a_stricter_one_does(
    line: list[Snapshot], policy: Policy, data: st.DataObject
) -> None:
    policy = replace(policy, max_bytes=None)
    more = replace(
        policy,
        keep_last=None if policy.keep_last is None else policy.keep_last + data.draw(st.integers(0, 5)),
        keep_within_s=None if policy.keep_within_s is None else policy.keep_within_s * data.draw(st.floats(1, 10)),
        keep_failed=None if policy.keep_failed is None else policy.keep_failed + data.draw(st.integers(0, 5)),
        keep_every=1 if policy.keep_every is not None and data.draw(st.booleans()) else policy.keep_every,
    )
    strict, generous = (plan(line, each, protected={}, now_ns=NOW_NS) for each in (policy, more))
    for before, after in zip(strict, generous, strict=True):
        assert after.keep or not before.keep


@given(line=LINES, policy=POLICIES, limit=st.integers(1, 400))
def test_trim_fits_or_has_dropped_all_that_takes_space(line: list[Snapshot], policy: Policy, limit: int) -> None:
    decisions = decided(line, replace(policy, max_bytes=limit), {})
    files = {
        item.snapshot.id
        for item in decisions
        if item.keep and item.snapshot.state in (SnapshotState.STORED, SnapshotState.CAPTURED)
    }
    assert bytes_of(files) <= limit or not any(item.rule for item in decisions)


# -- what a catalog protects -------------------------------------------------------------------------------------------


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[SqliteCatalog]:
    opened = SqliteCatalog(tmp_path / "catalog.db")
    yield opened
    opened.close()


def store(catalog: SqliteCatalog, *snapshots: Snapshot) -> None:
    for item in snapshots:
        catalog.snapshots.set_stored(item.id, TreeID("1" * 64), RecordID("2" * 64))


def test_what_the_catalog_protects(catalog: SqliteCatalog) -> None:
    line, first = started(catalog, "main")
    line_of = [first]
    for _ in range(8):
        line_of.append(committed(catalog, line_of[-1], base=line_of[-1].id))
    catalog.refs.tag(line_of[2].id, "v1")
    catalog.refs.tag(line_of[2].id, "best")
    catalog.trajectories.add([(fork(line_of[3], line, "try"), None)])
    store(catalog, *line_of[:6], line_of[7])
    reasons = find_protected(catalog, {line_of[4].id})
    assert reasons == {
        line_of[0].id: "first of its trajectory",
        line_of[2].id: reasons[line_of[2].id],
        line_of[3].id: "fork try began here",
        line_of[4].id: "a running sandbox stands on it",
        line_of[5].id: f"snapshot {short(line_of[6].id)}, not stored yet, is built on it",
        line_of[7].id: f"snapshot {short(line_of[8].id)}, not stored yet, is built on it",
        line_of[8].id: "head of main",
    }
    assert reasons[line_of[2].id] in ("tag v1, best", "tag best, v1")


def test_a_forks_own_line_is_protected_too(catalog: SqliteCatalog) -> None:
    line, first = started(catalog)
    second = committed(catalog, first)
    forked = fork(first, line)
    catalog.trajectories.add([(forked, None)])
    own = [committed(catalog, replace(first, trajectory=forked.id))]
    own.append(committed(catalog, own[-1]))
    own.append(committed(catalog, own[-1]))
    store(catalog, first, second, *own)
    reasons = find_protected(catalog, set())
    assert reasons == {
        first.id: f"fork {short(forked.id)} began here",
        second.id: f"head of {short(line.id)}",
        own[0].id: "first of its trajectory",
        own[2].id: f"head of {short(forked.id)}",
    }
    decisions = plan(list(catalog.snapshots.all()), Policy(keep_last=0), protected=reasons, now_ns=NOW_NS)
    assert [item.snapshot.id for item in decisions if not item.keep] == [own[1].id]


def test_where_programs_began_and_what_awaits_an_approval_are_protected(catalog: SqliteCatalog) -> None:
    line, first = started(catalog, "main")
    snapshots = [first]
    for _ in range(5):
        snapshots.append(committed(catalog, snapshots[-1]))
    store(catalog, *snapshots)
    catalog.trajectories.set_began(line.id, snapshots[1].id)
    pending, decided = (make_approval(snapshots[number]) for number in (2, 3))
    catalog.approvals.add(pending)
    catalog.approvals.add(decided)
    catalog.approvals.decide(decided.id, ApprovalStatus.DENIED, at_ns=1, by=None, reason=None)
    assert find_protected(catalog, set()) == {
        first.id: "first of its trajectory",
        snapshots[1].id: "the program of main began here",
        snapshots[2].id: f"approval {short(pending.id)} is pending",
        snapshots[5].id: "head of main",
    }


# -- policies as text --------------------------------------------------------------------------------------------------


@given(POLICIES)
def test_policies_survive_their_text(policy: Policy) -> None:
    assert parse_policy(format_policy(policy)) == policy


def test_a_policy_as_text_is_short() -> None:
    assert json.loads(format_policy(Policy(keep_last=5, keep_within_s=3600.0))) == {
        "keep_last": 5,
        "keep_within_s": 3600.0,
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "5",
        '{"keep": 1}',
        '{"keep_last": -1}',
        '{"keep_last": true}',
        '{"keep_last": 1.5}',
        '{"keep_last": "5"}',
        '{"keep_every": 0}',
        '{"keep_failed": 0}',
        '{"max_bytes": 0}',
        '{"max_bytes": 1e400}',
        '{"keep_within_s": 0}',
        '{"keep_within_s": -5}',
        '{"keep_within_s": NaN}',
        '{"keep_within_s": Infinity}',
        '{"keep_within_s": "7d"}',
        '{"keep_within_s": 1' + "0" * 400 + "}",
        '{"keep_last": 1' + "0" * 30 + "}",
    ],
)
def test_senseless_policies_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_policy(text)
    assert "\n" not in caught.value.message


def test_senseless_policies_are_not_planned_with() -> None:
    with pytest.raises(UsageError):
        plan([], Policy(keep_last=-1), protected={}, now_ns=NOW_NS)


def test_policies_in_the_catalog(catalog: SqliteCatalog) -> None:
    line = TrajectoryID("f" * 32)
    assert get_policy(catalog, None) == get_policy(catalog, line) == Policy()
    set_policy(catalog, None, Policy(keep_last=5))
    assert get_policy(catalog, line) == Policy(keep_last=5)
    set_policy(catalog, line, Policy(keep_every=10))
    assert get_policy(catalog, line) == Policy(keep_every=10)
    assert get_policy(catalog, None) == Policy(keep_last=5)
    set_policy(catalog, line, None)
    set_policy(catalog, None, None)
    assert get_policy(catalog, line) == Policy()
    with pytest.raises(UsageError):
        set_policy(catalog, None, Policy(keep_every=0))


@pytest.mark.parametrize(
    ("seconds", "text"), [(604800, "7d"), (5400, "90m"), (60, "1m"), (30, "30s"), (0.25, "0.25s"), (86400.0, "1d")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
