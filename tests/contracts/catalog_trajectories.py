"""What every catalog must do: small facts, images, trajectories, their removal and their restoration. See
catalog.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from snapshotd.catalog.base import Catalog, SnapshotRow
from snapshotd.errors import Ambiguous, Conflict, NotFound
from snapshotd.types import (
    ApprovalStatus,
    CallID,
    Compensation,
    ImageID,
    Message,
    RecordID,
    SnapshotID,
    SnapshotState,
    Stack,
    TrajectoryID,
    TrajectoryStatus,
    TreeID,
    new_id,
)
from tests.contracts.refusal import refuses
from tests.records import begin, committed, follow, fork, make_approval, make_image, started

TREES = [TreeID(f"{n:064x}") for n in range(3)]
RECORDS = [RecordID(f"{n:064x}") for n in range(10, 13)]


def meta_is_kept_and_replaced(catalog: Catalog) -> None:
    assert catalog.get_meta("boot") is None
    catalog.set_meta("boot", "1")
    catalog.set_meta("boot", "2 é")
    catalog.set_meta("instance", "x")
    assert catalog.get_meta("boot") == "2 é"


def images_round_trip_newest_first(catalog: Catalog) -> None:
    first, second = make_image("first"), make_image("second", env=(), workdir="/")
    catalog.images.add(first)
    catalog.images.add(second)
    assert catalog.images.list() == [second, first]
    assert catalog.images.find("first") == first
    assert catalog.images.find(second.id[:4]) == second
    assert catalog.images.find(second.id) == second
    refuses(Conflict, catalog.images.add, first, says=(first.id,))


def an_image_takes_over_a_name(catalog: Catalog) -> None:
    older, newer = make_image("same"), make_image("same")
    catalog.images.add(older)
    catalog.images.add(newer)
    assert catalog.images.find("same") == newer
    assert catalog.images.find(older.id) == replace(older, name="")
    catalog.images.add(make_image(""))  # any number may have none
    refuses(NotFound, catalog.images.find, "")


def image_prefixes_are_checked(catalog: Catalog) -> None:
    one, two = ImageID("abcd" + "0" * 28), ImageID("abcd" + "1" * 28)
    catalog.images.add(make_image("one", id=one))
    catalog.images.add(make_image("two", id=two))
    catalog.images.add(make_image("abcd", id=ImageID("f" * 32)))
    assert catalog.images.find("abcd").id == "f" * 32  # a name wins
    assert catalog.images.find("abcd1").id == two
    refuses(Ambiguous, catalog.images.find, "fff", says=("fff", "too short"))
    refuses(NotFound, catalog.images.find, "abc%")
    catalog.images.remove(ImageID("f" * 32))
    refuses(Ambiguous, catalog.images.find, "abcd", says=(one[:12], two[:12]))


def an_image_in_use_is_kept(catalog: Catalog) -> None:
    trajectory, snapshot = started(catalog)
    refuses(Conflict, catalog.images.remove, trajectory.spec.image, says=(trajectory.id[:12],))
    other = make_image("other")
    catalog.images.add(other)
    committed(catalog, snapshot, stack=Stack(other.id))
    refuses(Conflict, catalog.images.remove, other.id, says=(trajectory.id[:12],))
    catalog.trajectories.remove(trajectory.id)
    catalog.images.remove(other.id)
    catalog.images.remove(trajectory.spec.image)
    assert catalog.images.list() == []
    refuses(NotFound, catalog.images.remove, other.id, says=(other.id,))


def trajectories_round_trip_oldest_first(catalog: Catalog) -> None:
    one, snapshot = started(catalog, "one")
    two, _ = started(catalog, None, agent=None, env=(), exit_code=3, status=TrajectoryStatus.FAILED)
    assert catalog.trajectories.get(one.id) == one
    assert catalog.trajectories.list() == [one, two]
    assert catalog.trajectories.list(TrajectoryStatus.RUNNING) == [one]
    assert catalog.trajectories.list(TrajectoryStatus.INTERRUPTED) == []
    assert catalog.snapshots.get(snapshot.id) == snapshot
    refuses(NotFound, catalog.trajectories.get, TrajectoryID(new_id()))


def trajectories_are_added_all_or_none(catalog: Catalog) -> None:
    trajectory, snapshot = started(catalog, "taken")
    forks = [fork(snapshot, trajectory, name) for name in ("a", "b", "taken")]
    refuses(Conflict, catalog.trajectories.add, [(one, None) for one in forks], says=("taken",))
    assert catalog.trajectories.list() == [trajectory]
    lost = fork(snapshot, trajectory, head=SnapshotID("0" * 32), forked_from=SnapshotID("0" * 32))
    refuses(NotFound, catalog.trajectories.add, [(forks[0], None), (lost, None)], says=("0" * 32,))
    elsewhere = begin(make_image("not added"))
    refuses(NotFound, catalog.trajectories.add, [(forks[0], None), elsewhere], says=(elsewhere[0].spec.image,))
    assert catalog.trajectories.list() == [trajectory]
    assert len(list(catalog.snapshots.all())) == 1
    catalog.trajectories.add([])


def a_status_changes_and_keeps_the_exit_code(catalog: Catalog) -> None:
    trajectory, _ = started(catalog)
    catalog.trajectories.set_status(trajectory.id, TrajectoryStatus.FAILED, 7)
    catalog.trajectories.set_status(trajectory.id, TrajectoryStatus.STOPPED)
    assert catalog.trajectories.get(trajectory.id) == replace(trajectory, status=TrajectoryStatus.STOPPED, exit_code=7)
    refuses(NotFound, catalog.trajectories.set_status, TrajectoryID(new_id()), TrajectoryStatus.STOPPED)


def a_fork_can_bring_its_own_first_snapshot(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    second = committed(catalog, first, "1")
    changed = fork(second, trajectory)
    own = follow(second, changed.id)
    catalog.trajectories.add([(replace(changed, head=own.id), own)])
    assert catalog.snapshots.of_trajectory(changed.id) == [own]
    assert len(list(catalog.conversations.read(own.id))) == 1


def removal_waits_for_forks(catalog: Catalog) -> None:
    trajectory, first = started(catalog, "parent")
    second = committed(catalog, first, "1")
    catalog.refs.tag(second.id, "best")
    child = fork(second, trajectory, "child")
    catalog.trajectories.add([(child, None)])
    own = committed(catalog, second, "A", trajectory=child.id, stack=second.stack)  # shares the parent's stack
    for remove in (catalog.trajectories.check_removable, catalog.trajectories.remove):
        refuses(Conflict, remove, trajectory.id, says=(child.id[:12],))
    catalog.trajectories.check_removable(trajectory.id, {child.id})
    catalog.trajectories.check_removable(child.id)
    catalog.trajectories.remove(child.id)
    refuses(NotFound, catalog.snapshots.get, own.id)
    assert catalog.snapshots.get(second.id).stack == second.stack
    assert catalog.snapshots.referenced_layers() == set(second.stack.layers)
    catalog.trajectories.remove(trajectory.id)
    assert catalog.trajectories.list() == []
    assert list(catalog.snapshots.all()) == []
    assert catalog.snapshots.referenced_layers() == set()
    refuses(NotFound, catalog.refs.find_snapshot, "best")
    for remove in (catalog.trajectories.check_removable, catalog.trajectories.remove):
        refuses(NotFound, remove, trajectory.id)
    started(catalog, "parent")  # the name is free again
    assert catalog.trajectories.removed() == {child.id, trajectory.id}
    catalog.trajectories.forget_removed({child.id})
    assert catalog.trajectories.removed() == {trajectory.id}


def a_base_elsewhere_holds_until_its_user_is_stored(catalog: Catalog) -> None:
    """After a rewind to a snapshot of another trajectory, which is no fork of it."""
    trajectory, first = started(catalog)
    target = committed(catalog, first)
    other, begun = begin(catalog.images.find(trajectory.spec.image))
    catalog.trajectories.add([(other, begun)])
    rewound = committed(catalog, begun, stack=target.stack, base=target.id, own_layers=0)
    damaged = committed(catalog, rewound, stack=target.stack, base=target.id, own_layers=0)
    catalog.snapshots.set_state([damaged.id], SnapshotState.LOST)
    for remove in (catalog.trajectories.check_removable, catalog.trajectories.remove):
        refuses(Conflict, remove, trajectory.id, says=(rewound.id[:12], other.id[:12]))
    catalog.trajectories.check_removable(trajectory.id, {other.id})
    assert catalog.snapshots.get(target.id) == target
    catalog.snapshots.set_stored(rewound.id, TREES[0], RECORDS[0])
    catalog.trajectories.remove(trajectory.id)
    assert catalog.snapshots.get(rewound.id) == replace(
        rewound, state=SnapshotState.STORED, tree=TREES[0], base=None, own_layers=1
    )
    assert catalog.snapshots.get(damaged.id) == replace(damaged, state=SnapshotState.LOST, base=None, own_layers=1)
    assert catalog.snapshots.referenced_layers() == set(target.stack.layers)
    unknown = SnapshotID(new_id())
    refuses(NotFound, lambda: committed(catalog, damaged, base=unknown), says=(unknown,))
    assert catalog.trajectories.get(other.id).head == damaged.id


def rows_are_restored_as_they_were(catalog: Catalog) -> None:
    image = make_image("restored", tree=TREES[2])
    trajectory, first = begin(image, "line", status=TrajectoryStatus.STOPPED)
    first = replace(first, state=SnapshotState.STORED, tree=TREES[0], tags=("a", "b"))
    second = replace(follow(first, messages=2), state=SnapshotState.PRUNED)
    child = fork(second, replace(trajectory, head=second.id), "child")
    own = replace(follow(first, child.id, messages=1), parent=second.id, messages=3, base=second.id)
    said = tuple(Message("user", text) for text in "123")
    rows = [SnapshotRow(first, (), RECORDS[0]), SnapshotRow(second, said[:2]), SnapshotRow(own, said[2:], RECORDS[1])]
    lines = [replace(child, head=own.id), replace(trajectory, head=second.id), fork(own, child)]
    refuses(NotFound, catalog.others.restore, [image], lines, rows[:2])
    refuses(NotFound, catalog.others.restore, [], lines, rows)
    assert (catalog.images.list(), catalog.trajectories.list(), list(catalog.snapshots.all())) == ([], [], [])
    catalog.others.restore([image], lines, rows)
    assert catalog.images.list() == [image]
    assert catalog.trajectories.list() == lines
    assert list(catalog.snapshots.all()) == [first, second, own]
    assert [catalog.snapshots.record(one.id) for one in (first, second, own)] == [RECORDS[0], None, RECORDS[1]]
    assert tuple(catalog.conversations.read(own.id)) == said
    assert catalog.refs.find_snapshot("b") == first
    assert catalog.refs.find_snapshot("child") == own
    refuses(Conflict, catalog.others.restore, [], [], rows[:1], says=(first.id,))
    more = replace(follow(own), state=SnapshotState.STORED, tree=TREES[0])
    catalog.others.restore([], [], [])
    catalog.others.restore(
        [], [one := fork(own, child, head=more.id)], [SnapshotRow(replace(more, trajectory=one.id))]
    )  # on what is here
    assert catalog.trajectories.get(one.id) == one


def missing_rows_are_added_and_the_rest_stays(catalog: Catalog) -> None:
    """What another node tells, in parts, twice, and behind what is here; names that are taken here are left out."""
    taken, there = started(catalog, "line")
    catalog.refs.tag(there.id, "a")
    (here,) = catalog.images.list()
    image = make_image(here.name, tree=TREES[2])
    trajectory, first = begin(image, "line", status=TrajectoryStatus.RUNNING)
    first = replace(first, state=SnapshotState.STORED, tree=TREES[0], tags=("a", "b"))
    second = replace(follow(first, messages=2), state=SnapshotState.STORED, tree=TREES[1])
    third = replace(follow(second), state=SnapshotState.STORED, tree=TREES[1])
    said = tuple(Message("user", text) for text in "12")
    waits = make_approval(second)
    undone = Compensation(CallID(new_id()), trajectory.id, None, 5)
    rows = [SnapshotRow(first, (), RECORDS[0]), SnapshotRow(second, said), SnapshotRow(third)]
    for _ in range(2):
        catalog.others.add_missing([image], [replace(trajectory, head=first.id)], rows[:1], [waits])
        assert catalog.trajectories.get(trajectory.id) == replace(trajectory, name=None, head=first.id)
    assert catalog.approvals.list(None, trajectory.id) == [], "its snapshot is not here"
    ended = replace(trajectory, head=third.id, status=TrajectoryStatus.FINISHED, exit_code=3, env=(("A", "b"),))
    for _ in range(2):
        catalog.others.add_missing([image], [ended], rows, [waits], [undone])
        assert catalog.trajectories.get(trajectory.id) == replace(ended, name=None)
        assert catalog.snapshots.of_trajectory(trajectory.id) == [replace(first, tags=("b",)), second, third]
    assert tuple(catalog.conversations.read(third.id)) == said
    assert catalog.approvals.list(None, trajectory.id) == [waits]
    assert catalog.compensations.of_trajectory(trajectory.id) == [undone]
    decided = replace(waits, status=ApprovalStatus.APPROVED, by="me", decided_at_ns=9)
    catalog.others.add_missing(
        [], [replace(trajectory, head=second.id)], [], [decided], [replace(undone, ended_at_ns=6)]
    )
    assert catalog.trajectories.get(trajectory.id).head == third.id, "a head does not go back"
    assert catalog.approvals.list(None, trajectory.id) == [decided]
    assert catalog.compensations.get(undone.entry) == replace(undone, ended_at_ns=6)
    assert catalog.images.find(image.id).name == ""
    assert catalog.images.find(here.name) == here
    assert catalog.refs.find_snapshot("a") == replace(there, tags=("a",))
    assert catalog.refs.find_trajectory("line").id == taken.id
    own = committed(catalog, third)
    assert catalog.trajectories.get(trajectory.id).head == own.id
    child = fork(third, ended, "child")
    further = replace(follow(third, child.id), base=third.id)
    catalog.others.add_missing([], [replace(child, head=further.id)], [SnapshotRow(further)])
    assert catalog.trajectories.get(child.id) == replace(child, head=further.id)
    assert tuple(catalog.conversations.read(further.id)) == said


def the_last_snapshots_become_a_side_branch(catalog: Catalog) -> None:
    trajectory, first = started(catalog, "line")
    said = [Message("user", text) for text in "1234"]
    second = committed(catalog, first, *said[:2])
    third = committed(catalog, second, *said[2:3])
    asked = make_approval(third)
    catalog.approvals.add(asked)
    fourth = committed(catalog, third, *said[3:])
    side = TrajectoryID(new_id())
    for _ in range(2):
        catalog.others.split_trajectory(trajectory.id, third.id, side)
        assert catalog.snapshots.of_trajectory(trajectory.id) == [first, second]
        assert catalog.snapshots.of_trajectory(side) == [replace(one, trajectory=side) for one in (third, fourth)]
        rest, branch = catalog.trajectories.get(trajectory.id), catalog.trajectories.get(side)
        assert (rest.head, rest.status, rest.name) == (second.id, TrajectoryStatus.INTERRUPTED, "line")
        assert (branch.head, branch.forked_from, branch.name) == (fourth.id, second.id, None)
        assert list(catalog.conversations.read(second.id)) == said[:2]
        assert list(catalog.conversations.read(fourth.id)) == said
        assert catalog.conversations.own(third.id) == said[2:3]
    assert catalog.approvals.list(None, side) == [replace(asked, trajectory=side)]
    other = committed(catalog, second, "x")
    assert [one.content for one in catalog.conversations.read(other.id)] == ["1", "2", "x"]
    later = committed(catalog, catalog.snapshots.get(fourth.id), "y")
    assert [one.content for one in catalog.conversations.read(later.id)] == [*"1234", "y"]
    refuses(NotFound, catalog.others.split_trajectory, trajectory.id, SnapshotID(new_id()), side)
    whole = TrajectoryID(new_id())
    catalog.others.split_trajectory(trajectory.id, first.id, whole)
    assert catalog.trajectories.get(whole).head == other.id
    refuses(NotFound, catalog.trajectories.get, trajectory.id)


def what_a_name_a_fork_or_a_question_needs_is_told(catalog: Catalog) -> None:
    trajectory, first = started(catalog, "line")
    line = [first]
    for _ in range(6):
        line.append(committed(catalog, line[-1]))
    tagged, forked, begun, asked, free, head = line[1:]
    catalog.refs.tag(tagged.id, "kept")
    catalog.trajectories.add([(fork(forked, trajectory, "child"), None)])
    catalog.trajectories.set_began(trajectory.id, begun.id)
    waits = make_approval(asked)
    catalog.approvals.add(waits)
    ids = [one.id for one in (free, first, head, asked, begun, forked, tagged)]
    assert catalog.others.choose_unneeded([*ids, SnapshotID(new_id())]) == [free.id, first.id]
    catalog.approvals.decide(waits.id, ApprovalStatus.DENIED, at_ns=1, by="me", reason=None)
    catalog.refs.untag("kept")
    assert catalog.others.choose_unneeded(ids) == [free.id, first.id, asked.id, tagged.id]
    assert catalog.others.choose_unneeded([]) == []


CHECKS: tuple[Callable[[Catalog], None], ...] = (
    meta_is_kept_and_replaced,
    images_round_trip_newest_first,
    an_image_takes_over_a_name,
    image_prefixes_are_checked,
    an_image_in_use_is_kept,
    trajectories_round_trip_oldest_first,
    trajectories_are_added_all_or_none,
    a_status_changes_and_keeps_the_exit_code,
    a_fork_can_bring_its_own_first_snapshot,
    removal_waits_for_forks,
    a_base_elsewhere_holds_until_its_user_is_stored,
    rows_are_restored_as_they_were,
    missing_rows_are_added_and_the_rest_stays,
    the_last_snapshots_become_a_side_branch,
    what_a_name_a_fork_or_a_question_needs_is_told,
)
