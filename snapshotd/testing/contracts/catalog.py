"""What every catalog must do. Each function of `CHECKS` takes an empty catalog of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from snapshotd.catalog.base import Catalog, SnapshotRow
from snapshotd.errors import Ambiguous, Conflict, LimitExceeded, NotFound, SnapshotdError, UsageError
from snapshotd.testing.records import begin, committed, follow, fork, make_call, make_image, started
from snapshotd.types import (
    BlobID,
    ExperimentID,
    FileChanges,
    ImageID,
    LayerID,
    Message,
    RecordID,
    Snapshot,
    SnapshotID,
    SnapshotState,
    Stack,
    TrajectoryID,
    TrajectoryStatus,
    TreeID,
    new_id,
)

TREES = [TreeID(f"{n:064x}") for n in range(3)]
RECORDS = [RecordID(f"{n:064x}") for n in range(10, 13)]


def refuses(error: type[SnapshotdError], action: Callable[..., Any], *values: Any, says: tuple[str, ...] = ()) -> None:
    """`action(*values)` raises `error` with a message that contains each of `says`."""
    message = None
    try:
        action(*values)
    except error as exc:
        message = exc.message
    assert message is not None, f"{error.__name__} was not raised"
    assert all(text in message for text in says), (says, message)


def meta_is_kept_and_replaced(catalog: Catalog) -> None:
    assert catalog.get_meta("boot") is None
    catalog.set_meta("boot", "1")
    catalog.set_meta("boot", "2 é")
    catalog.set_meta("instance", "x")
    assert catalog.get_meta("boot") == "2 é"


def images_round_trip_newest_first(catalog: Catalog) -> None:
    first, second = make_image("first"), make_image("second", env=(), workdir="/")
    catalog.add_image(first)
    catalog.add_image(second)
    assert catalog.images() == [second, first]
    assert catalog.find_image("first") == first
    assert catalog.find_image(second.id[:4]) == second
    assert catalog.find_image(second.id) == second
    refuses(Conflict, catalog.add_image, first, says=(first.id,))


def an_image_takes_over_a_name(catalog: Catalog) -> None:
    older, newer = make_image("same"), make_image("same")
    catalog.add_image(older)
    catalog.add_image(newer)
    assert catalog.find_image("same") == newer
    assert catalog.find_image(older.id) == replace(older, name="")
    catalog.add_image(make_image(""))  # any number may have none
    refuses(NotFound, catalog.find_image, "")


def image_prefixes_are_checked(catalog: Catalog) -> None:
    one, two = ImageID("abcd" + "0" * 28), ImageID("abcd" + "1" * 28)
    catalog.add_image(make_image("one", id=one))
    catalog.add_image(make_image("two", id=two))
    catalog.add_image(make_image("abcd", id=ImageID("f" * 32)))
    assert catalog.find_image("abcd").id == "f" * 32  # a name wins
    assert catalog.find_image("abcd1").id == two
    refuses(NotFound, catalog.find_image, "fff", says=("fff",))  # too short
    refuses(NotFound, catalog.find_image, "abc%")
    catalog.remove_image(ImageID("f" * 32))
    refuses(
        Ambiguous,
        catalog.find_image,
        "abcd",
        says=(
            one[:12],
            two[:12],
        ),
    )


def an_image_in_use_is_kept(catalog: Catalog) -> None:
    trajectory, snapshot = started(catalog)
    refuses(Conflict, catalog.remove_image, trajectory.spec.image, says=(trajectory.id[:12],))
    other = make_image("other")
    catalog.add_image(other)
    committed(catalog, snapshot, stack=Stack(other.id))
    refuses(Conflict, catalog.remove_image, other.id, says=(trajectory.id[:12],))
    catalog.remove_trajectory(trajectory.id)
    catalog.remove_image(other.id)
    catalog.remove_image(trajectory.spec.image)
    assert catalog.images() == []
    refuses(NotFound, catalog.remove_image, other.id, says=(other.id,))


def trajectories_round_trip_oldest_first(catalog: Catalog) -> None:
    one, snapshot = started(catalog, "one")
    two, _ = started(catalog, None, agent=None, env=(), exit_code=3, status=TrajectoryStatus.FAILED)
    assert catalog.get_trajectory(one.id) == one
    assert catalog.trajectories() == [one, two]
    assert catalog.trajectories(TrajectoryStatus.RUNNING) == [one]
    assert catalog.trajectories(TrajectoryStatus.INTERRUPTED) == []
    assert catalog.get_snapshot(snapshot.id) == snapshot
    refuses(NotFound, catalog.get_trajectory, TrajectoryID(new_id()))


def trajectories_are_added_all_or_none(catalog: Catalog) -> None:
    trajectory, snapshot = started(catalog, "taken")
    forks = [fork(snapshot, trajectory, name) for name in ("a", "b", "taken")]
    refuses(Conflict, catalog.add_trajectories, [(one, None) for one in forks], says=("taken",))
    assert catalog.trajectories() == [trajectory]
    lost = fork(snapshot, trajectory, head=SnapshotID("0" * 32), forked_from=SnapshotID("0" * 32))
    refuses(NotFound, catalog.add_trajectories, [(forks[0], None), (lost, None)], says=("0" * 32,))
    elsewhere = begin(make_image("not added"))
    refuses(NotFound, catalog.add_trajectories, [(forks[0], None), elsewhere], says=(elsewhere[0].spec.image,))
    assert catalog.trajectories() == [trajectory]
    assert len(list(catalog.all_snapshots())) == 1
    catalog.add_trajectories([])


def a_status_changes_and_keeps_the_exit_code(catalog: Catalog) -> None:
    trajectory, _ = started(catalog)
    catalog.set_status(trajectory.id, TrajectoryStatus.FAILED, 7)
    catalog.set_status(trajectory.id, TrajectoryStatus.STOPPED)
    assert catalog.get_trajectory(trajectory.id) == replace(trajectory, status=TrajectoryStatus.STOPPED, exit_code=7)
    refuses(NotFound, catalog.set_status, TrajectoryID(new_id()), TrajectoryStatus.STOPPED)


def a_commit_binds_everything(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    snapshot = follow(first, messages=2, files=FileChanges(1, 2, 3, 4), method="copy")
    said = [Message("user", {"text": "hi \u2028 \x00", "n": [1, 2.5, None, True]}), Message("assistant", None)]
    catalog.commit_snapshot(snapshot, said, expected_head=first.id)
    assert catalog.get_snapshot(snapshot.id) == snapshot
    assert catalog.get_trajectory(trajectory.id).head == snapshot.id
    assert list(catalog.conversation(snapshot.id)) == said
    assert catalog.snapshots(trajectory.id) == [first, snapshot]
    assert list(catalog.all_snapshots()) == [first, snapshot]


def a_stale_writer_is_refused(catalog: Catalog) -> None:

    def commit(snapshot: Snapshot, said: list[Message], head: SnapshotID) -> None:
        catalog.commit_snapshot(snapshot, said, expected_head=head)

    trajectory, first = started(catalog)
    second = committed(catalog, first, "one")
    late = follow(first, messages=1)
    refuses(Conflict, commit, late, [Message("user", "late")], first.id, says=(second.id[:12],))
    refuses(NotFound, catalog.get_snapshot, late.id)
    assert [message.content for message in catalog.conversation(second.id)] == ["one"]
    assert catalog.get_trajectory(trajectory.id).head == second.id
    stray = follow(second, TrajectoryID(new_id()))
    refuses(NotFound, commit, stray, [], second.id)


def a_refused_message_leaves_nothing(catalog: Catalog) -> None:

    def commit(snapshot: Snapshot, said: list[Message], head: SnapshotID) -> None:
        catalog.commit_snapshot(snapshot, said, expected_head=head)

    trajectory, first = started(catalog)
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    for error, content in ((UsageError, float("nan")), (UsageError, b"bytes"), (UsageError, {1, 2}), (LimitExceeded, deep)):
        snapshot = follow(first, messages=2)
        said = [Message("user", "fine"), Message("user", content)]
        refuses(error, commit, snapshot, said, first.id)
        refuses(error, commit, follow(first, call=make_call(arguments=content)), [], first.id)
    assert catalog.snapshots(trajectory.id) == [first]
    assert list(catalog.conversation(first.id)) == []


def hostile_text_is_kept_exactly(catalog: Catalog) -> None:
    _, first = started(catalog)
    text = "\ud800 \x00\x1b[31m '; DROP TABLE snapshots; -- \U0001f600"
    call = make_call(text, error=text, arguments={text: [text]})
    snapshot = follow(first, messages=1, call=call)
    catalog.commit_snapshot(snapshot, [Message(text, text)], expected_head=first.id)
    assert catalog.get_snapshot(snapshot.id).call == call
    assert list(catalog.conversation(snapshot.id)) == [Message(text, text)]
    for find in (catalog.resolve_snapshot, catalog.resolve_trajectory, catalog.find_image, catalog.untag):
        refuses(NotFound, find, text)


def optional_fields_stay_empty(catalog: Catalog) -> None:
    _, first = started(catalog)
    call = make_call(exit_code=None, error=None, output=None, stdout=None, stderr=None, arguments=None)
    assert catalog.get_snapshot(committed(catalog, first, call=call).id).call == call


def a_fork_goes_on_from_its_origin(catalog: Catalog) -> None:
    trajectory, first = started(catalog, "parent")
    second = committed(catalog, first, "1", "2")
    third = committed(catalog, second, "3")
    forks = [fork(second, trajectory, f"fork-{n}", experiment=ExperimentID("e" * 32)) for n in range(2)]
    catalog.add_trajectories([(one, None) for one in forks])
    assert catalog.get_trajectory(forks[0].id) == forks[0]
    assert catalog.snapshots(forks[0].id) == []
    own = committed(catalog, second, "A", trajectory=forks[0].id)
    later = committed(catalog, own, "B", "C")
    deeper = fork(own, forks[0])
    catalog.add_trajectories([(deeper, None)])
    deepest = committed(catalog, own, "X", trajectory=deeper.id)

    def said(snapshot_id: SnapshotID) -> str:
        return "".join(message.content for message in catalog.conversation(snapshot_id))

    assert [said(one.id) for one in (first, second, third, own, later, deepest)] == ["", "12", "123", "12A", "12ABC", "12AX"]
    assert catalog.snapshots(forks[0].id) == [own, later]
    assert catalog.snapshots(trajectory.id) == [first, second, third]
    assert catalog.get_trajectory(forks[1].id).head == second.id
    assert [one.id for one in catalog.experiment(ExperimentID("e" * 32))] == [one.id for one in forks]
    refuses(NotFound, catalog.experiment, ExperimentID("f" * 32))
    refuses(NotFound, catalog.conversation, SnapshotID(new_id()))


def a_fork_can_bring_its_own_first_snapshot(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    second = committed(catalog, first, "1")
    changed = fork(second, trajectory)
    own = follow(second, changed.id)
    catalog.add_trajectories([(replace(changed, head=own.id), own)])
    assert catalog.snapshots(changed.id) == [own]
    assert len(list(catalog.conversation(own.id))) == 1


def removal_waits_for_forks(catalog: Catalog) -> None:
    trajectory, first = started(catalog, "parent")
    second = committed(catalog, first, "1")
    catalog.tag(second.id, "best")
    child = fork(second, trajectory, "child")
    catalog.add_trajectories([(child, None)])
    own = committed(catalog, second, "A", trajectory=child.id, stack=second.stack)  # shares the parent's stack
    refuses(Conflict, catalog.remove_trajectory, trajectory.id, says=(child.id[:12],))
    catalog.remove_trajectory(child.id)
    refuses(NotFound, catalog.get_snapshot, own.id)
    assert catalog.get_snapshot(second.id).stack == second.stack
    assert catalog.referenced_layers() == set(second.stack.layers)
    catalog.remove_trajectory(trajectory.id)
    assert catalog.trajectories() == []
    assert list(catalog.all_snapshots()) == []
    assert catalog.referenced_layers() == set()
    assert catalog.referenced_blobs() == set()
    refuses(NotFound, catalog.resolve_snapshot, "best")
    refuses(NotFound, catalog.remove_trajectory, trajectory.id)
    started(catalog, "parent")  # the name is free again


def counts_and_states_can_come_later(catalog: Catalog) -> None:
    _, first = started(catalog)
    second = committed(catalog, first)
    catalog.set_files(second.id, FileChanges(5, 6, 7, 1 << 40))
    catalog.set_state([first.id, second.id, SnapshotID(new_id())], SnapshotState.STORED)
    catalog.set_state(iter([first.id]), SnapshotState.LOST)
    catalog.set_files(SnapshotID(new_id()), FileChanges())
    assert catalog.get_snapshot(first.id) == replace(first, state=SnapshotState.LOST)
    assert catalog.get_snapshot(second.id) == replace(second, state=SnapshotState.STORED, files=FileChanges(5, 6, 7, 1 << 40))


def bases_are_kept_and_states_follow_the_archive(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    second = committed(catalog, first)
    rewound = committed(catalog, second, stack=first.stack, base=first.id, own_layers=0)
    merged = committed(catalog, rewound, base=None, own_layers=2)
    line = [first, second, rewound, merged]
    assert catalog.snapshots(trajectory.id) == line
    assert catalog.unstored() == [one.id for one in line]
    catalog.set_stored(second.id, TREES[0], RECORDS[0])
    catalog.set_stored(SnapshotID(new_id()), TREES[1], RECORDS[1])  # gone meanwhile
    assert catalog.get_snapshot(second.id) == replace(second, state=SnapshotState.STORED, tree=TREES[0])
    assert catalog.record(second.id) == RECORDS[0]
    assert catalog.record(first.id) is None
    assert catalog.unstored() == [first.id, rewound.id, merged.id]
    catalog.set_stored(second.id, TREES[1], RECORDS[1])  # is stored already
    assert catalog.get_snapshot(second.id).tree == TREES[0]
    catalog.set_state([first.id, second.id], SnapshotState.LOST)
    assert catalog.get_snapshot(second.id) == replace(second, state=SnapshotState.LOST)
    catalog.set_stored(second.id, TREES[2], RECORDS[2])  # a lost one can come back
    assert catalog.get_snapshot(second.id).tree == TREES[2]
    assert catalog.unstored() == [rewound.id, merged.id]
    refuses(NotFound, catalog.record, SnapshotID(new_id()))


def pruning_gives_up_stored_trees_only(catalog: Catalog) -> None:
    _, first = started(catalog)
    second = committed(catalog, first, "a")
    third = committed(catalog, second, "b")
    catalog.set_stored(first.id, TREES[0], RECORDS[0])
    catalog.set_stored(second.id, TREES[1], RECORDS[1])
    catalog.set_state([second.id], SnapshotState.LOST)
    catalog.set_pruned(iter([first.id, second.id, third.id, SnapshotID(new_id())]))
    assert catalog.get_snapshot(first.id) == replace(first, state=SnapshotState.PRUNED)
    assert catalog.get_snapshot(second.id).state is SnapshotState.LOST
    assert catalog.get_snapshot(third.id) == third
    catalog.set_stored(first.id, TREES[2], RECORDS[2])
    assert catalog.get_snapshot(first.id).state is SnapshotState.PRUNED  # for good
    assert catalog.record(first.id) == RECORDS[0]  # call and conversation are still there
    assert [message.content for message in catalog.conversation(third.id)] == ["a", "b"]
    assert catalog.referenced_trees() == set()


def trees_records_and_unstored_blobs_are_listed(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    blobs = [BlobID(digit * 64) for digit in "12"]
    second = committed(catalog, first, call=make_call(output=blobs[0], stdout=None, stderr=blobs[1]))
    assert catalog.unstored_blobs() == {first.call.output, first.call.stdout, first.call.stderr, *blobs}
    catalog.set_stored(first.id, TREES[0], RECORDS[0])
    assert catalog.unstored_blobs() == set(blobs)
    assert (catalog.referenced_trees(), catalog.referenced_records()) == ({TREES[0]}, {RECORDS[0]})
    catalog.set_image_tree(trajectory.spec.image, TREES[1])
    catalog.set_image_tree(ImageID(new_id()), TREES[2])  # gone meanwhile
    catalog.set_stored(second.id, TREES[0], RECORDS[1])
    assert catalog.unstored_blobs() == set()
    assert (catalog.referenced_trees(), catalog.referenced_records()) == ({TREES[0], TREES[1]}, {RECORDS[0], RECORDS[1]})
    assert catalog.find_image(trajectory.spec.image).tree == TREES[1]
    catalog.set_pruned([first.id])
    catalog.remove_trajectory(trajectory.id)
    assert (catalog.referenced_trees(), catalog.referenced_records()) == ({TREES[1]}, set())


def what_a_repair_found_gone_can_be_recorded(catalog: Catalog) -> None:
    _, first = started(catalog)
    kept, gone = BlobID("1" * 64), BlobID("2" * 64)
    second = committed(catalog, first, call=make_call(output=gone, stdout=kept, stderr=gone))
    third = committed(catalog, second, call=make_call(output=kept, stdout=gone, stderr=None))
    catalog.forget_outputs(iter([gone, BlobID("3" * 64)]))
    assert catalog.get_snapshot(second.id).call == replace(second.call, output=None, stderr=None)
    assert catalog.get_snapshot(third.id).call == replace(third.call, stdout=None)
    catalog.set_stored(second.id, TREES[0], RECORDS[0])
    catalog.set_record(second.id, RECORDS[1])
    catalog.set_record(SnapshotID(new_id()), RECORDS[2])  # gone meanwhile
    assert catalog.record(second.id) == RECORDS[1]
    assert catalog.referenced_records() == {RECORDS[1]}


def all_tags_are_listed(catalog: Catalog) -> None:
    _, first = started(catalog)
    second = committed(catalog, first)
    assert catalog.tags() == {}
    for name, snapshot in (("b", first), ("a", second), ("c", first)):
        catalog.tag(snapshot.id, name)
    assert list(catalog.tags().items()) == [("a", second.id), ("b", first.id), ("c", first.id)]


def the_newest_can_be_listed_alone(catalog: Catalog) -> None:
    trajectory, head = started(catalog)
    line = [head, *(head := committed(catalog, head) for _ in range(9))]
    child = fork(line[3], trajectory)
    catalog.add_trajectories([(child, None)])
    assert catalog.snapshots(child.id, 5) == []
    assert catalog.count_snapshots(child.id) == 0
    own = committed(catalog, line[3], trajectory=child.id)
    assert catalog.snapshots(child.id, 5) == [own]
    for last in (0, 1, 4, 10, 11):
        assert catalog.snapshots(trajectory.id, last) == line[10 - min(last, 10) :]
    assert (catalog.count_snapshots(trajectory.id), catalog.count_snapshots(child.id)) == (10, 1)
    for find in (catalog.snapshots, catalog.count_snapshots):
        refuses(NotFound, find, TrajectoryID(new_id()))


def own_messages_are_those_a_snapshot_added(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    second = committed(catalog, first, "1", "2")
    third = committed(catalog, second)
    fourth = committed(catalog, third, "3")
    child = fork(second, trajectory)
    catalog.add_trajectories([(child, None)])
    own = committed(catalog, second, "A", "B", "C", trajectory=child.id)
    later = committed(catalog, own, "D")

    def said(snapshot: Snapshot) -> str:
        return "".join(message.content for message in catalog.own_messages(snapshot.id))

    assert [said(one) for one in (first, second, third, fourth, own, later)] == ["", "12", "", "3", "ABC", "D"]
    refuses(NotFound, catalog.own_messages, SnapshotID(new_id()))


def a_base_elsewhere_holds_until_its_user_is_stored(catalog: Catalog) -> None:
    """After a rewind to a snapshot of another trajectory, which is no fork of it."""
    trajectory, first = started(catalog)
    target = committed(catalog, first)
    other, begun = begin(catalog.find_image(trajectory.spec.image))
    catalog.add_trajectories([(other, begun)])
    rewound = committed(catalog, begun, stack=target.stack, base=target.id, own_layers=0)
    damaged = committed(catalog, rewound, stack=target.stack, base=target.id, own_layers=0)
    catalog.set_state([damaged.id], SnapshotState.LOST)
    refuses(Conflict, catalog.remove_trajectory, trajectory.id, says=(rewound.id[:12], other.id[:12]))
    assert catalog.get_snapshot(target.id) == target
    catalog.set_stored(rewound.id, TREES[0], RECORDS[0])
    catalog.remove_trajectory(trajectory.id)
    assert catalog.get_snapshot(rewound.id) == replace(rewound, state=SnapshotState.STORED, tree=TREES[0], base=None, own_layers=1)
    assert catalog.get_snapshot(damaged.id) == replace(damaged, state=SnapshotState.LOST, base=None, own_layers=1)
    assert catalog.referenced_layers() == set(target.stack.layers)
    unknown = SnapshotID(new_id())
    refuses(NotFound, lambda: committed(catalog, damaged, base=unknown), says=(unknown,))
    assert catalog.get_trajectory(other.id).head == damaged.id


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
    refuses(NotFound, catalog.restore_rows, [image], lines, rows[:2])
    refuses(NotFound, catalog.restore_rows, [], lines, rows)
    assert (catalog.images(), catalog.trajectories(), list(catalog.all_snapshots())) == ([], [], [])
    catalog.restore_rows([image], lines, rows)
    assert catalog.images() == [image]
    assert catalog.trajectories() == lines
    assert list(catalog.all_snapshots()) == [first, second, own]
    assert [catalog.record(one.id) for one in (first, second, own)] == [RECORDS[0], None, RECORDS[1]]
    assert tuple(catalog.conversation(own.id)) == said
    assert catalog.resolve_snapshot("b") == first
    assert catalog.resolve_snapshot("child") == own
    refuses(Conflict, catalog.restore_rows, [], [], rows[:1], says=(first.id,))
    more = replace(follow(own), state=SnapshotState.STORED, tree=TREES[0])
    catalog.restore_rows([], [], [])
    catalog.restore_rows([], [one := fork(own, child, head=more.id)], [SnapshotRow(replace(more, trajectory=one.id))])  # on what is here
    assert catalog.get_trajectory(one.id) == one


def tags_move_only_when_told(catalog: Catalog) -> None:
    _, first = started(catalog)
    second = committed(catalog, first)
    catalog.tag(first.id, "b")
    catalog.tag(first.id, "a.1-x_y")
    catalog.tag(first.id, "b")  # has it already
    assert catalog.get_snapshot(first.id).tags == ("a.1-x_y", "b")
    refuses(
        Conflict,
        catalog.tag,
        second.id,
        "b",
        says=(
            "b",
            first.id[:12],
        ),
    )
    catalog.tag(second.id, "b", move=True)
    assert catalog.resolve_snapshot("b").id == second.id
    catalog.untag("b")
    refuses(NotFound, catalog.untag, "b", says=("b",))
    for name in ("", "-x", "a/b", "a b", "x" * 65, "é", "a\n"):
        refuses(UsageError, catalog.tag, first.id, name)
    refuses(NotFound, catalog.tag, SnapshotID(new_id()), "c")
    assert catalog.get_snapshot(first.id).tags == ("a.1-x_y",)


def references_are_found_in_order(catalog: Catalog) -> None:
    trajectory, first = started(catalog, "run")
    second = committed(catalog, first)
    child = fork(first, trajectory, "child")
    catalog.add_trajectories([(child, None)])
    assert catalog.resolve_snapshot("run") == second
    assert catalog.resolve_snapshot("child") == first  # its head, which is its origin
    assert catalog.resolve_trajectory("child").id == child.id
    assert catalog.resolve_snapshot(child.id[:12]) == first
    assert catalog.resolve_snapshot(trajectory.id[:12]) == second
    assert catalog.resolve_snapshot(first.id[:12]) == first
    assert catalog.resolve_trajectory(first.id[:12]).id == trajectory.id
    assert catalog.resolve_trajectory(trajectory.id).id == trajectory.id
    catalog.tag(first.id, "child")
    catalog.tag(first.id, second.id[:12])
    assert catalog.resolve_snapshot(second.id[:12]).id == first.id  # a tag wins over a prefix
    assert catalog.resolve_snapshot("child").id == first.id
    assert catalog.resolve_trajectory("child").id == child.id  # here a name wins over a tag
    assert catalog.resolve_trajectory(second.id[:12]).id == trajectory.id
    for ref in ("", "run%", "abc", first.id[:3], "run ", "RUN", first.id + "0"):
        refuses(NotFound, catalog.resolve_snapshot, ref)
        refuses(NotFound, catalog.resolve_trajectory, ref)


def ambiguous_prefixes_list_candidates(catalog: Catalog) -> None:
    _, parent = started(catalog)
    for n in range(7):
        parent = committed(catalog, parent, id=SnapshotID(f"abcd{n}" + "0" * 27))
    image = make_image("x")
    catalog.add_image(image)
    trajectory, first = begin(image)
    trajectory = replace(trajectory, id=TrajectoryID("abcd6" + "f" * 27))
    catalog.add_trajectories([(trajectory, replace(first, trajectory=trajectory.id))])
    for find in (catalog.resolve_snapshot, catalog.resolve_trajectory):
        refuses(
            Ambiguous,
            find,
            "abcd",
            says=(
                "abcd00000000",
                "abcd40000000",
                "...",
            ),
        )
        refuses(
            Ambiguous,
            find,
            "abcd6",
            says=(
                "abcd60000000",
                "abcd6fffffff",
            ),
        )
    assert catalog.resolve_snapshot("abcd3").id == "abcd3" + "0" * 27
    assert catalog.resolve_trajectory("abcd6f").id == trajectory.id


def everything_referenced_is_listed(catalog: Catalog) -> None:
    _, first = started(catalog)
    blobs = [BlobID(digit * 64) for digit in "123"]
    call = make_call(output=blobs[0], stdout=None, stderr=blobs[1])
    second = committed(catalog, first, call=call)
    third = committed(catalog, second, stack=Stack(second.stack.image, (LayerID("merged"),)))
    assert catalog.referenced_layers() == {*second.stack.layers, *third.stack.layers}
    assert catalog.referenced_blobs() == {blobs[0], blobs[1], first.call.output, first.call.stdout, first.call.stderr}


def long_conversations_stream(catalog: Catalog) -> None:
    _, head = started(catalog)
    total = 0
    for batch in range(30):
        texts = [f"{batch}:{n} " + "x" * (100_000 if batch == 7 else 10) for n in range(50)]
        head = committed(catalog, head, *texts)
        total += len(texts)
    stream = catalog.conversation(head.id)
    assert next(stream).content.startswith("0:0 ")
    committed(catalog, head, "a later one is not part of it")  # writing goes on while somebody reads
    assert sum(1 for _ in stream) == total - 1


def a_trajectory_removed_while_it_is_read_is_not_cut_short(catalog: Catalog) -> None:
    trajectory, head = started(catalog)
    head = committed(catalog, head, *("x" * 10_000 for _ in range(1000)))
    stream = catalog.conversation(head.id)
    next(stream)
    catalog.remove_trajectory(trajectory.id)
    refuses(NotFound, list, stream)


def exactly_one_writer_wins_each_head(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    commits, threads = 250, 4
    wins: list[list[SnapshotID]] = [[] for _ in range(threads)]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            while len(wins[number]) < commits:
                head = catalog.get_snapshot(catalog.get_trajectory(trajectory.id).head)
                try:
                    wins[number].append(committed(catalog, head, str(number)).id)
                except Conflict:
                    continue
        except BaseException as exc:
            failures.append(exc)
            raise

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
    line = catalog.snapshots(trajectory.id)
    assert [one.seq for one in line] == list(range(commits * threads + 1))
    assert [one.parent for one in line[1:]] == [one.id for one in line[:-1]]
    assert {one.id for one in line[1:]} == {one for own in wins for one in own}
    assert len(list(catalog.conversation(line[-1].id))) == commits * threads
    assert line[0] == first


CHECKS: tuple[Callable[[Catalog], None], ...] = (
    meta_is_kept_and_replaced,
    images_round_trip_newest_first,
    an_image_takes_over_a_name,
    image_prefixes_are_checked,
    an_image_in_use_is_kept,
    trajectories_round_trip_oldest_first,
    trajectories_are_added_all_or_none,
    a_status_changes_and_keeps_the_exit_code,
    a_commit_binds_everything,
    a_stale_writer_is_refused,
    a_refused_message_leaves_nothing,
    hostile_text_is_kept_exactly,
    optional_fields_stay_empty,
    a_fork_goes_on_from_its_origin,
    a_fork_can_bring_its_own_first_snapshot,
    removal_waits_for_forks,
    counts_and_states_can_come_later,
    bases_are_kept_and_states_follow_the_archive,
    pruning_gives_up_stored_trees_only,
    trees_records_and_unstored_blobs_are_listed,
    what_a_repair_found_gone_can_be_recorded,
    all_tags_are_listed,
    the_newest_can_be_listed_alone,
    own_messages_are_those_a_snapshot_added,
    a_base_elsewhere_holds_until_its_user_is_stored,
    rows_are_restored_as_they_were,
    tags_move_only_when_told,
    references_are_found_in_order,
    ambiguous_prefixes_list_candidates,
    everything_referenced_is_listed,
    long_conversations_stream,
    a_trajectory_removed_while_it_is_read_is_not_cut_short,
    exactly_one_writer_wins_each_head,
)
