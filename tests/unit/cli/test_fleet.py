"""`snapshotd fleet`, on the tables of a real server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from snapshotd.cli.main import main
from snapshotd.fleet.base import NodeID
from snapshotd.fleet.coordination import PostgresCoordination
from snapshotd.fleet.places import NodeRoom
from snapshotd.types import TrajectoryID
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


def test_a_look_makes_no_tables(
    postgres: PostgresServer, postgres_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does it bring a catalog up to date, which nodes of the version before use."""
    for words in (["status"], ["drain", "north"]):
        assert main(["fleet", *words, "--database", postgres_url]) == 4
        assert "has no fleet: the first daemon with SNAPSHOTD_FLEET" in capsys.readouterr().err
    assert postgres.ask("SELECT 1 FROM pg_namespace WHERE nspname LIKE 'snapshotd%'") == []


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "status", "--json", "--database", "postgresql://nobody@127.0.0.1:1/none"]) == 16
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "Unavailable"
