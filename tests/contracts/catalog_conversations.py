"""What every catalog must do: conversations across forks. See catalog.py."""

from __future__ import annotations

from collections.abc import Callable

from snapshotd.catalog.base import Catalog
from snapshotd.errors import NotFound
from snapshotd.types import ExperimentID, Snapshot, SnapshotID, new_id
from tests.contracts.refusal import refuses
from tests.records import committed, fork, started


def a_fork_goes_on_from_its_origin(catalog: Catalog) -> None:
    trajectory, first = started(catalog, "parent")
    second = committed(catalog, first, "1", "2")
    third = committed(catalog, second, "3")
    forks = [fork(second, trajectory, f"fork-{n}", experiment=ExperimentID("e" * 32)) for n in range(2)]
    catalog.trajectories.add([(one, None) for one in forks])
    assert catalog.trajectories.get(forks[0].id) == forks[0]
    assert catalog.snapshots.of_trajectory(forks[0].id) == []
    own = committed(catalog, second, "A", trajectory=forks[0].id)
    later = committed(catalog, own, "B", "C")
    deeper = fork(own, forks[0])
    catalog.trajectories.add([(deeper, None)])
    deepest = committed(catalog, own, "X", trajectory=deeper.id)

    def said(snapshot_id: SnapshotID) -> str:
        return "".join(message.content for message in catalog.conversations.read(snapshot_id))

    assert [said(one.id) for one in (first, second, third, own, later, deepest)] == [
        "",
        "12",
        "123",
        "12A",
        "12ABC",
        "12AX",
    ]
    assert catalog.snapshots.of_trajectory(forks[0].id) == [own, later]
    assert catalog.snapshots.of_trajectory(trajectory.id) == [first, second, third]
    assert catalog.trajectories.get(forks[1].id).head == second.id
    refuses(NotFound, catalog.conversations.read, SnapshotID(new_id()))


def own_messages_are_those_a_snapshot_added(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    second = committed(catalog, first, "1", "2")
    third = committed(catalog, second)
    fourth = committed(catalog, third, "3")
    child = fork(second, trajectory)
    catalog.trajectories.add([(child, None)])
    own = committed(catalog, second, "A", "B", "C", trajectory=child.id)
    later = committed(catalog, own, "D")

    def said(snapshot: Snapshot) -> str:
        return "".join(message.content for message in catalog.conversations.own(snapshot.id))

    assert [said(one) for one in (first, second, third, fourth, own, later)] == ["", "12", "", "3", "ABC", "D"]
    refuses(NotFound, catalog.conversations.own, SnapshotID(new_id()))


def long_conversations_stream(catalog: Catalog) -> None:
    _, head = started(catalog)
    total = 0
    for batch in range(30):
        texts = [f"{batch}:{n} " + "x" * (100_000 if batch == 7 else 10) for n in range(50)]
        head = committed(catalog, head, *texts)
        total += len(texts)
    stream = catalog.conversations.read(head.id)
    assert next(stream).content.startswith("0:0 ")
    committed(catalog, head, "a later one is not part of it")  # writing goes on while somebody reads
    assert sum(1 for _ in stream) == total - 1


def a_trajectory_removed_while_it_is_read_is_not_cut_short(catalog: Catalog) -> None:
    trajectory, head = started(catalog)
    head = committed(catalog, head, *("x" * 10_000 for _ in range(1000)))
    stream = catalog.conversations.read(head.id)
    next(stream)
    catalog.trajectories.remove(trajectory.id)
    refuses(NotFound, list, stream)


def a_conversation_can_go_back(catalog: Catalog) -> None:
    _, first = started(catalog)
    second = committed(catalog, first, "1", "2", "3")
    third = committed(catalog, second, "4")
    back = committed(catalog, third, "B", after=second, keep=2)
    further = committed(catalog, back, "C", after=back, keep=1)
    empty = committed(catalog, further, after=third, keep=0)
    last = committed(catalog, empty, "D", "E")

    def said(snapshot: Snapshot, start: int = 0) -> str:
        return "".join(message.content for message in catalog.conversations.read(snapshot.id, start))

    def own(snapshot: Snapshot) -> str:
        return "".join(message.content for message in catalog.conversations.own(snapshot.id))

    line = [first, second, third, back, further, empty, last]
    assert [said(one) for one in line] == ["", "123", "1234", "12B", "1C", "", "DE"]
    assert [own(one) for one in line] == ["", "123", "4", "B", "C", "", "DE"]
    for one in line:
        for start in range(6):
            assert said(one, start) == said(one)[start:], "from the middle"
    assert said(third, -1) == "1234"


CHECKS: tuple[Callable[[Catalog], None], ...] = (
    a_fork_goes_on_from_its_origin,
    a_conversation_can_go_back,
    own_messages_are_those_a_snapshot_added,
    long_conversations_stream,
    a_trajectory_removed_while_it_is_read_is_not_cut_short,
)
