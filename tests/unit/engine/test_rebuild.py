"""The catalog from records: everything comes back, or what hangs together does and the rest is listed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapshotd.catalog.base import Catalog
from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.engine.storage.rebuild import Report, rebuild
from snapshotd.engine.storage.records import encode, encode_from, encode_tags
from snapshotd.errors import Conflict
from snapshotd.types import CallID, RecordID, Snapshot, SnapshotID, SnapshotState, TrajectoryStatus, TreeID, short
from tests import long
from tests.records import (
    CREATED_AT_NS,
    World,
    begin,
    blobs_of,
    committed,
    ended_entry,
    fork,
    make_entry,
    make_image,
    new_digest,
    started,
    trees_of,
)

Records = dict[RecordID, bytes]


@pytest.fixture
def old() -> Iterator[SqliteCatalog]:
    catalog = SqliteCatalog(":memory:")
    yield catalog
    catalog.close()


@pytest.fixture
def new() -> Iterator[SqliteCatalog]:
    catalog = SqliteCatalog(":memory:")
    yield catalog
    catalog.close()


def record_of(catalog: Catalog, snapshot: Snapshot) -> tuple[RecordID, bytes]:
    record = catalog.snapshots.record(snapshot.id)
    assert record is not None
    image = catalog.images.find(snapshot.stack.image)
    return record, encode_from(catalog, snapshot, image)


def stored(catalog: Catalog, snapshot: Snapshot, records: Records) -> Snapshot:
    catalog.snapshots.set_stored(snapshot.id, TreeID(new_digest()), RecordID(new_digest()))
    snapshot = catalog.snapshots.get(snapshot.id)
    records.update([record_of(catalog, snapshot)])
    return snapshot


def visible(catalog: Catalog) -> dict[str, Any]:
    """All that anybody can ask a catalog; where a trajectory's run stands is left out, because no record tells."""
    snapshots = list(catalog.snapshots.all())
    trajectories = catalog.trajectories.list()
    used = {one.stack.image for one in snapshots} | {one.spec.image for one in trajectories}
    return {
        "images": [one for one in catalog.images.list() if one.id in used],
        "trajectories": [replace(one, status=TrajectoryStatus.STOPPED, exit_code=None) for one in trajectories],
        "snapshots": snapshots,
        "own": {one.id: catalog.snapshots.of_trajectory(one.id) for one in trajectories},
        "records": {one.id: catalog.snapshots.record(one.id) for one in snapshots},
        "said": {
            one.id: (catalog.conversations.own(one.id), list(catalog.conversations.read(one.id))) for one in snapshots
        },
        "journal": {one.id: list(catalog.journal.read(one.id)) for one in snapshots},
        "numbers": {one.id: [entry.number for entry in catalog.journal.own(one.id)] for one in snapshots},
        "state": {
            one.id: (catalog.conversations.own_state(one.id), catalog.conversations.state(one.id)) for one in snapshots
        },
        "named": {one.name: catalog.refs.find_trajectory(one.name).id for one in trajectories if one.name},
        "tagged": {tag: catalog.refs.find_snapshot(tag).id for one in snapshots for tag in one.tags},
        "layers": catalog.snapshots.referenced_layers(),
        "blobs": blobs_of(catalog),
        "trees": trees_of(catalog),
        "all records": catalog.snapshots.referenced_records(),
        "unstored": catalog.snapshots.unstored(),
    }


