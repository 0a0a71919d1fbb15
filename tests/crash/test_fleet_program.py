"""One program over the nodes of a real fleet, of which it knows one address. Real daemons over a real PostgreSQL server and one store."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from snapshotd.cli.main import main
from snapshotd.client import Fleet, Sandbox, Snapshotd
from snapshotd.client.fleet.branch import reopen
from snapshotd.client.remote.logins import Login, save_login
from snapshotd.errors import Conflict, DaemonUnavailable, NotFound, NotPermitted, UsageError
from snapshotd.fleet.base import NodeID
from snapshotd.fleet.opening import open_coordination
from snapshotd.fleet.places import NodeRoom
from snapshotd.types import new_id
from tests import long, node_rig
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


@pytest.mark.long  # test_a_tenant_finds_on_another_node_what_is_its_own_and_nothing_else
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


class Listener:
    """A false node, which keeps what it is sent."""

    def __init__(self, tls: Path | None) -> None:
        """`tls`: the folder of a certificate and its key; None: it speaks plain HTTP."""
        self._server = socket.create_server(("127.0.0.1", 0))
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls / "cert.pem", tls / "key.pem")
            self._server = context.wrap_socket(self._server, server_side=True)
        self.address = f"{'https' if tls else 'http'}://127.0.0.1:{self._server.getsockname()[1]}"
        self.heard: list[bytes] = []
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connected, _ = self._server.accept()
                with connected:
                    self.heard.append(connected.recv(1 << 16))

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.close()


def tell_of(fleet: node_rig.Fleet, node: str, address: str) -> None:
    """Write the row of a node, as everybody can who may write to the database."""
    room = NodeRoom(NodeID(node), address=address, cpus=64.0, free_bytes=1 << 40, starting_most=99)
    with open_coordination(fleet.url) as coordination:
        coordination.register(room.node, f"host-{node}", 0)
        coordination.renew(room.node, 1, room)


@pytest.mark.parametrize("given", long.some(["argument", "environment"], 1))
def test_a_token_goes_to_no_address_that_the_fleet_names(
    fleet: node_rig.Fleet, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """What a false row names has even the certificate that the driver trusts."""
    address = fleet.begin_reachable("north")
    daemon = fleet.nodes["north"]
    known = {
        "token": daemon.client.create_token("driver", scopes=["run"]).token,
        "pin": daemon.client.status()["fingerprint"],
    }
    if given == "environment":
        monkeypatch.setenv("SNAPSHOTD_TOKEN", known.pop("token"))
        monkeypatch.setenv("SNAPSHOTD_TLS_PIN", known.pop("pin"))
    with closing(Listener(daemon.state_dir / "tls")) as sealed, closing(Listener(None)) as plain:
        false = {
            "sealed": (sealed.address, "no login"),
            "plain": (plain.address, "is no address of a node"),
            "local": (f"unix://{daemon.socket_path}", "knows no address"),
            "shell": ("ssh://root@127.0.0.1:1", "knows no address"),
        }
        for node, (place, _) in false.items():
            tell_of(fleet, node, place)
        with Fleet.open(address, **known) as program:
            assert {room.node for room in program.nodes()} == {"north", *false}
            assert program.client("north").version().version
            for node, (_, refusal) in false.items():
                with pytest.raises((NotPermitted, NotFound), match=refusal):
                    program.client(node).version()
            for node in ("local", "shell"):  # a true node leaves them out; a false one says what it likes
                with pytest.raises(NotPermitted, match="is no address of a node"):
                    program._nodes._at(false[node][0])  # type: ignore[attr-defined]
            daemon.kill()
            with pytest.raises(DaemonUnavailable):
                program.nodes()
        for place in (sealed.address, plain.address):
            with pytest.raises(NotPermitted, match="no login"):  # the branch was pickled
                reopen(place, new_id(), NodeID("sealed"))
        assert (sealed.heard, plain.heard) == ([], [])


def test_an_operator_needs_a_token_and_no_way_to_the_database(
    fleet: node_rig.Fleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`fleet status` and `fleet drain`, asked of a node. Figures of nodes are of all tenants, so other scopes do not get them."""
    north = begin(fleet, "north", scope="admin")
    fleet.begin("south")
    monkeypatch.setenv("SNAPSHOTD_HOST", north)

    def run(*words: str, code: int = 0) -> str:
        assert main(["fleet", *words]) == code
        said = capsys.readouterr()
        return said.err if code else said.out

    def states() -> dict[str, str]:
        return {one["node"]: one["state"] for one in json.loads(run("status", "--json"))}

    await_that(lambda: states() == {"north": "leased", "south": "leased"}, "both have joined")
    moved = fleet.nodes["south"].client.create()[0].id
    assert json.loads(run("drain", "south", "--json")) == {"node": "south", "draining": True}
    await_that(lambda: states() == {"north": "leased", "south": "draining"}, "it is not told")
    await_that(lambda: fleet.owner(moved)[0] is None, "it hands nothing over")
    assert "there is no node east" in run("drain", "east", code=NotFound.exit_code)
    log_in(fleet, "north", north, scope="run", tenant=None)
    for words in (["drain", "--end", "south"], ["status"]):
        assert "does not have the scope admin" in run(*words, code=NotPermitted.exit_code)
    monkeypatch.delenv("SNAPSHOTD_HOST")
    monkeypatch.setenv("SNAPSHOTD_SOCKET", str(fleet.nodes["north"].socket_path))
    assert states()["south"] == "draining"
    run("drain", "--end", "south")
    await_that(lambda: states()["south"] == "leased", "it is not used again")


def test_a_token_is_for_addresses_that_are_named(fleet: node_rig.Fleet) -> None:
    with pytest.raises(UsageError, match="the nodes of a database are known by their logins"):
        Fleet.open(fleet.url, token="sdt_some")


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
