"""A daemon as a node of a fleet: its lease, what it owns, and what stands still when the lease is over. Real daemons, and a real
PostgreSQL server."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshotd.cli.main import main
from snapshotd.client import Sandbox
from snapshotd.errors import Conflict, DataLoss, SnapshotdError, Unavailable, UsageError
from snapshotd.repo.key import load_key
from tests.node_rig import TERMS_MS, Fleet, await_that, own_fleet
from tests.unit.daemon.process import damage_packs

TICKS = "i=0; while :; do i=$((i+1)); echo $i > {}; sleep 0.02; done"


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A folder whose sockets have short paths."""
    with tempfile.TemporaryDirectory(prefix="node-") as name:
        yield Path(name)


@pytest.fixture
def world() -> Iterator[Path]:
    """A folder that a command in a plain folder can write to: Landlock lets it write nowhere else."""
    with tempfile.TemporaryDirectory(prefix="node-", dir="/dev/shm") as name:
        Path(name).chmod(0o777)
        yield Path(name)


@pytest.fixture
def fleet(short_dir: Path) -> Iterator[Fleet]:
    with own_fleet(short_dir) as made:
        yield made


def ticking(box: Sandbox, directory: Path) -> Callable[[], str]:
    """Start a clock in a sandbox; returns what reads it, from outside."""
    shown = directory / "ticks"
    box.exec(TICKS.format(shown), background=True)

    def read() -> str:
        return shown.read_text() if shown.exists() else ""

    await_that(read, "the clock does not tick")
    return read


def await_published(fleet: Fleet, made: Sandbox) -> None:
    """Return when all of a sandbox's snapshots are published: nothing of it becomes a side branch."""
    head = made.head().id
    sql = f"SELECT 1 FROM snapshotd_fleet.owners WHERE trajectory = '{made.id}' AND head = '{head}'"
    await_that(lambda: fleet.ask(sql), "it is not published")


def stands_still(read: Callable[[], str], for_s: float = 0.3) -> bool:
    before = read()
    time.sleep(for_s)  # nothing tells that nothing happens
    return read() == before


def ticks(read: Callable[[], str]) -> bool:
    return not stands_still(read, 0.1)


def test_a_node_registers_and_owns_what_is_made_there(fleet: Fleet) -> None:
    north = fleet.begin("north").client
    made = Sandbox.create(client=north)
    fork = made.fork()[0]
    for one in (made, fork):
        assert await_that(lambda one=one: fleet.owner(one.id), "it is not owned") == ("north", 1, 1)
    status = north.status()
    facts = {name: status[name] for name in ("node", "node_state", "node_failure", "owned_count")}
    assert facts == {"node": "north", "node_state": "leased", "node_failure": "", "owned_count": 2}
    assert 0 < status["lease_s"] <= TERMS_MS[0] / 1000
    await_that(
        lambda: "north.example.com" in str(fleet.ask("SELECT room FROM snapshotd_fleet.nodes")), "no room is told"
    )


def test_the_next_daemon_of_a_node_owns_what_the_killed_one_owned(fleet: Fleet) -> None:
    first = fleet.begin("north")
    made = Sandbox.create(client=first.client)
    await_that(lambda: fleet.owner(made.id), "it is not owned")
    first.kill()
    first.close()
    second = fleet.begin("north").client
    assert fleet.owner(made.id) == ("north", 2, 1)
    assert Sandbox.connect(made.id, client=second).exec(["true"]).exit_code == 0


def test_a_trajectory_that_another_node_owns_is_refused_with_that_nodes_address(fleet: Fleet) -> None:
    north, _ = fleet.begin("north").client, fleet.begin("south")
    made = Sandbox.create(client=north)
    made.stop()
    await_published(fleet, made)
    fleet.ask(f"UPDATE snapshotd_fleet.owners SET node = 'south', fence = 2 WHERE trajectory = '{made.id}'")
    await_that(lambda: north.status()["owned_count"] == 0, "the node does not notice")
    with pytest.raises(
        Conflict, match=r"owned by node south \(https://south.example.com:7676\): run the command there"
    ):
        made.exec(["true"])


