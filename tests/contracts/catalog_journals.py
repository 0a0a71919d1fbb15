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
    return [entry.name for entry in catalog.journal.read(snapshot_id, since)]


def names(entries: Sequence[JournalEntry]) -> list[str]:
    return [entry.name for entry in entries]


def done(entry: JournalEntry, status: CallStatus = CallStatus.DONE) -> Ended:
    return Ended(entry.id, status, entry.began_at_ns + 9, ["a result"], "a warning", {"cost": 1})


def an_intent_comes_back_whole_and_ends_once(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    intent = replace(ended_entry(first), status=None, ended_at_ns=None, error=None, result=None)
    catalog.journal.begin(trajectory.id, intent)
    assert catalog.journal.get(intent.id) == intent
    assert catalog.journal.unbound(trajectory.id) == [intent]
    catalog.journal.end(trajectory.id, done(intent, CallStatus.FAILED))
    ended = replace(
        intent,
        status=CallStatus.FAILED,
        ended_at_ns=intent.began_at_ns + 9,
        result=["a result"],
        error="a warning",
        details={**intent.details, "cost": 1},
    )
    assert catalog.journal.get(intent.id) == ended
    assert catalog.journal.unbound(trajectory.id) == [ended]
    refuses(NotFound, catalog.journal.end, trajectory.id, done(intent), says=(intent.id,))
    refuses(Conflict, catalog.journal.begin, trajectory.id, intent, says=(intent.id,))
    whole = ended_entry(first)
    catalog.journal.begin(trajectory.id, whole)
    assert catalog.journal.unbound(trajectory.id) == [ended, whole]
    refuses(NotFound, catalog.journal.begin, TrajectoryID(new_id()), make_entry(first))
    refuses(NotFound, catalog.journal.get, CallID(new_id()))
    refuses(NotFound, catalog.journal.unbound, TrajectoryID(new_id()))
    refuses(UsageError, catalog.journal.begin, trajectory.id, make_entry(first, id=CallID("../x")))
    refuses(InternalError, catalog.journal.begin, trajectory.id, make_entry(first, status=CallStatus.DONE))


def another_trajectorys_call_cannot_be_ended(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    other, elsewhere = started(catalog)
    entry = make_entry(first)
    catalog.journal.begin(trajectory.id, entry)
    refuses(NotFound, catalog.journal.end, other.id, done(entry), says=(entry.id,))
    refuses(NotFound, lambda: committed(catalog, elsewhere, ended=done(entry)), says=(entry.id,))
    assert catalog.snapshots.of_trajectory(other.id) == [elsewhere]
    assert catalog.journal.get(entry.id) == entry


def entries_are_found_by_prefix(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    for tail in "01":
        catalog.journal.begin(trajectory.id, make_entry(first, id=CallID("abcd" + tail * 28), name=tail))
    assert catalog.journal.find("abcd1") == (trajectory.id, catalog.journal.get(CallID("abcd" + "1" * 28)))
    refuses(Ambiguous, catalog.journal.find, "abcd", says=("abcd00000000", "abcd11111111"))
    refuses(Ambiguous, catalog.journal.find, "abc", says=("too short",))
    for ref in ("abc%", "ffff", "", "abcd\ud800"):
        refuses(NotFound, catalog.journal.find, ref)


def a_commit_binds_what_has_ended(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    quick, slow, other = (make_entry(first, name=name) for name in ("quick", "slow", "other"))
    for entry in (quick, slow, other):
        catalog.journal.begin(trajectory.id, entry)
    catalog.journal.end(trajectory.id, done(other))
    entries = [ended_entry(first, name="asked", kind=EntryKind.QUESTION)]
    second = committed(
        catalog, first, ended=done(quick), entries=entries, call=make_call(id=quick.id, arguments=quick.arguments)
    )
    assert names(catalog.journal.own(second.id)) == ["quick", "other", "asked"]
    assert catalog.journal.own(second.id)[2] == replace(entries[0], snapshot=second.id)
    assert catalog.journal.get(quick.id).arguments == quick.arguments, "whoever holds them"
    assert names(catalog.journal.unbound(trajectory.id)) == ["slow"]
    third = committed(catalog, second, ended=done(slow))
    assert catalog.journal.unbound(trajectory.id) == []
    assert journal(catalog, third.id) == ["quick", "slow", "other", "asked"], "in the order in which they began"
    assert journal(catalog, second.id) == ["quick", "other", "asked"]
    assert journal(catalog, third.id, second.id) == ["slow"]
    assert journal(catalog, third.id, third.id) == []
    assert journal(catalog, third.id, first.id) == journal(catalog, third.id)
    assert (journal(catalog, first.id), catalog.journal.own(first.id)) == ([], [])
    fourth = committed(catalog, third)
    assert (catalog.journal.own(fourth.id), journal(catalog, fourth.id, third.id)) == ([], [])
    for ask in (catalog.journal.own, catalog.journal.read):
        refuses(NotFound, ask, SnapshotID(new_id()))
    refuses(NotFound, catalog.journal.read, fourth.id, SnapshotID(new_id()))


def arguments_that_a_person_changed_are_kept_apart(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    entry = make_entry(first, arguments={"n": 1})
    catalog.journal.begin(trajectory.id, entry)
    second = committed(catalog, first, ended=done(entry), call=make_call(id=entry.id, arguments={"n": True}))
    assert catalog.journal.get(entry.id).arguments["n"] is not True
    assert catalog.snapshots.get(second.id).call.arguments["n"] is True


def a_refused_commit_leaves_the_journal_alone(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    entry = make_entry(first)
    catalog.journal.begin(trajectory.id, entry)
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
    assert catalog.snapshots.of_trajectory(trajectory.id) == [first]
    assert catalog.journal.unbound(trajectory.id) == [entry]
    assert catalog.conversations.state(first.id) == {}


def hostile_entries_are_kept_exactly(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    text = "\ud800 \x00\x1b[31m '; DROP TABLE entries; -- \U0001f600"
    entry = ended_entry(
        first, name=text, arguments=[text], key=text, error=text, result=text, facts=(text,), details={text: text}
    )
    catalog.journal.begin(trajectory.id, entry)
    assert catalog.journal.get(entry.id) == entry
    open_one = make_entry(first)
    catalog.journal.begin(trajectory.id, open_one)
    catalog.journal.end(trajectory.id, Ended(open_one.id, CallStatus.UNKNOWN, 5, text, text, {text: [text]}))
    assert catalog.journal.get(open_one.id).details == {text: [text]}
    refuses(NotFound, catalog.journal.get, CallID(text))


def journals_go_on_across_forks(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    second = committed(catalog, first, entries=[ended_entry(first, name="1")])
    third = committed(catalog, second, entries=[ended_entry(second, name="2")])
    child = fork(second, trajectory)
    catalog.trajectories.add([(child, None)])
    begun = make_entry(second, name="A")
    catalog.journal.begin(child.id, begun)
    assert names(catalog.journal.unbound(child.id)) == ["A"]
    assert catalog.journal.unbound(trajectory.id) == []
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
    catalog.journal.begin(trajectory.id, cut_off)
    catalog.journal.begin(trajectory.id, complete)
    back = committed(catalog, third, after=second, entries=[ended_entry(third, name="rewind")])
    assert catalog.journal.unbound(trajectory.id) == []
    assert journal(catalog, back.id) == ["1", "rewind"]
    assert journal(catalog, back.id, third.id) == ["1", "rewind"]
    assert journal(catalog, back.id, second.id) == ["rewind"]
    assert [message.content for message in catalog.conversations.read(back.id)] == ["a"]
    assert (catalog.conversations.state(back.id), catalog.conversations.own_state(back.id)) == ({"n": 2}, None)
    on = committed(catalog, back, "d", entries=[ended_entry(back, name="3")])
    assert journal(catalog, on.id) == ["1", "rewind", "3"]
    undone = committed(catalog, on, after=third)
    assert journal(catalog, undone.id) == ["1", "2"]
    assert catalog.conversations.state(undone.id) == {"n": 3}
    assert [message.content for message in catalog.conversations.read(undone.id)] == ["a", "b", "c"]
    catalog.journal.end(trajectory.id, done(cut_off))  # it may still end, and stays where it was
    last = committed(catalog, undone)
    assert (catalog.journal.own(last.id), journal(catalog, last.id)) == ([], ["1", "2"])
    assert [catalog.journal.get(one.id).snapshot for one in (cut_off, complete)] == [None, None]
    assert catalog.snapshots.get(back.id) == back
    assert [one.follows for one in catalog.snapshots.of_trajectory(trajectory.id)] == [
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
        return names(catalog.journal.left_running(snapshot.id, None if since is None else since.id))

    trajectory, first = started(catalog)
    now = first.created_at_ns
    slow, never, late = (
        make_entry(first, name=name, began_at_ns=now + began)
        for name, began in (("slow", 1), ("never", 2), ("late", 15))
    )
    for entry in (slow, never):
        catalog.journal.begin(trajectory.id, entry)
    quick = ended_entry(first, name="quick", began_at_ns=now + 3)
    second = committed(catalog, first, entries=[quick], created_at_ns=now + 10)
    catalog.journal.begin(trajectory.id, late)
    third = committed(catalog, second, ended=done(slow), created_at_ns=now + 20)
    assert catalog.journal.left_running(second.id) == [catalog.journal.get(slow.id), never]
    assert (running(first), running(third)) == ([], ["never", "late"])
    back = committed(catalog, third, after=second, created_at_ns=now + 30)
    on = committed(catalog, back, created_at_ns=now + 40)
    child = fork(on, trajectory)
    catalog.trajectories.add([(child, None)])
    forked = committed(catalog, on, trajectory=child.id, created_at_ns=now + 50)
    for one in (back, on, forked):
        assert running(one) == running(one, second) == ["slow", "never"]
    assert running(forked, on) == []
    refuses(NotFound, catalog.journal.left_running, SnapshotID(new_id()))


def a_first_snapshot_can_follow_another(catalog: Catalog) -> None:
    """An edited snapshot begins a trajectory that goes on from what came before it."""
    trajectory, first = started(catalog)
    second = committed(catalog, first, "a", entries=[ended_entry(first, name="1")], saved={"n": 2})
    third = committed(catalog, second, "b", entries=[ended_entry(second, name="2")], saved={"n": 3})
    changed = fork(third, trajectory)
    own = follow(third, changed.id, after=second)
    refuses(InternalError, catalog.trajectories.add, [(replace(changed, head=own.id), replace(own, messages=2))])
    catalog.trajectories.add([(replace(changed, head=own.id), own)])
    assert catalog.snapshots.get(own.id) == own
    assert journal(catalog, own.id) == ["1"]
    assert catalog.conversations.state(own.id) == {"n": 2}
    later = committed(catalog, own, "c", entries=[ended_entry(own, name="3")])
    assert journal(catalog, later.id) == ["1", "3"]
    assert [message.content for message in catalog.conversations.read(later.id)] == ["a", "c"]


def the_state_is_shared_until_it_changes(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    states = [None, {"n": 1}, None, {"n": 1}, {"n": 2, "t": "\ud800"}, {}, {}, None]
    line = [first]
    for saved in states:
        line.append(committed(catalog, line[-1], saved=saved))
    seen = [{}, {}, {"n": 1}, {"n": 1}, {"n": 1}, {"n": 2, "t": "\ud800"}, {}, {}, {}]
    assert [catalog.conversations.state(one.id) for one in line] == seen
    assert [catalog.conversations.own_state(one.id) for one in line] == [
        None,
        None,
        {"n": 1},
        None,
        None,
        seen[5],
        {},
        None,
        None,
    ]
    child = fork(line[2], trajectory)
    catalog.trajectories.add([(child, None)])
    own = committed(catalog, line[2], trajectory=child.id)
    assert (catalog.conversations.state(own.id), catalog.conversations.own_state(own.id)) == ({"n": 1}, None)
    for ask in (catalog.conversations.state, catalog.conversations.own_state):
        refuses(NotFound, ask, SnapshotID(new_id()))
    catalog.trajectories.remove(child.id)
    assert catalog.conversations.state(line[3].id) == {"n": 1}


def an_older_fence_keeps_a_writer_out(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    old = catalog.trajectories.draw_fence(trajectory.id)
    entry = make_entry(first)
    catalog.journal.begin(trajectory.id, entry, fence=old)
    new = catalog.trajectories.draw_fence(trajectory.id)
    assert new > old
    says = (first.id[:12],)
    refuses(Conflict, lambda: catalog.journal.begin(trajectory.id, make_entry(first), fence=old), says=says)
    refuses(Conflict, lambda: catalog.journal.end(trajectory.id, done(entry), fence=old), says=says)
    refuses(Conflict, lambda: committed(catalog, first, fence=old), says=says)
    assert catalog.journal.unbound(trajectory.id) == [entry]
    second = committed(catalog, first, fence=new, ended=done(entry))
    committed(catalog, second)  # whoever holds no token is not asked for it
    refuses(NotFound, catalog.trajectories.draw_fence, TrajectoryID(new_id()))
    other, _ = started(catalog)
    assert catalog.trajectories.draw_fence(other.id) > 0


def one_of_two_writers_wins_each_step(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    steps, threads = 500, 2
    won: list[list[SnapshotID]] = [[] for _ in range(threads)]
    lost: list[tuple[SnapshotID, str]] = []
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            while sum(map(len, won)) < steps:
                head = catalog.snapshots.get(catalog.trajectories.get(trajectory.id).head)
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
    line = catalog.snapshots.of_trajectory(trajectory.id)
    assert [one.parent for one in line] == [None, *(one.id for one in line[:-1])]
    assert {one.id for one in line[1:]} == {one for ones in won for one in ones}
    assert len(list(catalog.journal.read(line[-1].id))) == len(line) - 1
    assert line[0] == first


def where_a_program_began_and_its_environment_change(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    second = committed(catalog, first)
    catalog.trajectories.set_began(trajectory.id, second.id)
    catalog.trajectories.set_env(trajectory.id, (("A", "\ud800"), ("B", "")))
    assert catalog.trajectories.get(trajectory.id) == replace(
        trajectory, head=second.id, began=second.id, env=(("A", "\ud800"), ("B", ""))
    )
    refuses(NotFound, catalog.trajectories.set_began, TrajectoryID(new_id()), first.id)
    refuses(NotFound, catalog.trajectories.set_began, trajectory.id, SnapshotID(new_id()))
    refuses(NotFound, catalog.trajectories.set_env, TrajectoryID(new_id()), ())
    child = fork(second, catalog.trajectories.get(trajectory.id))
    catalog.trajectories.add([(child, None)])
    assert catalog.trajectories.get(child.id).began == second.id
    image = make_image("another")
    catalog.images.add(image)
    other, begun = begin(image)
    catalog.trajectories.add([(replace(other, began=begun.id), begun)])
    assert catalog.trajectories.get(other.id).began == begun.id


def removal_waits_for_those_who_went_on_from_it(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    second = committed(catalog, first, "a", entries=[ended_entry(first)], saved={"n": 1})
    catalog.journal.begin(trajectory.id, make_entry(second))
    other, begun = started(catalog)
    committed(catalog, begun, after=second)
    refuses(Conflict, catalog.trajectories.remove, trajectory.id, says=(other.id[:12], "conversation"))
    assert len(list(catalog.journal.read(second.id))) == 1
    catalog.trajectories.remove(other.id)
    third, at = started(catalog)
    catalog.trajectories.set_began(third.id, second.id)
    refuses(Conflict, catalog.trajectories.remove, trajectory.id, says=(third.id[:12], "program"))
    catalog.trajectories.set_began(third.id, at.id)
    back = committed(catalog, second, after=first)  # its own do not hold it
    catalog.trajectories.set_began(trajectory.id, back.id)
    gone = catalog.journal.own(second.id)[0]
    catalog.trajectories.remove(trajectory.id)
    refuses(NotFound, catalog.journal.get, gone.id)
    catalog.journal.begin(third.id, replace(gone, snapshot=None))  # the id is free again


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
        refuses(InternalError, catalog.others.restore, [image], [whole], [snapshots[0], wrong, *snapshots[2:]])
    refuses(
        Conflict,
        catalog.others.restore,
        [image],
        [whole],
        [*snapshots[:2], replace(snapshots[2], entries=(own,)), snapshots[3]],
    )
    assert catalog.trajectories.list() == []
    catalog.others.restore([image], [whole], snapshots)
    assert catalog.trajectories.get(trajectory.id) == whole
    assert list(catalog.snapshots.all()) == [row.snapshot for row in snapshots]
    assert catalog.journal.own(second.id) == [own, late]
    assert list(catalog.journal.read(third.id)) == [early, own, late], "by their numbers"
    assert journal(catalog, back.id) == [own.name, late.name, early.name]
    assert [catalog.conversations.state(row.snapshot.id) for row in snapshots] == [{}, {"n": 1}, {"n": 1}, {}]
    assert [message.content for message in catalog.conversations.read(back.id)] == ["x"]
    open_one = make_entry(back)
    catalog.journal.begin(trajectory.id, open_one)
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
    stream = catalog.journal.read(line[-1].id)
    assert next(stream).name == "0.0"
    committed(catalog, line[-1], entries=[ended_entry(line[-1])])  # writing goes on while somebody reads
    assert sum(1 for _ in stream) == 1199
    stream = catalog.journal.read(line[-1].id)
    next(stream)
    catalog.trajectories.remove(trajectory.id)
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
