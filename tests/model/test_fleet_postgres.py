"""The model of a fleet, with PostgreSQL as its database; and what only a database has: requests that wait for each other."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from snapshotd.catalog.postgres.catalog import open_database
from snapshotd.catalog.postgres.driver import PostgresDatabase
from snapshotd.errors import Conflict, NotFound, VersionMismatch
from snapshotd.fleet.base import SECOND_NS, Claim, LeaseTerms, NodeID, Sighting
from snapshotd.fleet.collection import COLLECTION_TTL_NS, Collection
from snapshotd.fleet.coordination import PostgresCoordination
from snapshotd.fleet.places import ForkNeed, NodeRoom, Roster
from snapshotd.fleet.tables import FleetTables
from snapshotd.types import CallID, SnapshotID, TrajectoryID
from tests import long
from tests.fleet_world import TERMS, World
from tests.model.fleet_machine import Fleet
from tests.postgres_server import PostgresServer

A, B, T = NodeID("a"), NodeID("b"), TrajectoryID("t")
S = [SnapshotID(f"s{number}") for number in range(9)]
ROOM = NodeRoom(A, cpus=8, free_bytes=10_000, starting_most=100)


@pytest.fixture
def coordination(postgres: PostgresServer, postgres_url: str) -> Iterator[PostgresCoordination]:
    """By a clock that stands until it is moved: its row is `snapshotd_fleet.clock`."""
    with closing(open_database(postgres_url)) as database:
        made = PostgresCoordination(tables_of(database), TERMS)
        try:
            FleetTables(database).make()
            postgres.ask(
                "CREATE TABLE snapshotd_fleet.clock (ns BIGINT); INSERT INTO snapshotd_fleet.clock VALUES (1000000000000)"
            )
            yield made
        finally:
            postgres.ask("DROP SCHEMA IF EXISTS snapshotd_fleet CASCADE")


def tables_of(database: PostgresDatabase) -> FleetTables:
    return FleetTables(database, clock="(SELECT ns FROM snapshotd_fleet.clock)")


def forget_all(postgres: PostgresServer) -> None:
    postgres.ask(
        "TRUNCATE snapshotd_fleet.nodes, snapshotd_fleet.owners, snapshotd_fleet.published, snapshotd_fleet.intents,"
        " snapshotd_fleet.reservations"
    )


def advance(postgres: PostgresServer, ns: int) -> None:
    postgres.ask(f"UPDATE snapshotd_fleet.clock SET ns = ns + {ns}")


def test_the_promises_hold(postgres: PostgresServer, coordination: PostgresCoordination) -> None:
    class PostgresFleet(Fleet):
        def make_world(self) -> World:
            forget_all(postgres)
            return World(coordination, lambda ns: advance(postgres, ns))

    run_state_machine_as_test(
        PostgresFleet,
        settings=settings(
            max_examples=long.size(4, 200),
            stateful_step_count=40,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def at_once(count: int, work: object) -> list[object]:
    """The outcomes of so many calls that begin together."""
    barrier = threading.Barrier(count)

    def run(number: int) -> object:
        barrier.wait(10)
        try:
            return work(number)  # type: ignore[operator]
        except Conflict as exc:
            return exc

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def test_one_of_many_takers_gets_a_trajectory(postgres: PostgresServer, coordination: PostgresCoordination) -> None:
    nodes = [NodeID(f"n{number}") for number in range(8)]
    for node in nodes:
        coordination.register(node, f"host-{node}", 0)
    claim = coordination.own(T, nodes[0], 1)
    with coordination.publishing(claim, None, S[0]):
        pass
    seen = Sighting(nodes[0], coordination.watch(nodes[0]).renewals, 0)
    advance(postgres, TERMS.ttl_ns)
    for node in nodes[1:]:
        coordination.renew(node, 1)
    row = coordination.owner(T)
    outcomes = at_once(7, lambda number: coordination.take_over(row, nodes[number + 1], 1, seen))
    taken = [one for one in outcomes if not isinstance(one, Conflict)]
    assert len(taken) == 1, outcomes
    assert taken[0].head == S[0]  # type: ignore[attr-defined]
    with pytest.raises(Conflict, match="was taken over"), coordination.publishing(claim, S[0], S[1]):
        pass
    with pytest.raises(Conflict, match="was taken over"):
        coordination.record_intent(claim, CallID("late"))


def test_a_renewal_and_a_takeover_exclude_each_other(
    postgres: PostgresServer, coordination: PostgresCoordination
) -> None:
    coordination.register(A, "host-a", 0)
    coordination.register(B, "host-b", 0)
    coordination.own(T, A, 1)
    for _ in range(long.size(10, 200)):
        seen = Sighting(A, coordination.watch(A).renewals, 0)
        advance(postgres, TERMS.ttl_ns)
        coordination.renew(B, 1)
        row = coordination.owner(T)
        renewed, taken = at_once(
            2,
            lambda number, row=row, seen=seen: (
                coordination.renew(A, 1) if number == 0 else coordination.take_over(row, B, 1, seen)
            ),
        )
        owned = {claim.trajectory for claim in renewed.owned}  # type: ignore[attr-defined]
        assert (T in owned) == isinstance(taken, Conflict)
        if T not in owned:  # back to where it began
            coordination.hand_over(taken.claim)  # type: ignore[attr-defined]
            coordination.take_over(coordination.owner(T), A, 1)


def test_a_renewal_waits_for_no_publication(coordination: PostgresCoordination) -> None:
    coordination.register(A, "host-a", 0)
    claim = coordination.own(T, A, 1)
    with coordination.publishing(claim, None, S[0]) as fresh, ThreadPoolExecutor(1) as pool:
        assert fresh
        pool.submit(coordination.renew, A, 1).result(5)
    assert coordination.owner(T).head == S[0]


def test_a_publication_is_all_or_nothing(coordination: PostgresCoordination) -> None:
    coordination.register(A, "host-a", 0)
    claim = coordination.own(T, A, 1)
    coordination.record_intent(claim, CallID("call"))
    with pytest.raises(ZeroDivisionError), coordination.publishing(claim, None, S[0], ["call"]):
        raise ZeroDivisionError
    assert coordination.owner(T).head is None
    assert coordination.find_published(S) == []
    assert [one.call for one in coordination.intents(T)] == ["call"]


def test_room_is_given_once(postgres: PostgresServer, coordination: PostgresCoordination) -> None:
    coordination.register(A, "host-a", 0)
    coordination.renew(A, 1, ROOM)
    outcomes = at_once(16, lambda _: coordination.reserve(A, 1, 1000))
    assert sum(isinstance(one, str) for one in outcomes) == 10
    assert coordination.rooms()[0].free_bytes == 0
    begun = next(one for one in outcomes if isinstance(one, str))
    coordination.begin_reserved(A, begun)
    assert coordination.rooms()[0].free_bytes == 1000, "the node counts it from now on"
    coordination.begin_reserved(A, begun)
    advance(postgres, TERMS.ttl_ns - 1)
    coordination.renew(A, 1, ROOM)
    assert coordination.rooms()[0].free_bytes == 1000
    advance(postgres, 1)
    coordination.renew(A, 1, ROOM)
    assert coordination.rooms()[0].free_bytes == 10_000, "what was not begun has run out"
    coordination.drain_node(A)
    with pytest.raises(Conflict, match="no room"):
        coordination.reserve(A, 1, 1000)
    assert coordination.renew(A, 1).draining


def test_forks_are_placed_by_what_the_nodes_say(coordination: PostgresCoordination) -> None:
    for number in range(6):
        node = NodeID(f"n{number}")
        coordination.register(node, f"host-{node}", 0)
        coordination.renew(node, 1, NodeRoom(node, cpus=8, free_bytes=16, starting_most=12, warm=frozenset({"base"})))
    need = ForkNeed(1, base="base", home=NodeID("n3"))
    roster = Roster(coordination.rooms())
    coordination.reserve(NodeID("n3"), 4, 1)  # somebody else, meanwhile
    blocks = roster.place(need, 40, lambda block: coordination.reserve(block.node, block.count, 1), random.Random(1))
    assert sum(block.count for block in blocks) == 40
    assert all(room.starting <= 12 for room in coordination.rooms())


def test_late_nodes_are_named_in_a_renewal(postgres: PostgresServer, coordination: PostgresCoordination) -> None:
    coordination.register(A, "host-a", 0)
    coordination.register(B, "host-b", 0)
    advance(postgres, 2 * TERMS.renew_ns)
    assert coordination.renew(B, 1).late == ()
    advance(postgres, 1)
    assert [row.node for row in coordination.renew(B, 1).late] == [A]


def test_the_clock_is_the_servers(postgres: PostgresServer, coordination: PostgresCoordination) -> None:
    with closing(open_database(postgres.url)) as database:
        real = PostgresCoordination(FleetTables(database), LeaseTerms())
        lease = real.register(A, "host-a", 0).lease
    ((now,),) = postgres.ask("SELECT (extract(epoch FROM clock_timestamp()) * 1000000000)::bigint")
    assert 0 < now - (lease.until_ns - TERMS.ttl_ns) < 60 * SECOND_NS  # type: ignore[operator]


def test_tables_of_another_version_are_refused(postgres: PostgresServer, coordination: PostgresCoordination) -> None:
    with closing(open_database(postgres.url)) as database:
        FleetTables(database).make()
        postgres.ask("UPDATE snapshotd_fleet.format SET version = 2")
        with pytest.raises(VersionMismatch, match="snapshotd_fleet"):
            FleetTables(database).make()


@pytest.fixture
def collection(postgres: PostgresServer, coordination: PostgresCoordination) -> Iterator[Collection]:
    """With three published snapshots of a trajectory, the last of them its head."""
    coordination.register(A, "host-a", 0)
    claim = coordination.own(T, A, 1)
    for parent, snapshot in zip([None, *S[:2]], S[:3], strict=True):
        with coordination.publishing(claim, parent, snapshot):
            pass
    with closing(open_database(postgres.url)) as database:
        yield Collection(tables_of(database))


def test_one_node_collects_and_an_earlier_one_removes_nothing(postgres: PostgresServer, collection: Collection) -> None:
    outcomes = at_once(4, lambda number: collection.begin_collecting(NodeID(f"n{number}"), 1))
    (fence,) = [one for one in outcomes if isinstance(one, int)]
    first = NodeID(f"n{outcomes.index(fence)}")
    assert collection.begin_collecting(first, 1) == fence, "prolonged"
    advance(postgres, COLLECTION_TTL_NS - 1)
    with pytest.raises(Conflict, match="one collector at a time"):
        collection.begin_collecting(B, 1)
    advance(postgres, 1)
    later = collection.begin_collecting(B, 1)
    with pytest.raises(Conflict, match="another node collects"):
        collection.remove_published(fence, S)
    assert collection.remove_published(later, S) == S[:2], "and not the head"


def test_a_collector_that_has_ended_or_was_killed_lets_another_one_begin(
    postgres: PostgresServer, collection: Collection
) -> None:
    fence = collection.begin_collecting(A, 1)
    advance(postgres, COLLECTION_TTL_NS - 1)
    collection.prolong(fence)
    advance(postgres, COLLECTION_TTL_NS - 1)
    with pytest.raises(Conflict, match="one collector at a time"):
        collection.begin_collecting(B, 1)
    later = collection.begin_collecting(A, 2)
    assert later > fence, "the next daemon of the node"
    with pytest.raises(Conflict, match="another node collects since"):
        collection.prolong(fence)
    collection.end_collecting(fence)
    with pytest.raises(Conflict, match="one collector at a time"):
        collection.begin_collecting(B, 1)
    collection.end_collecting(later)
    assert collection.begin_collecting(B, 1) > later


def test_a_trajectory_goes_with_all_that_the_fleet_knows_of_it_unless_it_is_pinned(
    postgres: PostgresServer, coordination: PostgresCoordination, collection: Collection
) -> None:
    coordination.record_intent(Claim(T, A, 1, 1), CallID("call"))
    collection.pin(B, S[:1], SECOND_NS)
    with pytest.raises(Conflict, match="reads a snapshot of trajectory"):
        collection.remove_trajectory(T)
    assert coordination.find_published(S[:3]) == S[:3]
    advance(postgres, SECOND_NS)
    collection.remove_trajectory(T)
    assert coordination.find_published(S[:3]) == []
    assert coordination.intents(T) == []
    with pytest.raises(NotFound):
        coordination.owner(T)


def test_nothing_that_is_pinned_is_removed(postgres: PostgresServer, collection: Collection) -> None:
    fence = collection.begin_collecting(A, 1)
    collection.pin(B, S[:1], 5 * SECOND_NS)
    collection.pin(B, S[:1], 1)
    assert collection.remove_published(fence, S) == [S[1]]
    with pytest.raises(NotFound, match="1 snapshot of 2 cannot be pinned"):
        collection.pin(B, S[:2], SECOND_NS)
    advance(postgres, 5 * SECOND_NS)
    assert collection.remove_published(fence, S) == [S[0]], "the pin has run out"


def test_a_pin_and_a_removal_exclude_each_other(coordination: PostgresCoordination, collection: Collection) -> None:
    fence, claim, head = collection.begin_collecting(A, 1), Claim(T, A, 1, 1), S[2]
    for number in range(long.size(10, 200)):
        new = SnapshotID(f"new{number}")
        with coordination.publishing(claim, head, new):
            pass
        old, head = head, new

        def pin_or_remove(which: int, old: SnapshotID = old) -> object:
            try:
                return collection.remove_published(fence, [old]) if which else collection.pin(B, [old], SECOND_NS)
            except NotFound as exc:
                return exc

        pinned, removed = at_once(2, pin_or_remove)
        assert isinstance(pinned, NotFound) == (removed == [old])
        assert coordination.find_published([old]) == ([] if removed else [old])
        collection.unpin(B, [old])