@pytest.mark.long  # crash/test_fleet_history.py takes one over
def test_a_sandbox_whose_trajectory_was_taken_over_ends(fleet: Fleet, world: Path) -> None:
    north, _ = fleet.begin("north").client, fleet.begin("south")
    made = Sandbox.create(client=north)
    read = ticking(made, world)
    await_published(fleet, made)
    fleet.ask(f"UPDATE snapshotd_fleet.owners SET node = 'south', fence = 2 WHERE trajectory = '{made.id}'")
    await_that(lambda: not north.status()["sandbox_count"], "the sandbox goes on")
    assert stands_still(read)
    assert north.trajectory(made.id).status == "interrupted"


@pytest.mark.long  # the watchdog stops them, below
def test_sandboxes_stand_still_while_the_database_is_away_and_go_on_after_it(fleet: Fleet, world: Path) -> None:
    north = fleet.begin("north").client
    made = Sandbox.create(client=north)
    read = ticking(made, world)
    fleet.server.stop()
    assert made.exec(["true"]).exit_code == 0, "steps go on as long as the lease holds"
    await_that(lambda: north.status()["node_state"] == "frozen", "the node does not freeze")
    assert stands_still(read)
    with pytest.raises(Unavailable, match=r"node north cannot renew its lease .* so its sandboxes stand still"):
        made.exec(["true"])
    with pytest.raises(Unavailable):
        Sandbox.create(client=north)
    fleet.server.start()
    await_that(lambda: north.status()["node_state"] == "leased", "the node does not go on")
    await_that(lambda: ticks(read), "the sandbox does not go on")
    assert made.exec(["true"]).exit_code == 0


@pytest.mark.long  # system/test_node_freezing.py
def test_the_watchdog_stops_the_sandboxes_of_a_daemon_that_is_stopped(fleet: Fleet, world: Path) -> None:
    daemon = fleet.begin("north")
    made = Sandbox.create(client=daemon.client)
    read = ticking(made, world)
    os.kill(daemon.process.pid, signal.SIGSTOP)
    try:
        time.sleep(TERMS_MS[0] / 1000)  # the lease ends
        assert stands_still(read)
    finally:
        os.kill(daemon.process.pid, signal.SIGCONT)
    await_that(lambda: ticks(read), "the sandbox does not go on")
    assert made.exec(["true"]).exit_code == 0


def test_an_irreversible_call_is_in_the_database_before_it_runs(fleet: Fleet) -> None:
    north = fleet.begin("north").client
    made = Sandbox.create(client=north)
    assert made.exec(["effect", "pay"]).exit_code == 0
    rows = fleet.ask("SELECT trajectory, state, said FROM snapshotd_fleet.intents")
    assert [(one[0], one[1]) for one in rows] == [(made.id, "open")]
    assert '"name": "pay"' in rows[0][2]
    fleet.server.stop()
    failed = made.exec(["effect", "pay"])
    assert failed.exit_code != 0
    assert "does not answer" in failed.stderr
    fleet.server.start()


@pytest.mark.long  # test_the_next_daemon_of_a_node_owns_what_the_killed_one_owned
def test_a_second_daemon_of_one_name_waits_for_the_lease(fleet: Fleet, short_dir: Path) -> None:
    first = fleet.begin("north")
    fleet.directory = short_dir / "copy"
    second = fleet.begin("north")
    fleet.nodes["copy"] = second
    fleet.nodes["north"] = first
    assert second.client.status()["node_state"] == "frozen"
    with pytest.raises(SnapshotdError, match=r"node north holds its lease .* a name of its own \(SNAPSHOTD_NODE\)"):
        Sandbox.create(client=second.client)
    assert Sandbox.create(client=first.client).exec(["true"]).exit_code == 0


def test_a_daemon_with_another_key_is_no_node(fleet: Fleet, short_dir: Path) -> None:
    north = fleet.begin("north")
    (short_dir / "other").mkdir()
    load_key(short_dir / "other")
    with pytest.raises(AssertionError, match="is not the key of the fleet"):
        fleet.begin("south", key=short_dir / "other" / "key")
    assert [one.node for one in north.client.fleet_status()] == ["north"]


