"""What every catalog must do: tags, what people type, and what is referred to. See catalog.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from snapshotd.catalog.base import Catalog, SnapshotRow
from snapshotd.errors import Ambiguous, Conflict, NotFound, UsageError
from snapshotd.types import BlobID, ImageID, LayerID, RecordID, SnapshotID, Stack, TrajectoryID, TreeID, new_id
from tests.contracts.refusal import refuses
from tests.records import begin, blobs_of, committed, fork, make_call, make_image, started, trees_of

TREES = [TreeID(f"{n:064x}") for n in range(3)]
RECORDS = [RecordID(f"{n:064x}") for n in range(10, 13)]


def trees_records_and_unstored_blobs_are_listed(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    blobs = [BlobID(digit * 64) for digit in "12"]
    second = committed(catalog, first, call=make_call(output=blobs[0], stdout=None, stderr=blobs[1]))
    assert catalog.snapshots.unstored_blobs() == {first.call.output, first.call.stdout, first.call.stderr, *blobs}
    catalog.snapshots.set_stored(first.id, TREES[0], RECORDS[0])
    assert catalog.snapshots.unstored_blobs() == set(blobs)
    assert (trees_of(catalog), catalog.snapshots.referenced_records()) == ({TREES[0]}, {RECORDS[0]})
    catalog.images.set_tree(trajectory.spec.image, TREES[1])
    catalog.images.set_tree(ImageID(new_id()), TREES[2])  # gone meanwhile
    catalog.snapshots.set_stored(second.id, TREES[0], RECORDS[1])
    assert catalog.snapshots.unstored_blobs() == set()
    assert (trees_of(catalog), catalog.snapshots.referenced_records()) == (
        {TREES[0], TREES[1]},
        {RECORDS[0], RECORDS[1]},
    )
    assert catalog.images.find(trajectory.spec.image).tree == TREES[1]
    catalog.snapshots.set_pruned([first.id])
    catalog.trajectories.remove(trajectory.id)
    assert (trees_of(catalog), catalog.snapshots.referenced_records()) == ({TREES[1]}, set())


def all_tags_are_listed(catalog: Catalog) -> None:
    _, first = started(catalog)
    second = committed(catalog, first)
    assert catalog.refs.tags() == {}
    for name, snapshot in (("b", first), ("a", second), ("c", first)):
        catalog.refs.tag(snapshot.id, name)
    assert list(catalog.refs.tags().items()) == [("a", second.id), ("b", first.id), ("c", first.id)]


def tags_move_only_when_told(catalog: Catalog) -> None:
    _, first = started(catalog)
    second = committed(catalog, first)
    catalog.refs.tag(first.id, "b")
    catalog.refs.tag(first.id, "a.1-x_y")
    catalog.refs.tag(first.id, "b")  # has it already
    assert catalog.snapshots.get(first.id).tags == ("a.1-x_y", "b")
    refuses(Conflict, catalog.refs.tag, second.id, "b", says=("b", first.id[:12]))
    catalog.refs.tag(second.id, "b", move=True)
    assert catalog.refs.find_snapshot("b").id == second.id
    catalog.refs.untag("b")
    refuses(NotFound, catalog.refs.untag, "b", says=("b", "snapshotd tag --list"))
    for name in ("", "-x", "a/b", "a b", "x" * 65, "é", "a\n"):
        refuses(UsageError, catalog.refs.tag, first.id, name)
    refuses(NotFound, catalog.refs.tag, SnapshotID(new_id()), "c")
    assert catalog.snapshots.get(first.id).tags == ("a.1-x_y",)


def references_are_found_in_order(catalog: Catalog) -> None:
    trajectory, first = started(catalog, "run")
    second = committed(catalog, first)
    child = fork(first, trajectory, "child")
    catalog.trajectories.add([(child, None)])
    assert catalog.refs.find_snapshot("run") == second
    assert catalog.refs.find_snapshot("child") == first  # its head, which is its origin
    assert catalog.refs.find_trajectory("child").id == child.id
    assert catalog.refs.find_snapshot(child.id[:12]) == first
    assert catalog.refs.find_snapshot(trajectory.id[:12]) == second
    assert catalog.refs.find_snapshot(first.id[:12]) == first
    assert catalog.refs.find_trajectory(first.id[:12]).id == trajectory.id
    assert catalog.refs.find_trajectory(trajectory.id).id == trajectory.id
    for ref in ("", "run%", "xyz", "run ", "RUN", first.id + "0"):
        refuses(NotFound, catalog.refs.find_snapshot, ref)
        refuses(NotFound, catalog.refs.find_trajectory, ref)


def a_tag_and_a_trajectory_never_share_a_name(catalog: Catalog) -> None:
    trajectory, first = started(catalog, "run")
    second = committed(catalog, first)
    for snapshot, move in ((first, False), (first, True), (second, False)):
        refuses(
            Conflict, lambda s=snapshot, m=move: catalog.refs.tag(s.id, "run", move=m), says=("run", trajectory.id[:12])
        )
    catalog.refs.tag(first.id, "best")
    image = catalog.images.find(trajectory.spec.image)
    other, begun = begin(image, "best")
    refuses(
        Conflict,
        catalog.trajectories.add,
        [(other, begun)],
        says=("best", first.id[:12], "snapshotd tag --delete best"),
    )
    refuses(Conflict, catalog.trajectories.add, [(fork(first, trajectory, "best"), None)], says=("best",))
    refuses(Conflict, catalog.others.restore, [], [other], [SnapshotRow(begun)], says=("best",))
    named, begun = begin(image, "new")
    refuses(
        Conflict,
        catalog.others.restore,
        [],
        [named],
        [SnapshotRow(replace(begun, tags=("new",)))],
        says=("new", named.id[:12]),
    )
    refuses(
        Conflict,
        catalog.others.restore,
        [],
        [named],
        [SnapshotRow(replace(begun, tags=("run",)))],
        says=("run", trajectory.id[:12]),
    )
    assert catalog.trajectories.list() == [catalog.trajectories.get(trajectory.id)]
    assert catalog.refs.tags() == {"best": first.id}
    catalog.refs.untag("best")
    catalog.trajectories.add([(fork(first, trajectory, "best"), None)])  # the name is free again


def a_name_is_never_in_the_form_of_an_id(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    second = committed(catalog, first)
    image = catalog.images.find(trajectory.spec.image)
    for name in (second.id, second.id[:12], second.id[:4], "beef", "2026"):
        refuses(UsageError, catalog.refs.tag, first.id, name, says=(name, "id"))
        refuses(UsageError, catalog.refs.tag, first.id, f"{name}@1000", says=(name, "id"))
        refuses(UsageError, catalog.trajectories.add, [begin(image, name)], says=(name, "id"))
        refuses(UsageError, catalog.trajectories.add, [(fork(first, trajectory, name), None)], says=(name, "id"))
    for name in ("bee", "beef-1", "BEEF", "a" * 33):
        catalog.refs.tag(first.id, name)
    assert catalog.refs.find_snapshot(second.id).id == second.id


def an_exact_id_wins_over_a_name_that_an_older_version_took(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    second = committed(catalog, first)
    image = catalog.images.find(trajectory.spec.image)
    other, begun = begin(image, second.id)
    names = (first.id, second.id[:8], "feed")
    catalog.others.restore([], [other], [SnapshotRow(replace(begun, tags=names))])
    assert catalog.refs.find_snapshot(first.id).id == first.id
    assert catalog.refs.find_snapshot(second.id).id == second.id
    assert catalog.refs.find_trajectory(second.id).id == trajectory.id
    for find in (catalog.refs.find_snapshot, catalog.refs.find_trajectory):
        refuses(Ambiguous, find, second.id[:8], says=(second.id[:12], begun.id[:12], "snapshotd tag --delete"))
    assert catalog.refs.find_snapshot("feed").id == begun.id  # no id begins with it
    assert catalog.refs.find_snapshot(second.id[:9]).id == second.id


def users_who_are_not_root_have_names_of_their_own(catalog: Catalog) -> None:
    _, first = started(catalog)
    second = committed(catalog, first)
    third = committed(catalog, second)
    for snapshot, name in ((first, "best@1000"), (second, "best@1001"), (third, "best")):
        catalog.refs.tag(snapshot.id, name)
    assert [catalog.refs.find_snapshot(name).id for name in ("best@1000", "best@1001", "best")] == [
        first.id,
        second.id,
        third.id,
    ]
    for name in ("best@", "best@x", "@1000", "best@1000@1", "best@01000000000"):
        refuses(UsageError, catalog.refs.tag, first.id, name)


def ambiguous_prefixes_list_candidates(catalog: Catalog) -> None:
    _, parent = started(catalog)
    for n in range(7):
        parent = committed(catalog, parent, id=SnapshotID(f"abcd{n}" + "0" * 27))
    image = make_image("x")
    catalog.images.add(image)
    trajectory, first = begin(image)
    trajectory = replace(trajectory, id=TrajectoryID("abcd6" + "f" * 27))
    catalog.trajectories.add([(trajectory, replace(first, trajectory=trajectory.id))])
    for find in (catalog.refs.find_snapshot, catalog.refs.find_trajectory):
        refuses(Ambiguous, find, "abcd", says=("abcd00000000", "abcd40000000", "..."))
        refuses(Ambiguous, find, "abcd6", says=("abcd60000000", "abcd6fffffff"))
    assert catalog.refs.find_snapshot("abcd3").id == "abcd3" + "0" * 27
    assert catalog.refs.find_trajectory("abcd6f").id == trajectory.id


def a_prefix_that_is_too_short_is_told_from_what_is_not_there(catalog: Catalog) -> None:
    image = replace(make_image("deb"), id=ImageID("abc" + "1" * 29))
    catalog.images.add(image)
    trajectory, first = begin(image, "box")
    trajectory = replace(trajectory, id=TrajectoryID("3c2" + "f" * 29), head=SnapshotID("5" * 32))
    catalog.trajectories.add([(trajectory, replace(first, id=trajectory.head, trajectory=trajectory.id))])
    for find in (catalog.refs.find_snapshot, catalog.refs.find_trajectory):
        refuses(Ambiguous, find, "3c2", says=("3c2ffffffff", "too short", "at least 4"))
        refuses(NotFound, find, "3c1", says=("3c1",))
        refuses(NotFound, find, "", says=("there is no",))
    refuses(Ambiguous, catalog.images.find, "abc", says=("abc11111111", "too short"))
    assert catalog.images.find("deb").id == image.id
    assert catalog.refs.find_trajectory("box").id == trajectory.id


def everything_referenced_is_listed(catalog: Catalog) -> None:
    _, first = started(catalog)
    blobs = [BlobID(digit * 64) for digit in "123"]
    call = make_call(output=blobs[0], stdout=None, stderr=blobs[1])
    second = committed(catalog, first, call=call)
    third = committed(catalog, second, stack=Stack(second.stack.image, (LayerID("merged"),)))
    assert catalog.snapshots.referenced_layers() == {*second.stack.layers, *third.stack.layers}
    assert blobs_of(catalog) == {blobs[0], blobs[1], first.call.output, first.call.stdout, first.call.stderr}


CHECKS: tuple[Callable[[Catalog], None], ...] = (
    trees_records_and_unstored_blobs_are_listed,
    all_tags_are_listed,
    tags_move_only_when_told,
    references_are_found_in_order,
    a_tag_and_a_trajectory_never_share_a_name,
    a_name_is_never_in_the_form_of_an_id,
    an_exact_id_wins_over_a_name_that_an_older_version_took,
    users_who_are_not_root_have_names_of_their_own,
    ambiguous_prefixes_list_candidates,
    a_prefix_that_is_too_short_is_told_from_what_is_not_there,
    everything_referenced_is_listed,
)
