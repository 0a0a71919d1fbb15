"""One program over the nodes of a real fleet, of which it knows one address. Real daemons over a real PostgreSQL server and one store."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshotd.client import Fleet, Sandbox, Snapshotd
from snapshotd.client.remote.logins import Login, save_login
from snapshotd.errors import Conflict, NotFound, NotPermitted
from tests import node_rig
from tests.node_rig import await_that, own_fleet

MEMORY = 1 << 20


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[node_rig.Fleet]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with tempfile.TemporaryDirectory(prefix="program-") as name, own_fleet(Path(name)) as made:
        yield made


def begin(fleet: node_rig.Fleet, node: str, *, scope: str = "run", tenant: str | None = None) -> str:
    """Start a node to which this user has a login. Returns its address."""
    address = fleet.begin_reachable(node)
    log_in(fleet, node, address, scope=scope, tenant=tenant)
    rooms = "SELECT 1 FROM snapshotd_fleet.nodes WHERE node = '{}' AND starting_most > 0"
    await_that(lambda: fleet.ask(rooms.format(node)), "no room is told")
    return address


def log_in(fleet: node_rig.Fleet, node: str, address: str, *, scope: str, tenant: str | None) -> None:
    local = fleet.nodes[node].client
    made = local.create_token(f"{scope}-{tenant}", scopes=[scope], tenant=tenant)  # type: ignore[list-item]
    save_login(address, Login(made.token, local.status()["fingerprint"]))


def test_one_address_leads_to_all_nodes_and_they_reserve_room(fleet: node_rig.Fleet) -> None:
    """With tokens that may run and no more, and without a way to the database."""
    north, south = begin(fleet, "north"), begin(fleet, "south")
    with Fleet.open(north) as program:
        assert [(room.node, room.address) for room in program.nodes()] == [("north", north), ("south", south)]
        task = Sandbox.create(client=fleet.nodes["north"].client)  # only its own users may make one without isolation
        task.files.write("task", "a task\n")
        branches = program.fork(task.id, 16, memory=MEMORY, per_node=8)
        assert [branch.node for branch in branches] == ["north"] * 8 + ["south"] * 8
        assert program.map(lambda branch: branch.exec("cat task").stdout, branches) == ["a task\n"] * 16
        assert not fleet.ask("SELECT 1 FROM snapshotd_fleet.reservations"), "their nodes count them from now on"
        again = program.fork(task.head().id, 1, memory=MEMORY)
        assert again[0].node == "north", "the node that owns it, whichever was asked"
        with pytest.raises(Conflict, match="node south has no room for so many"):
            program.client("north").reserve("south", 1, 1 << 50)
        fleet.nodes["north"].kill()
        assert [room.node for room in program.nodes()] == ["north", "south"], "the other one is asked"
        assert program.map(lambda branch: branch.exec("cat task").stdout, branches[8:]) == ["a task\n"] * 8


def test_who_may_only_look_is_told_of_no_node(fleet: node_rig.Fleet) -> None:
    north = begin(fleet, "north", scope="read")
    with pytest.raises(NotPermitted, match="run"):
        Fleet.open(north)


def test_a_tenant_finds_on_another_node_what_is_its_own_and_nothing_else(fleet: node_rig.Fleet) -> None:
    """Names of what other tenants have are looked for in PostgreSQL, before and after somebody has brought them."""
    fleet.begin("north")
    south = begin(fleet, "south", tenant="acme")
    north = fleet.nodes["north"].client
    lines = {tenant: north.create(name=f"box-{tenant}", tenant=tenant)[0].id for tenant in ("acme", "other")}
    for one in lines.values():
        Sandbox.connect(one, client=north).exec("echo secret > file")
        north.flush(one, published=True)
    head, hidden = (north.trajectory(one).head for one in lines.values())
    acme = Snapshotd(host=south, autostart=False)

    def refused() -> None:
        for ref in (lines["other"], lines["other"][:12], "box-other", hidden):
            questions: list[Callable[[str], object]] = [
                acme.snapshot,
                acme.trajectory,
                acme.log,
                lambda ref: list(acme.diff(ref)),
                acme.fork,
                acme.resume,
                acme.fleet_snapshot,
                lambda ref: b"".join(acme.cat(ref, "/workspace/file")),
            ]
            for question in questions:
                with pytest.raises(NotFound):
                    question(ref)

    refused()
    assert b"".join(acme.cat(head, "/workspace/file")) == b"secret\n"
    assert acme.fleet_snapshot("box-acme").published
    assert [each.id for each in acme.trajectories()] == [lines["acme"]]
    fleet.nodes["south"].client.snapshot(hidden)
    assert {each.id for each in fleet.nodes["south"].client.trajectories()} == set(lines.values()), "it is brought"
    refused()
    assert [each.id for each in acme.trajectories()] == [lines["acme"]]
