"""The page of a daemon that is a node: it shows all nodes of the fleet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from snapshotd.fleet.base import NodeID
from snapshotd.fleet.opening import open_coordination
from tests.e2e.page_rig import Person
from tests.e2e.support import Snap, ended
from tests.keeper_rig import eventually
from tests.postgres_server import PostgresServer

pytestmark = [pytest.mark.runc, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def own_snap(tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer) -> Iterator[Snap]:
    """A node `north`."""
    folder = tmp_path_factory.mktemp("n")
    own = {"SNAPSHOTD_FLEET": postgres.url, "SNAPSHOTD_NODE": "north", "SNAPSHOTD_STORE": (folder / "store").as_uri()}
    with ended(Snap(folder / "state", own)) as snap:
        snap("ls")  # starts it
        yield snap
    for schema in ("snapshotd", "snapshotd_fleet"):
        postgres.ask(f"DROP SCHEMA IF EXISTS {schema} CASCADE")


def test_the_machine_shows_the_nodes_of_the_fleet(own_snap: Snap, person: Person, postgres: PostgresServer) -> None:
    own_snap("create", "--runtime", "runc", "--image", "minimal", "--name", "box")
    with open_coordination(postgres.url) as coordination:
        coordination.register(NodeID("south"), "another host", 0)
        coordination.drain_node(NodeID("south"), draining=True)
    person.page.evaluate("location.hash = '#/machine'")
    table = person.page.locator(".machine section", has=person.page.get_by_role("heading", name="Fleet"))
    table.get_by_role("row", name="south draining").wait_for()
    table.get_by_role("row", name="north leased").get_by_role("cell", name="1", exact=True).wait_for()
    eventually(
        lambda: 'snapshotd_node_trajectories{node="north"} 1\n' in own_snap("stats", "--prometheus").stdout,
        "Prometheus has it, too",
    )
    assert [one["node"] for one in own_snap.json("stats")["nodes"]] == ["north", "south"]
    assert "south  draining" in own_snap("stats").stdout
    own_snap("rm", "--force", "box")
