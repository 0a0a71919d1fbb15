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
    for find in (catalog.resolve_snapshot, catalog.resolve_trajectory, catalog.images.find, catalog.untag):
        refuses(NotFound, find, text)


def optional_fields_stay_empty(catalog: Catalog) -> None:
    _, first = started(catalog)
    call = make_call(exit_code=None, error=None, output=None, stdout=None, stderr=None, arguments=None)
    assert catalog.get_snapshot(committed(catalog, first, call=call).id).call == call


def counts_and_states_can_come_later(catalog: Catalog) -> None:
    _, first = started(catalog)
    second = committed(catalog, first)
    catalog.set_files(second.id, FileChanges(5, 6, 7, 1 << 40))
    catalog.set_state([first.id, second.id, SnapshotID(new_id())], SnapshotState.STORED)
    catalog.set_state(iter([first.id]), SnapshotState.LOST)
    catalog.set_files(SnapshotID(new_id()), FileChanges())
    assert catalog.get_snapshot(first.id) == replace(first, state=SnapshotState.LOST)
    assert catalog.get_snapshot(second.id) == replace(
        second, state=SnapshotState.STORED, files=FileChanges(5, 6, 7, 1 << 40)
    )


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
    catalog.set_stored(merged.id, TREES[0], RECORDS[0], ("one", "two\n\ud800"))
    assert catalog.get_snapshot(merged.id).warnings == ("one", "two\n\ud800")
    assert catalog.get_snapshot(second.id).warnings == ()
    catalog.set_state([merged.id], SnapshotState.LOST)
    catalog.set_stored(merged.id, TREES[0], RECORDS[0])  # and this time everything was recorded
    assert catalog.get_snapshot(merged.id).warnings == ()
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
    assert trees_of(catalog) == set()


def what_a_repair_found_gone_can_be_recorded(catalog: Catalog) -> None:
    _, first = started(catalog)
    kept, gone = BlobID("1" * 64), BlobID("2" * 64)
    second = committed(catalog, first, call=make_call(output=gone, stdout=kept, stderr=gone))
    third = committed(catalog, second, call=make_call(output=kept, stdout=gone, stderr=None))
    captured = committed(catalog, third, call=make_call(output=gone, stdout=None, stderr=None))
    for number, stored in enumerate((second, third)):
        catalog.set_stored(stored.id, TREES[number], RECORDS[number])
    catalog.forget_outputs({gone: 7, BlobID("3" * 64): 8})
    catalog.forget_outputs({gone: 7})
    lost = [DamagedOutput("output", gone, 7), DamagedOutput("stderr", gone, 7)]
    assert catalog.get_snapshot(second.id).call == replace(second.call, output=None, stderr=None, damaged=tuple(lost))
    assert catalog.get_snapshot(third.id).call == replace(
        third.call, stdout=None, damaged=(DamagedOutput("stdout", gone, 7),)
    )
    assert catalog.get_snapshot(captured.id) == captured, "its output is in the spool"
    catalog.forget_outputs({kept: None})
    assert catalog.get_snapshot(second.id).call.damaged == (*lost[:1], lost[1], DamagedOutput("stdout", kept, None))
    assert blobs_of(catalog) == {gone, *first.call.outputs}
    catalog.forget_outputs({gone: 9}, spooled=True)
    assert catalog.get_snapshot(captured.id).call.damaged == (DamagedOutput("output", gone, 9),)
    assert len(catalog.get_snapshot(second.id).call.damaged) == 3, "they had theirs from the repository"
    assert blobs_of(catalog) == set(first.call.outputs)
    catalog.set_record(second.id, RECORDS[1])
    catalog.set_record(SnapshotID(new_id()), RECORDS[2])  # gone meanwhile
    assert catalog.record(second.id) == RECORDS[1]
    assert catalog.referenced_records() == {RECORDS[1]}
    (copy,) = (
        replace(one, id=SnapshotID(new_id()), trajectory=TrajectoryID("e" * 32))
        for one in [catalog.get_snapshot(second.id)]
    )
    line = replace(
        catalog.get_trajectory(first.trajectory), id=copy.trajectory, name=None, head=copy.id, forked_from=first.id
    )
    catalog.restore_rows([], [line], [SnapshotRow(copy)])
    assert catalog.get_snapshot(copy.id) == copy
    catalog.remove_trajectory(line.id)


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


def exactly_one_writer_wins_each_head(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    commits, threads = long.size(60, 250), 4
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
