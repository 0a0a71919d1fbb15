"""What every catalog must do: commits, and what happens to a snapshot later. See catalog.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from snapshotd.catalog.base import Catalog, SnapshotRow
from snapshotd.errors import Conflict, LimitExceeded, NotFound, UsageError
from snapshotd.types import (
    BlobID,
    DamagedOutput,
    FileChanges,
    Message,
    RecordID,
    Snapshot,
    SnapshotID,
    SnapshotState,
    TrajectoryID,
    TreeID,
    new_id,
)
from tests import long
from tests.contracts.refusal import refuses
from tests.records import blobs_of, committed, follow, fork, make_call, started, trees_of

TREES = [TreeID(f"{n:064x}") for n in range(3)]
RECORDS = [RecordID(f"{n:064x}") for n in range(10, 13)]


def a_commit_binds_everything(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    snapshot = follow(first, messages=2, files=FileChanges(1, 2, 3, 4), method="copy")
    said = [Message("user", {"text": "hi \u2028 \x00", "n": [1, 2.5, None, True]}), Message("assistant", None)]
    catalog.snapshots.commit(snapshot, said, expected_head=first.id)
    assert catalog.snapshots.get(snapshot.id) == snapshot
    assert catalog.trajectories.get(trajectory.id).head == snapshot.id
    assert list(catalog.conversations.read(snapshot.id)) == said
    assert catalog.snapshots.of_trajectory(trajectory.id) == [first, snapshot]
    assert list(catalog.snapshots.all()) == [first, snapshot]


def a_stale_writer_is_refused(catalog: Catalog) -> None:

    def commit(snapshot: Snapshot, said: list[Message], head: SnapshotID) -> None:
        catalog.snapshots.commit(snapshot, said, expected_head=head)

    trajectory, first = started(catalog)
    second = committed(catalog, first, "one")
    late = follow(first, messages=1)
    refuses(Conflict, commit, late, [Message("user", "late")], first.id, says=(second.id[:12],))
    refuses(NotFound, catalog.snapshots.get, late.id)
    assert [message.content for message in catalog.conversations.read(second.id)] == ["one"]
    assert catalog.trajectories.get(trajectory.id).head == second.id
    stray = follow(second, TrajectoryID(new_id()))
    refuses(NotFound, commit, stray, [], second.id)


def a_refused_message_leaves_nothing(catalog: Catalog) -> None:

    def commit(snapshot: Snapshot, said: list[Message], head: SnapshotID) -> None:
        catalog.snapshots.commit(snapshot, said, expected_head=head)

    trajectory, first = started(catalog)
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    for error, content in (
        (UsageError, float("nan")),
        (UsageError, b"bytes"),
        (UsageError, {1, 2}),
        (LimitExceeded, deep),
    ):
        snapshot = follow(first, messages=2)
        said = [Message("user", "fine"), Message("user", content)]
        refuses(error, commit, snapshot, said, first.id)
        refuses(error, commit, follow(first, call=make_call(arguments=content)), [], first.id)
    assert catalog.snapshots.of_trajectory(trajectory.id) == [first]
    assert list(catalog.conversations.read(first.id)) == []


def hostile_text_is_kept_exactly(catalog: Catalog) -> None:
    _, first = started(catalog)
    text = "\ud800 \x00\x1b[31m '; DROP TABLE snapshots; -- \U0001f600"
    call = make_call(text, error=text, arguments={text: [text]})
    snapshot = follow(first, messages=1, call=call)
    catalog.snapshots.commit(snapshot, [Message(text, text)], expected_head=first.id)
    assert catalog.snapshots.get(snapshot.id).call == call
    assert list(catalog.conversations.read(snapshot.id)) == [Message(text, text)]
    for find in (catalog.refs.find_snapshot, catalog.refs.find_trajectory, catalog.images.find, catalog.refs.untag):
        refuses(NotFound, find, text)


def optional_fields_stay_empty(catalog: Catalog) -> None:
    _, first = started(catalog)
    call = make_call(exit_code=None, error=None, output=None, stdout=None, stderr=None, arguments=None)
    assert catalog.snapshots.get(committed(catalog, first, call=call).id).call == call


def counts_and_states_can_come_later(catalog: Catalog) -> None:
    _, first = started(catalog)
    second = committed(catalog, first)
    catalog.snapshots.set_files(second.id, FileChanges(5, 6, 7, 1 << 40))
    catalog.snapshots.set_state([first.id, second.id, SnapshotID(new_id())], SnapshotState.STORED)
    catalog.snapshots.set_state(iter([first.id]), SnapshotState.LOST)
    catalog.snapshots.set_files(SnapshotID(new_id()), FileChanges())
    assert catalog.snapshots.get(first.id) == replace(first, state=SnapshotState.LOST)
    assert catalog.snapshots.get(second.id) == replace(
        second, state=SnapshotState.STORED, files=FileChanges(5, 6, 7, 1 << 40)
    )


def bases_are_kept_and_states_follow_the_archive(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    second = committed(catalog, first)
    rewound = committed(catalog, second, stack=first.stack, base=first.id, own_layers=0)
    merged = committed(catalog, rewound, base=None, own_layers=2)
    line = [first, second, rewound, merged]
    assert catalog.snapshots.of_trajectory(trajectory.id) == line
    assert catalog.snapshots.unstored() == [one.id for one in line]
    catalog.snapshots.set_stored(second.id, TREES[0], RECORDS[0])
    catalog.snapshots.set_stored(SnapshotID(new_id()), TREES[1], RECORDS[1])  # gone meanwhile
    assert catalog.snapshots.get(second.id) == replace(second, state=SnapshotState.STORED, tree=TREES[0])
    assert catalog.snapshots.record(second.id) == RECORDS[0]
    assert catalog.snapshots.record(first.id) is None
    assert catalog.snapshots.unstored() == [first.id, rewound.id, merged.id]
    catalog.snapshots.set_stored(second.id, TREES[1], RECORDS[1])  # is stored already
    assert catalog.snapshots.get(second.id).tree == TREES[0]
    catalog.snapshots.set_state([first.id, second.id], SnapshotState.LOST)
    assert catalog.snapshots.get(second.id) == replace(second, state=SnapshotState.LOST)
    catalog.snapshots.set_stored(second.id, TREES[2], RECORDS[2])  # a lost one can come back
    assert catalog.snapshots.get(second.id).tree == TREES[2]
    assert catalog.snapshots.unstored() == [rewound.id, merged.id]
    catalog.snapshots.set_stored(merged.id, TREES[0], RECORDS[0], ("one", "two\n\ud800"))
    assert catalog.snapshots.get(merged.id).warnings == ("one", "two\n\ud800")
    assert catalog.snapshots.get(second.id).warnings == ()
    catalog.snapshots.set_state([merged.id], SnapshotState.LOST)
    catalog.snapshots.set_stored(merged.id, TREES[0], RECORDS[0])  # and this time everything was recorded
    assert catalog.snapshots.get(merged.id).warnings == ()
    refuses(NotFound, catalog.snapshots.record, SnapshotID(new_id()))


def pruning_gives_up_stored_trees_only(catalog: Catalog) -> None:
    _, first = started(catalog)
    second = committed(catalog, first, "a")
    third = committed(catalog, second, "b")
    catalog.snapshots.set_stored(first.id, TREES[0], RECORDS[0])
    catalog.snapshots.set_stored(second.id, TREES[1], RECORDS[1])
    catalog.snapshots.set_state([second.id], SnapshotState.LOST)
    catalog.snapshots.set_pruned(iter([first.id, second.id, third.id, SnapshotID(new_id())]))
    assert catalog.snapshots.get(first.id) == replace(first, state=SnapshotState.PRUNED)
    assert catalog.snapshots.get(second.id).state is SnapshotState.LOST
    assert catalog.snapshots.get(third.id) == third
    catalog.snapshots.set_stored(first.id, TREES[2], RECORDS[2])
    assert catalog.snapshots.get(first.id).state is SnapshotState.PRUNED  # for good
    assert catalog.snapshots.record(first.id) == RECORDS[0]  # call and conversation are still there
    assert [message.content for message in catalog.conversations.read(third.id)] == ["a", "b"]
    assert trees_of(catalog) == set()


def what_a_repair_found_gone_can_be_recorded(catalog: Catalog) -> None:
    _, first = started(catalog)
    kept, gone = BlobID("1" * 64), BlobID("2" * 64)
    second = committed(catalog, first, call=make_call(output=gone, stdout=kept, stderr=gone))
    third = committed(catalog, second, call=make_call(output=kept, stdout=gone, stderr=None))
    captured = committed(catalog, third, call=make_call(output=gone, stdout=None, stderr=None))
    for number, stored in enumerate((second, third)):
        catalog.snapshots.set_stored(stored.id, TREES[number], RECORDS[number])
    catalog.snapshots.forget_outputs({gone: 7, BlobID("3" * 64): 8})
    catalog.snapshots.forget_outputs({gone: 7})
    lost = [DamagedOutput("output", gone, 7), DamagedOutput("stderr", gone, 7)]
    assert catalog.snapshots.get(second.id).call == replace(second.call, output=None, stderr=None, damaged=tuple(lost))
    assert catalog.snapshots.get(third.id).call == replace(
        third.call, stdout=None, damaged=(DamagedOutput("stdout", gone, 7),)
    )
    assert catalog.snapshots.get(captured.id) == captured, "its output is in the spool"
    catalog.snapshots.forget_outputs({kept: None})
    assert catalog.snapshots.get(second.id).call.damaged == (*lost[:1], lost[1], DamagedOutput("stdout", kept, None))
    assert blobs_of(catalog) == {gone, *first.call.outputs}
    catalog.snapshots.forget_outputs({gone: 9}, spooled=True)
    assert catalog.snapshots.get(captured.id).call.damaged == (DamagedOutput("output", gone, 9),)
    assert len(catalog.snapshots.get(second.id).call.damaged) == 3, "they had theirs from the repository"
    assert blobs_of(catalog) == set(first.call.outputs)
    catalog.snapshots.set_record(second.id, RECORDS[1])
    catalog.snapshots.set_record(SnapshotID(new_id()), RECORDS[2])  # gone meanwhile
    assert catalog.snapshots.record(second.id) == RECORDS[1]
    assert catalog.snapshots.referenced_records() == {RECORDS[1]}
    (copy,) = (
        replace(one, id=SnapshotID(new_id()), trajectory=TrajectoryID("e" * 32))
        for one in [catalog.snapshots.get(second.id)]
    )
    line = replace(
        catalog.trajectories.get(first.trajectory), id=copy.trajectory, name=None, head=copy.id, forked_from=first.id
    )
    catalog.others.restore([], [line], [SnapshotRow(copy)])
    assert catalog.snapshots.get(copy.id) == copy
    catalog.trajectories.remove(line.id)


def the_newest_can_be_listed_alone(catalog: Catalog) -> None:
    trajectory, head = started(catalog)
    line = [head, *(head := committed(catalog, head) for _ in range(9))]
    child = fork(line[3], trajectory)
    catalog.trajectories.add([(child, None)])
    assert catalog.snapshots.of_trajectory(child.id, 5) == []
    assert catalog.snapshots.count(child.id) == 0
    own = committed(catalog, line[3], trajectory=child.id)
    assert catalog.snapshots.of_trajectory(child.id, 5) == [own]
    for last in (0, 1, 4, 10, 11):
        assert catalog.snapshots.of_trajectory(trajectory.id, last) == line[10 - min(last, 10) :]
    assert (catalog.snapshots.count(trajectory.id), catalog.snapshots.count(child.id)) == (10, 1)
    for find in (catalog.snapshots.of_trajectory, catalog.snapshots.count):
        refuses(NotFound, find, TrajectoryID(new_id()))


def exactly_one_writer_wins_each_head(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    commits, threads = long.size(60, 250), 4
    wins: list[list[SnapshotID]] = [[] for _ in range(threads)]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            while len(wins[number]) < commits:
                head = catalog.snapshots.get(catalog.trajectories.get(trajectory.id).head)
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
    line = catalog.snapshots.of_trajectory(trajectory.id)
    assert [one.seq for one in line] == list(range(commits * threads + 1))
    assert [one.parent for one in line[1:]] == [one.id for one in line[:-1]]
    assert {one.id for one in line[1:]} == {one for own in wins for one in own}
    assert len(list(catalog.conversations.read(line[-1].id))) == commits * threads
    assert line[0] == first


CHECKS: tuple[Callable[[Catalog], None], ...] = (
    a_commit_binds_everything,
    a_stale_writer_is_refused,
    a_refused_message_leaves_nothing,
    hostile_text_is_kept_exactly,
    optional_fields_stay_empty,
    counts_and_states_can_come_later,
    bases_are_kept_and_states_follow_the_archive,
    pruning_gives_up_stored_trees_only,
    what_a_repair_found_gone_can_be_recorded,
    the_newest_can_be_listed_alone,
    exactly_one_writer_wins_each_head,
)
