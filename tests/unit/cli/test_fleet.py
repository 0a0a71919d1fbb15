"""`snapshotd fleet`, on the tables of a real server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from snapshotd.cli.main import main
from snapshotd.errors import Conflict
from snapshotd.fleet.base import NodeID, Sighting
from snapshotd.fleet.coordination import PostgresCoordination
from snapshotd.fleet.places import NodeRoom
from snapshotd.types import SnapshotID, TrajectoryID
from tests.postgres_server import PostgresServer, new_fleet

Run = Callable[..., str]


@pytest.fixture
def coordination(postgres: PostgresServer, postgres_url: str) -> Iterator[PostgresCoordination]:
    with new_fleet(postgres_url) as made:
        yield made
    postgres.ask("DROP SCHEMA snapshotd_fleet CASCADE")


@pytest.fixture
def fleet(coordination: PostgresCoordination, postgres_url: str, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command; returns what it prints."""

    def run(*words: str, code: int = 0) -> str:
        assert main(["fleet", *words, "--database", postgres_url]) == code
        said = capsys.readouterr()
        return said.err if code else said.out

    return run


def test_status_shows_leases_room_and_lag(
    coordination: PostgresCoordination, fleet: Run, postgres: PostgresServer
) -> None:
    for name in ("north", "south", "west"):
        coordination.register(NodeID(name), f"host-{name}", 0)
    coordination.own(TrajectoryID("t"), NodeID("north"), 1)
    room = NodeRoom(
        NodeID("north"), architecture="x86_64", free_bytes=3 << 30, starting=1, starting_most=16, unpublished=7
    )
    coordination.renew(NodeID("north"), 1, room)
    coordination.reserve(NodeID("north"), 2, 1 << 30)
    postgres.ask("UPDATE snapshotd_fleet.nodes SET until_ns = 1 WHERE node = 'west'")
    assert fleet("drain", "south") == ""
    north, south, west = json.loads(fleet("status", "--json"))
    assert 10 < north.pop("lease_s") <= 20
    assert north == {
        "node": "north",
        "state": "leased",
        "trajectory_count": 1,
        "free_memory_bytes": 1 << 30,
        "starting_count": 3,
        "starting_max": 16,
        "unpublished_count": 7,
        "architecture": "x86_64",
    }
    assert (south["state"], west["state"], west["lease_s"]) == ("draining", "lost", 0)
    shown = fleet("status").splitlines()
    assert shown[0].split() == ["NODE", "STATE", "LEASE", "TRAJECTORIES", "FREE", "STARTING", "LAG"]
    assert shown[1].split()[:2] == ["north", "leased"]
    assert "3 of 16" in shown[1]
    fleet("drain", "--end", "south")
    assert json.loads(fleet("status", "--json"))[1]["state"] == "leased"


def test_a_node_that_is_not_there(fleet: Run) -> None:
    assert "there is no node east: `snapshotd fleet status" in fleet("drain", "east", code=4)


def test_a_node_is_forgotten_when_nothing_is_left_to_take_over(
    coordination: PostgresCoordination, fleet: Run, postgres: PostgresServer
) -> None:
    north, south, west = NodeID("north"), NodeID("south"), NodeID("west")
    for node in (north, south, west):
        coordination.register(node, f"host-{node}", 0)
    line, fresh = (coordination.own(TrajectoryID(name), north, 1) for name in ("line", "fresh"))
    with coordination.publishing(line, None, SnapshotID("snapshot")):
        pass
    coordination.drain_node(north)
    assert "node north holds its lease for" in fleet("forget", "north", code=6)
    postgres.ask("UPDATE snapshotd_fleet.nodes SET until_ns = 1 WHERE node <> 'south'")
    assert "owns 1 trajectory that no other node has taken over: `snapshotd resume ID`" in fleet(
        "forget", "north", code=6
    )
    assert [one["node"] for one in json.loads(fleet("status", "--json"))] == ["north", "south", "west"]

    seen = Sighting(north, coordination.watch(north).renewals, 0)
    coordination.take_over(coordination.owner(line.trajectory), south, 1, seen)
    assert {one.node for one in coordination.renew(south, 1).late} == {north, west}
    assert json.loads(fleet("forget", "--json", "north")) == {"node": "north"}
    fleet("forget", "west")
    assert [one["node"] for one in json.loads(fleet("status", "--json"))] == ["south"]
    assert [one.node for one in coordination.renew(south, 1).late] == [north], "what it owns may be published yet"
    for words in (["forget"], ["drain"]):
        assert "there is no node north" in fleet(*words, "north", code=4)

    with pytest.raises(Conflict, match="node north was forgotten"):
        coordination.renew(north, 1)  # its daemon only stood still
    with pytest.raises(Conflict, match="node north was forgotten"):
        coordination.own(TrajectoryID("new"), north, 1)
    again = coordination.register(north, "another-host", coordination.watch(north).epoch)
    assert again.lease.epoch > 1, "the first daemon would take the rights of this one for its own"
    assert [one.trajectory for one in again.owned] == [fresh.trajectory], "nobody else could take it over"
    assert [one["state"] for one in json.loads(fleet("status", "--json"))] == ["leased", "leased"]


def test_a_look_makes_no_tables(
    postgres: PostgresServer, postgres_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does it bring a catalog up to date, which nodes of the version before use."""
    for words in (["status"], ["drain", "north"], ["forget", "north"]):
        assert main(["fleet", *words, "--database", postgres_url]) == 4
        assert "has no fleet: the first daemon with SNAPSHOTD_FLEET" in capsys.readouterr().err
    assert postgres.ask("SELECT 1 FROM pg_namespace WHERE nspname LIKE 'snapshotd%'") == []


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "status", "--json", "--database", "postgresql://nobody@127.0.0.1:1/none"]) == 16
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "Unavailable"
