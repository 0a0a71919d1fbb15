"""What every catalog must do: journals, the agent's state, and who may write. See catalog.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from snapshotd.catalog.base import Catalog, SnapshotRow
from snapshotd.errors import Ambiguous, Conflict, InternalError, LimitExceeded, NotFound, UsageError
from snapshotd.types import (
    CallID,
    CallStatus,
    Ended,
    EntryKind,
    JournalEntry,
    Message,
    Snapshot,
    SnapshotID,
    SnapshotState,
    TrajectoryID,
    new_id,
    short,
)
from tests.contracts.refusal import refuses
from tests.records import begin, committed, ended_entry, follow, fork, make_call, make_entry, make_image, started


def journal(catalog: Catalog, snapshot_id: SnapshotID, since: SnapshotID | None = None) -> list[str]:
    """The names of the calls in it."""
    return [entry.name for entry in catalog.journal(snapshot_id, since)]


def names(entries: Sequence[JournalEntry]) -> list[str]:
    return [entry.name for entry in entries]


def done(entry: JournalEntry, status: CallStatus = CallStatus.DONE) -> Ended:
    return Ended(entry.id, status, entry.began_at_ns + 9, ["a result"], "a warning", {"cost": 1})


def an_intent_comes_back_whole_and_ends_once(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    intent = replace(ended_entry(first), status=None, ended_at_ns=None, error=None, result=None)
    catalog.begin_entry(trajectory.id, intent)
    assert catalog.entry(intent.id) == intent
    assert catalog.unbound(trajectory.id) == [intent]
    catalog.end_entry(trajectory.id, done(intent, CallStatus.FAILED))
    ended = replace(
        intent,
        status=CallStatus.FAILED,
        ended_at_ns=intent.began_at_ns + 9,
        result=["a result"],
        error="a warning",
        details={**intent.details, "cost": 1},
    )
    assert catalog.entry(intent.id) == ended
    assert catalog.unbound(trajectory.id) == [ended]
    refuses(NotFound, catalog.end_entry, trajectory.id, done(intent), says=(intent.id,))
    refuses(Conflict, catalog.begin_entry, trajectory.id, intent, says=(intent.id,))
    whole = ended_entry(first)
    catalog.begin_entry(trajectory.id, whole)
    assert catalog.unbound(trajectory.id) == [ended, whole]
    refuses(NotFound, catalog.begin_entry, TrajectoryID(new_id()), make_entry(first))
    refuses(NotFound, catalog.entry, CallID(new_id()))
    refuses(NotFound, catalog.unbound, TrajectoryID(new_id()))
    refuses(UsageError, catalog.begin_entry, trajectory.id, make_entry(first, id=CallID("../x")))
    refuses(InternalError, catalog.begin_entry, trajectory.id, make_entry(first, status=CallStatus.DONE))


def another_trajectorys_call_cannot_be_ended(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    other, elsewhere = started(catalog)
    entry = make_entry(first)
    catalog.begin_entry(trajectory.id, entry)
    refuses(NotFound, catalog.end_entry, other.id, done(entry), says=(entry.id,))
    refuses(NotFound, lambda: committed(catalog, elsewhere, ended=done(entry)), says=(entry.id,))
    assert catalog.snapshots(other.id) == [elsewhere]
    assert catalog.entry(entry.id) == entry


def entries_are_found_by_prefix(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    for tail in "01":
        catalog.begin_entry(trajectory.id, make_entry(first, id=CallID("abcd" + tail * 28), name=tail))
    assert catalog.find_entry("abcd1") == (trajectory.id, catalog.entry(CallID("abcd" + "1" * 28)))
    refuses(Ambiguous, catalog.find_entry, "abcd", says=("abcd00000000", "abcd11111111"))
    refuses(Ambiguous, catalog.find_entry, "abc", says=("too short",))
    for ref in ("abc%", "ffff", "", "abcd\ud800"):
        refuses(NotFound, catalog.find_entry, ref)


def a_commit_binds_what_has_ended(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    quick, slow, other = (make_entry(first, name=name) for name in ("quick", "slow", "other"))
    for entry in (quick, slow, other):
        catalog.begin_entry(trajectory.id, entry)
    catalog.end_entry(trajectory.id, done(other))
    entries = [ended_entry(first, name="asked", kind=EntryKind.QUESTION)]
    second = committed(
        catalog, first, ended=done(quick), entries=entries, call=make_call(id=quick.id, arguments=quick.arguments)
    )
    assert names(catalog.own_entries(second.id)) == ["quick", "other", "asked"]
    assert catalog.own_entries(second.id)[2] == replace(entries[0], snapshot=second.id)
    assert catalog.entry(quick.id).arguments == quick.arguments, "whoever holds them"
    assert names(catalog.unbound(trajectory.id)) == ["slow"]
    third = committed(catalog, second, ended=done(slow))
    assert catalog.unbound(trajectory.id) == []
    assert journal(catalog, third.id) == ["quick", "slow", "other", "asked"], "in the order in which they began"
    assert journal(catalog, second.id) == ["quick", "other", "asked"]
    assert journal(catalog, third.id, second.id) == ["slow"]
    assert journal(catalog, third.id, third.id) == []
    assert journal(catalog, third.id, first.id) == journal(catalog, third.id)
    assert (journal(catalog, first.id), catalog.own_entries(first.id)) == ([], [])
    fourth = committed(catalog, third)
    assert (catalog.own_entries(fourth.id), journal(catalog, fourth.id, third.id)) == ([], [])
    for ask in (catalog.own_entries, catalog.journal):
        refuses(NotFound, ask, SnapshotID(new_id()))
    refuses(NotFound, catalog.journal, fourth.id, SnapshotID(new_id()))


def arguments_that_a_person_changed_are_kept_apart(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    entry = make_entry(first, arguments={"n": 1})
    catalog.begin_entry(trajectory.id, entry)
    second = committed(catalog, first, ended=done(entry), call=make_call(id=entry.id, arguments={"n": True}))
    assert catalog.entry(entry.id).arguments["n"] is not True
    assert catalog.get_snapshot(second.id).call.arguments["n"] is True


def a_refused_commit_leaves_the_journal_alone(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    entry = make_entry(first)
    catalog.begin_entry(trajectory.id, entry)
    refuses(NotFound, lambda: committed(catalog, first, ended=Ended(CallID(new_id()), CallStatus.DONE, 1)))
    refuses(Conflict, lambda: committed(catalog, first, ended=done(entry), entries=[ended_entry(first, id=entry.id)]))
    refuses(InternalError, lambda: committed(catalog, first, entries=[make_entry(first)]))
    refuses(UsageError, lambda: committed(catalog, first, ended=replace(done(entry), result=float("nan"))))
    refuses(UsageError, lambda: committed(catalog, first, ended=done(entry), saved={"x": {1}}))
    deep: list[object] = []
    for _ in range(300):
        deep = [deep]
    refuses(
        LimitExceeded, lambda: committed(catalog, first, ended=done(entry), entries=[ended_entry(first, facts=(deep,))])
    )
    assert catalog.snapshots(trajectory.id) == [first]
    assert catalog.unbound(trajectory.id) == [entry]
    assert catalog.state(first.id) == {}


def hostile_entries_are_kept_exactly(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    text = "\ud800 \x00\x1b[31m '; DROP TABLE entries; -- \U0001f600"
    entry = ended_entry(
        first, name=text, arguments=[text], key=text, error=text, result=text, facts=(text,), details={text: text}
    )
    catalog.begin_entry(trajectory.id, entry)
    assert catalog.entry(entry.id) == entry
    open_one = make_entry(first)
    catalog.begin_entry(trajectory.id, open_one)
    catalog.end_entry(trajectory.id, Ended(open_one.id, CallStatus.UNKNOWN, 5, text, text, {text: [text]}))
    assert catalog.entry(open_one.id).details == {text: [text]}
    refuses(NotFound, catalog.entry, CallID(text))


def journals_go_on_across_forks(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    second = committed(catalog, first, entries=[ended_entry(first, name="1")])
    third = committed(catalog, second, entries=[ended_entry(second, name="2")])
    child = fork(second, trajectory)
    catalog.add_trajectories([(child, None)])
    begun = make_entry(second, name="A")
    catalog.begin_entry(child.id, begun)
    assert names(catalog.unbound(child.id)) == ["A"]
    assert catalog.unbound(trajectory.id) == []
    own = committed(catalog, second, trajectory=child.id, ended=done(begun))
    later = committed(catalog, own, entries=[ended_entry(own, name="B")])
    assert journal(catalog, later.id) == ["1", "A", "B"]
    assert journal(catalog, later.id, second.id) == ["A", "B"]
    assert journal(catalog, later.id, first.id) == ["1", "A", "B"]
    assert journal(catalog, later.id, third.id) == ["1", "A", "B"], "what does not lie on the way ends nothing"
    assert journal(catalog, third.id) == ["1", "2"]


def a_rewound_line_forgets_what_it_left(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    second = committed(catalog, first, "a", entries=[ended_entry(first, name="1")], saved={"n": 2})
    third = committed(catalog, second, "b", "c", entries=[ended_entry(second, name="2")], saved={"n": 3})
    cut_off, complete = make_entry(third, name="cut off"), ended_entry(third, name="complete")
    catalog.begin_entry(trajectory.id, cut_off)
    catalog.begin_entry(trajectory.id, complete)
    back = committed(catalog, third, after=second, entries=[ended_entry(third, name="rewind")])
    assert catalog.unbound(trajectory.id) == []
    assert journal(catalog, back.id) == ["1", "rewind"]
    assert journal(catalog, back.id, third.id) == ["1", "rewind"]
    assert journal(catalog, back.id, second.id) == ["rewind"]
    assert [message.content for message in catalog.conversation(back.id)] == ["a"]
    assert (catalog.state(back.id), catalog.own_state(back.id)) == ({"n": 2}, None)
    on = committed(catalog, back, "d", entries=[ended_entry(back, name="3")])
    assert journal(catalog, on.id) == ["1", "rewind", "3"]
    undone = committed(catalog, on, after=third)
    assert journal(catalog, undone.id) == ["1", "2"]
    assert catalog.state(undone.id) == {"n": 3}
    assert [message.content for message in catalog.conversation(undone.id)] == ["a", "b", "c"]
    catalog.end_entry(trajectory.id, done(cut_off))  # it may still end, and stays where it was
    last = committed(catalog, undone)
    assert (catalog.own_entries(last.id), journal(catalog, last.id)) == ([], ["1", "2"])
    assert [catalog.entry(one.id).snapshot for one in (cut_off, complete)] == [None, None]
    assert catalog.get_snapshot(back.id) == back
    assert [one.follows for one in catalog.snapshots(trajectory.id)] == [
        None,
        None,
        None,
        second.id,
        None,
        third.id,
        None,
    ]
    refuses(NotFound, lambda: committed(catalog, last, after=replace(last, id=SnapshotID(new_id()))))
    refuses(InternalError, lambda: committed(catalog, last, after=second, keep=2))


def calls_that_ran_where_a_line_was_left_are_told(catalog: Catalog) -> None:
    def running(snapshot: Snapshot, since: Snapshot | None = None) -> list[str]:
        return names(catalog.left_running(snapshot.id, None if since is None else since.id))

    trajectory, first = started(catalog)
    now = first.created_at_ns
    slow, never, late = (
        make_entry(first, name=name, began_at_ns=now + began)
        for name, began in (("slow", 1), ("never", 2), ("late", 15))
    )
    for entry in (slow, never):
        catalog.begin_entry(trajectory.id, entry)
    quick = ended_entry(first, name="quick", began_at_ns=now + 3)
    second = committed(catalog, first, entries=[quick], created_at_ns=now + 10)
    catalog.begin_entry(trajectory.id, late)
    third = committed(catalog, second, ended=done(slow), created_at_ns=now + 20)
    assert catalog.left_running(second.id) == [catalog.entry(slow.id), never]
    assert (running(first), running(third)) == ([], ["never", "late"])
    back = committed(catalog, third, after=second, created_at_ns=now + 30)
    on = committed(catalog, back, created_at_ns=now + 40)
    child = fork(on, trajectory)
    catalog.add_trajectories([(child, None)])
    forked = committed(catalog, on, trajectory=child.id, created_at_ns=now + 50)
    for one in (back, on, forked):
        assert running(one) == running(one, second) == ["slow", "never"]
    assert running(forked, on) == []
    refuses(NotFound, catalog.left_running, SnapshotID(new_id()))


def a_first_snapshot_can_follow_another(catalog: Catalog) -> None:
    """An edited snapshot begins a trajectory that goes on from what came before it."""
    trajectory, first = started(catalog)
    second = committed(catalog, first, "a", entries=[ended_entry(first, name="1")], saved={"n": 2})
    third = committed(catalog, second, "b", entries=[ended_entry(second, name="2")], saved={"n": 3})
    changed = fork(third, trajectory)
    own = follow(third, changed.id, after=second)
    refuses(InternalError, catalog.add_trajectories, [(replace(changed, head=own.id), replace(own, messages=2))])
    catalog.add_trajectories([(replace(changed, head=own.id), own)])
    assert catalog.get_snapshot(own.id) == own
    assert journal(catalog, own.id) == ["1"]
    assert catalog.state(own.id) == {"n": 2}
    later = committed(catalog, own, "c", entries=[ended_entry(own, name="3")])
    assert journal(catalog, later.id) == ["1", "3"]
    assert [message.content for message in catalog.conversation(later.id)] == ["a", "c"]


def the_state_is_shared_until_it_changes(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    states = [None, {"n": 1}, None, {"n": 1}, {"n": 2, "t": "\ud800"}, {}, {}, None]
    line = [first]
    for saved in states:
        line.append(committed(catalog, line[-1], saved=saved))
    seen = [{}, {}, {"n": 1}, {"n": 1}, {"n": 1}, {"n": 2, "t": "\ud800"}, {}, {}, {}]
    assert [catalog.state(one.id) for one in line] == seen
    assert [catalog.own_state(one.id) for one in line] == [None, None, {"n": 1}, None, None, seen[5], {}, None, None]
    child = fork(line[2], trajectory)
    catalog.add_trajectories([(child, None)])
    own = committed(catalog, line[2], trajectory=child.id)
    assert (catalog.state(own.id), catalog.own_state(own.id)) == ({"n": 1}, None)
    for ask in (catalog.state, catalog.own_state):
        refuses(NotFound, ask, SnapshotID(new_id()))
    catalog.remove_trajectory(child.id)
    assert catalog.state(line[3].id) == {"n": 1}


def an_older_fence_keeps_a_writer_out(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    old = catalog.draw_fence(trajectory.id)
    entry = make_entry(first)
    catalog.begin_entry(trajectory.id, entry, fence=old)
    new = catalog.draw_fence(trajectory.id)
    assert new > old
    says = (first.id[:12],)
    refuses(Conflict, lambda: catalog.begin_entry(trajectory.id, make_entry(first), fence=old), says=says)
    refuses(Conflict, lambda: catalog.end_entry(trajectory.id, done(entry), fence=old), says=says)
    refuses(Conflict, lambda: committed(catalog, first, fence=old), says=says)
    assert catalog.unbound(trajectory.id) == [entry]
    second = committed(catalog, first, fence=new, ended=done(entry))
    committed(catalog, second)  # whoever holds no token is not asked for it
    refuses(NotFound, catalog.draw_fence, TrajectoryID(new_id()))
    other, _ = started(catalog)
    assert catalog.draw_fence(other.id) > 0


def one_of_two_writers_wins_each_step(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    steps, threads = 500, 2
    won: list[list[SnapshotID]] = [[] for _ in range(threads)]
    lost: list[tuple[SnapshotID, str]] = []
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            while sum(map(len, won)) < steps:
                head = catalog.get_snapshot(catalog.get_trajectory(trajectory.id).head)
                try:
                    won[number].append(committed(catalog, head, entries=[ended_entry(head)]).id)
                except Conflict as exc:
                    lost.append((head.id, exc.message))
        except BaseException as exc:
            failures.append(exc)
            raise

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
    assert all(short(head) in message and "fork from" in message for head, message in lost)
    line = catalog.snapshots(trajectory.id)
    assert [one.parent for one in line] == [None, *(one.id for one in line[:-1])]
    assert {one.id for one in line[1:]} == {one for ones in won for one in ones}
    assert len(list(catalog.journal(line[-1].id))) == len(line) - 1
    assert line[0] == first


def where_a_program_began_and_its_environment_change(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    second = committed(catalog, first)
    catalog.set_began(trajectory.id, second.id)
    catalog.set_env(trajectory.id, (("A", "\ud800"), ("B", "")))
    assert catalog.get_trajectory(trajectory.id) == replace(
        trajectory, head=second.id, began=second.id, env=(("A", "\ud800"), ("B", ""))
    )
    refuses(NotFound, catalog.set_began, TrajectoryID(new_id()), first.id)
    refuses(NotFound, catalog.set_began, trajectory.id, SnapshotID(new_id()))
    refuses(NotFound, catalog.set_env, TrajectoryID(new_id()), ())
    child = fork(second, catalog.get_trajectory(trajectory.id))
    catalog.add_trajectories([(child, None)])
    assert catalog.get_trajectory(child.id).began == second.id
    image = make_image("another")
    catalog.images.add(image)
    other, begun = begin(image)
    catalog.add_trajectories([(replace(other, began=begun.id), begun)])
    assert catalog.get_trajectory(other.id).began == begun.id


def removal_waits_for_those_who_went_on_from_it(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    second = committed(catalog, first, "a", entries=[ended_entry(first)], saved={"n": 1})
    catalog.begin_entry(trajectory.id, make_entry(second))
    other, begun = started(catalog)
    committed(catalog, begun, after=second)
    refuses(Conflict, catalog.remove_trajectory, trajectory.id, says=(other.id[:12], "conversation"))
    assert len(list(catalog.journal(second.id))) == 1
    catalog.remove_trajectory(other.id)
    third, at = started(catalog)
    catalog.set_began(third.id, second.id)
    refuses(Conflict, catalog.remove_trajectory, trajectory.id, says=(third.id[:12], "program"))
    catalog.set_began(third.id, at.id)
    back = committed(catalog, second, after=first)  # its own do not hold it
    catalog.set_began(trajectory.id, back.id)
    gone = catalog.own_entries(second.id)[0]
    catalog.remove_trajectory(trajectory.id)
    refuses(NotFound, catalog.entry, gone.id)
    catalog.begin_entry(third.id, replace(gone, snapshot=None))  # the id is free again


def journals_are_restored_as_they_were(catalog: Catalog) -> None:
    image = make_image("restored")
    trajectory, first = begin(image, "line")
    second, third = follow(first, messages=1), None
    own = ended_entry(
        first, id=second.call.id, arguments=second.call.arguments, snapshot=second.id, number=4, kind=EntryKind.TOOL
    )
    late = ended_entry(first, name="late", snapshot=second.id, number=7)
    third = follow(second, messages=1)
    early = ended_entry(first, name="early", snapshot=third.id, number=2)
    back = follow(third, messages=1, after=second, keep=0)
    said = Message("user", "x")
    snapshots = [
        SnapshotRow(first),
        SnapshotRow(second, (said,), None, (own, late), {"n": 1}),
        SnapshotRow(third, (said,), None, (early,)),
        SnapshotRow(back, (said,), None, (replace(early, id=CallID(new_id()), snapshot=back.id, number=0),), {}),
    ]
    whole = replace(trajectory, head=back.id, began=first.id)
    for wrong in (
        replace(snapshots[1], entries=(replace(own, status=None, ended_at_ns=None),)),
        replace(snapshots[1], snapshot=replace(second, messages=2)),
    ):
        refuses(InternalError, catalog.restore_rows, [image], [whole], [snapshots[0], wrong, *snapshots[2:]])
    refuses(
        Conflict,
        catalog.restore_rows,
        [image],
        [whole],
        [*snapshots[:2], replace(snapshots[2], entries=(own,)), snapshots[3]],
    )
    assert catalog.trajectories() == []
    catalog.restore_rows([image], [whole], snapshots)
    assert catalog.get_trajectory(trajectory.id) == whole
    assert list(catalog.all_snapshots()) == [row.snapshot for row in snapshots]
    assert catalog.own_entries(second.id) == [own, late]
    assert list(catalog.journal(third.id)) == [early, own, late], "by their numbers"
    assert journal(catalog, back.id) == [own.name, late.name, early.name]
    assert [catalog.state(row.snapshot.id) for row in snapshots] == [{}, {"n": 1}, {"n": 1}, {}]
    assert [message.content for message in catalog.conversation(back.id)] == ["x"]
    open_one = make_entry(back)
    catalog.begin_entry(trajectory.id, open_one)
    after = committed(catalog, back, ended=done(open_one))
    assert journal(catalog, after.id)[-1] == open_one.name
    assert after.state is SnapshotState.CAPTURED


def long_journals_stream(catalog: Catalog) -> None:
    trajectory, head = started(catalog)
    line = [head]
    for batch in range(12):
        entries = [
            ended_entry(line[-1], name=f"{batch}.{n}", result="x" * (100_000 if batch == 7 else 10)) for n in range(100)
        ]
        line.append(committed(catalog, line[-1], entries=entries))
    wanted = [f"{batch}.{n}" for batch in range(12) for n in range(100)]
    assert journal(catalog, line[-1].id) == wanted
    assert journal(catalog, line[5].id) == wanted[:500]
    assert journal(catalog, line[9].id, line[3].id) == wanted[300:900]
    stream = catalog.journal(line[-1].id)
    assert next(stream).name == "0.0"
    committed(catalog, line[-1], entries=[ended_entry(line[-1])])  # writing goes on while somebody reads
    assert sum(1 for _ in stream) == 1199
    stream = catalog.journal(line[-1].id)
    next(stream)
    catalog.remove_trajectory(trajectory.id)
    refuses(NotFound, list, stream)


CHECKS: tuple[Callable[[Catalog], None], ...] = (
    an_intent_comes_back_whole_and_ends_once,
    another_trajectorys_call_cannot_be_ended,
    entries_are_found_by_prefix,
    a_commit_binds_what_has_ended,
    arguments_that_a_person_changed_are_kept_apart,
    a_refused_commit_leaves_the_journal_alone,
    hostile_entries_are_kept_exactly,
    journals_go_on_across_forks,
    a_rewound_line_forgets_what_it_left,
    calls_that_ran_where_a_line_was_left_are_told,
    a_first_snapshot_can_follow_another,
    the_state_is_shared_until_it_changes,
    an_older_fence_keeps_a_writer_out,
    one_of_two_writers_wins_each_step,
    where_a_program_began_and_its_environment_change,
    removal_waits_for_those_who_went_on_from_it,
    journals_are_restored_as_they_were,
    long_journals_stream,
)