def history(catalog: Catalog, seed: int, steps: int) -> tuple[World, Records]:
    """A random world in which everything is stored, some of it pruned or lost again, and all records that were ever
    written."""
    rng = random.Random(seed)
    world, records = World(catalog, rng), Records()
    waiting: list[Snapshot] = []
    for snapshot in world.grow(steps):
        waiting.append(snapshot)
        if rng.random() < 0.4:  # the archive catches up, with the facts of that time
            records.update(record_of(catalog, world.store(one)) for one in waiting)
            waiting.clear()
        if rng.random() < 0.2:
            records[RecordID(new_digest())] = encode_tags(world.tags(), snapshot.created_at_ns)
    records.update(record_of(catalog, world.store(one)) for one in waiting)
    for one in rng.sample(world.all, len(world.all) // 5):
        catalog.snapshots.set_pruned([one.id])
        if catalog.snapshots.get(one.id).state is SnapshotState.PRUNED:
            records[RecordID(new_digest())] = records[record_of(catalog, catalog.snapshots.get(one.id))[0]]  # twice
            records.update([record_of(catalog, catalog.snapshots.get(one.id))])
    records[RecordID(new_digest())] = encode_tags(world.tags(), CREATED_AT_NS + 10**18)
    return world, records


@pytest.mark.parametrize("seed", range(long.size(3, 12)))
def test_a_random_world_is_equal_in_every_visible_respect(old: SqliteCatalog, new: SqliteCatalog, seed: int) -> None:
    world, records = history(old, seed, 150)
    items = list(records.items()) * 2
    random.Random(seed).shuffle(items)
    report = rebuild(iter(items), new)
    before, after = visible(old), visible(new)
    for part in before:
        assert after[part] == before[part], part
    assert report == Report(len(after["images"]), len(after["trajectories"]), 150, len(world.tags()))
    for trajectory in new.trajectories.list():
        assert trajectory.status is (TrajectoryStatus.INTERRUPTED if trajectory.agent else TrajectoryStatus.STOPPED)


@pytest.mark.parametrize("seed", range(3))
def test_a_rebuilt_catalog_goes_on(old: SqliteCatalog, new: SqliteCatalog, seed: int) -> None:
    _, records = history(old, seed, 60)
    rebuild(records.items(), new)
    for trajectory in new.trajectories.list():
        head = committed(new, new.snapshots.get(trajectory.head), "more", trajectory=trajectory.id)
        assert [message.content for message in new.conversations.own(head.id)] == ["more"]
    with pytest.raises(Conflict, match="holds trajectories"):
        rebuild(records.items(), new)


@settings(max_examples=long.size(8, 400), deadline=None)
@given(st.integers(0, 1 << 30), st.data())
def test_what_hangs_together_comes_back_whatever_is_gone(seed: int, data: st.DataObject) -> None:
    old, new, mirrored = (SqliteCatalog(":memory:") for _ in range(3))
    world, records = history(old, seed, 40)
    rng = random.Random(seed)
    damaged = {}
    for record_id in rng.sample(sorted(records), data.draw(st.integers(0, 12))):
        if rng.random() < 0.5:
            del records[record_id]
        else:
            damaged[record_id] = records.pop(record_id)[:-1]
    items = list({**records, **damaged}.items())
    report = rebuild(items, new)
    rng.shuffle(items)
    assert rebuild(items, mirrored) == report, "the order makes no difference"
    assert visible(mirrored) == visible(new)
    assert {record_id for record_id, _ in report.unreadable} == set(damaged)
    here = {one.id: one for one in new.snapshots.all()}
    for one in world.all:
        readable = (
            old.snapshots.record(one.id) in records
            or any(one.id == out.snapshot for out in report.left_out)
            or one.id in here
        )
        whole = {one.parent, one.follows} - {None} <= here.keys()
        if one.id in here:
            assert whole
            assert list(new.conversations.read(one.id)) == list(old.conversations.read(one.id))
            assert list(new.journal.read(one.id)) == list(old.journal.read(one.id))
            assert new.conversations.state(one.id) == old.conversations.state(one.id)
            assert replace(here[one.id].call) == one.call
            assert here[one.id].base in (one.base, None)
        else:
            assert not (whole and readable), "it hangs together, and was left out"
    assert not here.keys() & {out.snapshot for out in report.left_out}
    assert report.snapshots == len(here)
    for catalog in (old, new, mirrored):
        catalog.close()


def test_a_fork_of_what_is_missing_is_listed_with_its_trees(old: SqliteCatalog, new: SqliteCatalog) -> None:
    records = Records()
    trajectory, first = started(old, "line")
    first = stored(old, first, records)
    second = stored(old, committed(old, first, "1"), records)
    third = stored(old, committed(old, second, "2"), records)
    early, late = fork(first, trajectory, "early"), fork(second, trajectory, "late")
    old.trajectories.add([(early, None), (late, None)])
    kept = stored(old, committed(old, first, "A", trajectory=early.id), records)
    gone = stored(old, committed(old, second, "B", trajectory=late.id), records)
    old.refs.tag(first.id, "good")
    old.refs.tag(gone.id, "bad")
    records[RecordID("f" * 64)] = encode_tags({"good": first.id, "bad": gone.id}, 5)
    records[RecordID("e" * 64)] = encode_tags({"good": gone.id, "older": first.id}, 4)
    damaged = old.snapshots.record(second.id)
    assert damaged is not None
    records[damaged] = b"{" + records[damaged]
    report = rebuild(records.items(), new)
    assert [one.id for one in new.snapshots.all()] == [first.id, kept.id]
    assert new.refs.find_trajectory("line").head == first.id
    assert [(out.snapshot, out.trajectory, out.seq, out.tree, out.record) for out in report.left_out] == sorted(
        [(one.id, one.trajectory, one.seq, one.tree, old.snapshots.record(one.id)) for one in (third, gone)],
        key=lambda out: out[1],
    )
    assert all(short(second.id) in out.reason and "no readable record" in out.reason for out in report.left_out)
    assert [record_id for record_id, _ in report.unreadable] == [damaged]
    assert (report.snapshots, report.trajectories, report.images, report.tags, report.dropped_tags) == (
        2,
        2,
        1,
        1,
        ("bad",),
    )
    assert new.refs.find_snapshot("good").id == first.id


def test_what_follows_something_left_out_is_left_out(old: SqliteCatalog, new: SqliteCatalog) -> None:
    records = Records()
    _, first = started(old)
    line = [stored(old, first, records)]
    for _ in range(4):
        line.append(stored(old, committed(old, line[-1]), records))
    record = old.snapshots.record(line[1].id)
    assert record is not None
    del records[record]
    report = rebuild(records.items(), new)
    assert [out.seq for out in report.left_out] == [2, 3, 4]
    assert report.left_out[2].reason == f"its parent {short(line[3].id)} could not come back"


def test_trees_that_are_gone_make_lost_snapshots(old: SqliteCatalog, new: SqliteCatalog) -> None:
    records = Records()
    trajectory, first = started(old)
    old.images.set_tree(trajectory.spec.image, TreeID("9" * 64))
    first = stored(old, first, records)
    second = stored(old, committed(old, first), records)
    report = rebuild(records.items(), new, has_tree=lambda tree: tree == second.tree)
    assert report.lost == (first.id,)
    assert new.snapshots.get(first.id) == replace(first, state=SnapshotState.LOST, tree=None)
    assert new.snapshots.get(second.id) == second
    assert new.images.find(trajectory.spec.image).tree is None


def test_a_name_that_two_had_in_turn_goes_to_the_newer(old: SqliteCatalog, new: SqliteCatalog) -> None:
    records = Records()
    image = make_image()
    old.images.add(image)
    ids = []
    for n in range(3):
        trajectory, first = begin(image, "same", created_at_ns=CREATED_AT_NS + 3 - n)
        old.trajectories.add([(trajectory, first)])
        stored(old, first, records)
        old.trajectories.remove(trajectory.id)
        ids.append(trajectory.id)
    report = rebuild(records.items(), new)
    assert new.refs.find_trajectory("same").id == ids[0]
    assert sorted(report.unnamed) == sorted((one, "same") for one in ids[1:])
    assert report.trajectories == 3


def test_a_name_that_is_a_tag_too_stays_the_tags(old: SqliteCatalog, new: SqliteCatalog) -> None:
    """A removed trajectory that comes back may bear the name of a tag that was given since."""
    records = Records()
    image = make_image()
    old.images.add(image)
    removed, first = begin(image, "best")
    old.trajectories.add([(removed, first)])
    stored(old, first, records)
    old.trajectories.remove(removed.id)
    line, second = begin(image, "line")
    old.trajectories.add([(line, second)])
    stored(old, second, records)
    old.refs.tag(second.id, "best")
    records[RecordID("e" * 64)] = encode_tags(old.refs.tags(), CREATED_AT_NS)
    report = rebuild(records.items(), new)
    assert new.refs.find_snapshot("best").id == second.id
    assert report.unnamed == ((removed.id, "best"),)
    assert new.trajectories.get(removed.id).name is None


def test_an_image_that_is_there_gets_its_tree(old: SqliteCatalog, new: SqliteCatalog) -> None:
    records = Records()
    trajectory, first = started(old)
    image = old.images.find(trajectory.spec.image)
    new.images.add(replace(image, name="mine"))
    old.images.set_tree(image.id, TreeID("9" * 64))
    stored(old, first, records)
    rebuild(records.items(), new)
    assert new.images.list() == [replace(image, name="mine", tree=TreeID("9" * 64))]


def test_a_name_once_lost_is_not_found_again(old: SqliteCatalog, new: SqliteCatalog) -> None:
    """The image that took it is gone, and the record before that still tells of it."""
    records = Records()
    trajectory, first = started(old)
    image = old.images.find(trajectory.spec.image)
    first = stored(old, first, records)
    taker = make_image(image.name)
    old.images.add(taker)
    stored(old, committed(old, first, created_at_ns=first.created_at_ns + 1), records)
    old.images.remove(taker.id)
    rebuild(records.items(), new)
    assert new.images.list() == old.images.list()
    assert new.images.list()[0].name == ""


def hostile(records: Records, old: Catalog, snapshot: Snapshot, **fields: Any) -> Snapshot:
    """One more record, made by hand."""
    trajectory, image = old.trajectories.get(snapshot.trajectory), old.images.find(snapshot.stack.image)
    changed = replace(snapshot, id=SnapshotID(new_digest()[:32]), **fields)
    trajectory = replace(trajectory, id=changed.trajectory)
    records[RecordID(new_digest())] = encode(changed, trajectory, image, ())
    return changed


def test_records_that_contradict_each_other_do_no_harm(old: SqliteCatalog, new: SqliteCatalog) -> None:
    records = Records()
    _, first = started(old)
    first = stored(old, first, records)
    second = stored(old, committed(old, first, "1"), records)
    wrong = [
        hostile(records, old, second, created_at_ns=second.created_at_ns + 1),  # a second child in the line
        hostile(records, old, first, parent=None, created_at_ns=first.created_at_ns + 1),  # a second beginning
        hostile(records, old, second, parent=second.id, seq=7),  # seq jumps
        hostile(records, old, second, parent=second.id, seq=2, messages=5),  # messages are missing
        hostile(records, old, second, parent=SnapshotID("d" * 32)),  # from nowhere
        hostile(
            records, old, second, parent=first.id, trajectory=make_image().id
        ),  # begins in a line it was not forked from
    ]
    report = rebuild(records.items(), new)
    assert {out.snapshot for out in report.left_out} == {one.id for one in wrong}
    assert list(new.snapshots.all()) == [first, second]
    assert [one.head for one in new.trajectories.list()] == [second.id]


def test_what_follows_something_missing_is_left_out(old: SqliteCatalog, new: SqliteCatalog) -> None:
    records = Records()
    trajectory, first = started(old)
    first = stored(old, first, records)
    second = stored(old, committed(old, first, "1"), records)
    other, begun = begin(old.images.find(trajectory.spec.image), began=second.id)
    old.trajectories.add([(other, begun)])
    begun = stored(old, begun, records)
    rewound = stored(old, committed(old, begun, "2", after=second), records)
    record = old.snapshots.record(second.id)
    assert record is not None
    damaged = records.pop(record)
    report = rebuild(records.items(), new)
    assert [(out.snapshot, out.reason) for out in report.left_out] == [
        (rewound.id, f"what it follows, {short(second.id)} has no readable record")
    ]
    assert new.trajectories.get(other.id).began is None, "the snapshot where its program began is gone"
    whole = SqliteCatalog(":memory:")
    assert not rebuild({**records, record: damaged}.items(), whole).left_out
    assert [message.content for message in whole.conversations.read(rewound.id)] == ["1", "2"]
    assert whole.trajectories.get(other.id).began == second.id
    whole.close()


def test_journals_that_contradict_each_other_do_no_harm(old: SqliteCatalog, new: SqliteCatalog) -> None:
    records = Records()
    _, first = started(old)
    entry = ended_entry(first)
    second = stored(old, committed(old, first, entries=[entry]), records)
    stored(old, first, records)
    trajectory, image = old.trajectories.get(first.trajectory), old.images.find(first.stack.image)
    again = replace(second, id=SnapshotID("a" * 32), parent=second.id, seq=2, base=second.id)
    after = replace(again, id=SnapshotID("c" * 32), parent=second.id)
    stolen = replace(entry, snapshot=again.id, number=1)
    records[RecordID(new_digest())] = encode(again, trajectory, image, (), entries=(stolen,))
    same_place = ended_entry(second, id=CallID("b" * 32), number=0, snapshot=after.id)
    records[RecordID(new_digest())] = encode(after, trajectory, image, (), entries=(same_place,))
    report = rebuild(records.items(), new)
    assert [(out.snapshot, out.reason) for out in report.left_out] == [
        (again.id, "its journal has a call that another snapshot has")
    ]
    assert [one.id for one in new.journal.read(after.id)] == [entry.id, same_place.id]
    new.journal.begin(trajectory.id, make_entry(after))


def test_a_circle_of_records_ends(old: SqliteCatalog, new: SqliteCatalog) -> None:
    records = Records()
    _, first = started(old)
    first = stored(old, first, records)
    one = hostile(records, old, first, parent=SnapshotID("d" * 32), seq=1)
    trajectory, image = old.trajectories.get(first.trajectory), old.images.find(first.stack.image)
    other = replace(first, id=SnapshotID("d" * 32), parent=one.id, seq=2, base=one.id)
    records[RecordID(new_digest())] = encode(other, trajectory, image, ())
    report = rebuild(records.items(), new)
    assert {out.snapshot for out in report.left_out} == {one.id, other.id}
    assert list(new.snapshots.all()) == [first]


def test_nothing_makes_an_empty_catalog(new: SqliteCatalog) -> None:
    assert rebuild([], new) == Report(0, 0, 0, 0)
    report = rebuild([(RecordID("a" * 64), b"junk"), (RecordID("a" * 64), b"junk")], new)
    assert len(report.unreadable) == 1
    assert visible(new)["snapshots"] == []