@pytest.mark.long  # model/test_fleet_postgres.py has what the fleet knows of it
def test_a_node_that_is_gone_for_good_is_forgotten(fleet: Fleet) -> None:
    """And is a node again when it was not gone for good."""
    north, south = fleet.begin("north").client, fleet.begin("south")
    made = Sandbox.create(client=south.client)
    await_published(fleet, made)
    with pytest.raises(Conflict, match="node south holds its lease"):
        north.forget_node("south")
    south.kill()
    south.close()

    def run_out() -> bool:
        return {one.node: one.state for one in north.fleet_status()}["south"] == "lost"

    await_that(run_out, "its lease does not run out")
    with pytest.raises(Conflict, match="owns 1 trajectory that no other node has taken over"):
        north.forget_node("south")

    def taken() -> bool:
        with contextlib.suppress(Conflict, UsageError):  # not yet; it has no program, but goes over
            north.resume(made.id)
        return fleet.owner(made.id)[0] == "north"  # type: ignore[index]

    await_that(taken, "it is not taken over")
    north.forget_node("south")
    assert [one.node for one in north.fleet_status()] == ["north"]
    south = fleet.begin("south")
    assert south.client.status()["node_state"] == "leased"
    assert [one.node for one in north.fleet_status()] == ["north", "south"]


@pytest.mark.long  # the words of one message
def test_advice_about_packs_is_such_that_a_node_can_follow(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    north, south = fleet.begin("north"), fleet.begin("south")
    made = Sandbox.create(client=north.client)
    made.files.write("file", os.urandom(100_000))
    await_published(fleet, made)
    damage_packs(fleet.directory / "store" / "nodes" / "north" / "packs")
    with pytest.raises(DataLoss, match="restore the packs that it names from a backup of the bucket"):
        list(south.client.cat(made.head().id, "/workspace/file"))
    monkeypatch.setenv("SNAPSHOTD_SOCKET", str(north.socket_path))
    assert main(["check", "--read-data"]) == DataLoss.exit_code
    assert "restore the packs from a backup of the bucket" in capsys.readouterr().err
    assert north.terminate() == 0
    north.close()
    with pytest.raises(AssertionError, match=f"set SNAPSHOTD_STORE={fleet.store}, or use another state directory"):
        fleet.begin("north", SNAPSHOTD_STORE="file:///elsewhere")


@pytest.mark.long  # test_a_database_that_has_forgotten_a_daemon_is_called_so has one that answers
def test_what_needs_the_database_is_refused_while_that_hangs(fleet: Fleet) -> None:
    north, south = fleet.begin("north").client, fleet.begin("south").client
    made = Sandbox.create(client=north)
    await_published(fleet, made)
    theirs = Sandbox.connect(made.id, client=south)
    fleet.server.send(signal.SIGSTOP)
    try:
        for _ in range(3):
            with pytest.raises(Unavailable):
                south.snapshot("feedfeedfeed")
        with pytest.raises(Unavailable):
            theirs.exec(["true"])
        with pytest.raises(Unavailable):
            south.prune()
        with pytest.raises(Unavailable):
            Sandbox.create(client=north)
    finally:
        fleet.server.send(signal.SIGCONT)
    for client in (north, south):
        await_that(lambda client=client: client.status()["node_state"] == "leased", "the node does not go on")
    assert made.exec(["true"]).exit_code == 0
    with pytest.raises(Conflict, match="owned by node north"):
        theirs.exec(["true"])


def test_a_database_that_has_forgotten_a_daemon_is_called_so(fleet: Fleet) -> None:
    north = fleet.begin("north")
    made = Sandbox.create(client=north.client)
    await_published(fleet, made)
    fleet.ask("UPDATE snapshotd_fleet.nodes SET epoch = epoch - 1")
    said = await_that(lambda: north.client.status()["node_failure"], "it says nothing")
    assert "it has gone back to an earlier state, so restart this daemon" in said
    assert north.terminate() == 0
    north.close()
    client = fleet.begin("north").client
    assert Sandbox.connect(made.id, client=client).exec(["true"]).exit_code == 0
