"""One program over many nodes: forks are placed, numbered and brought there, functions run on them, and nothing is left of a
driver that was killed. The nodes are daemons over plain folders that other machines reach."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.client import Branch, Fleet, Sandbox, Snapshotd
from snapshotd.errors import Conflict, DaemonUnavailable, LimitExceeded, NotFound, UsageError
from snapshotd.fleet.base import NodeID
from snapshotd.fleet.places import NodeRoom
from tests.postgres_server import PostgresServer, new_fleet
from tests.unit.client.fleet_rig import OURS, SAID, Nodes, environment, example, task_on
from tests.unit.daemon.asking import eventually

MEMORY = 1 << 20


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("SNAPSHOTD_HOST", "SNAPSHOTD_TOKEN", "SNAPSHOTD_TLS_PIN", "SNAPSHOTD_TLS_CA"):
        monkeypatch.delenv(name, raising=False)
    found = Nodes()
    yield found
    found.close()


def test_forks_spill_over_nodes_and_know_their_numbers(nodes: Nodes) -> None:
    one, two = nodes.start(2)
    with Fleet.open([one, two]) as fleet:
        task = task_on(fleet, one)
        branches = fleet.fork(task, 20, name="try", memory=MEMORY, per_node=12)
        assert [branch.node for branch in branches] == [one] * 12 + [two] * 8
        assert [branch.name for branch in branches] == [f"try-{number}" for number in range(20)]
        said = fleet.map(lambda branch: branch.exec("cat task; pwd", check=True).stdout.split()[:2], branches)
        assert said == [["a", "task"]] * 20
        assert len({branch.id for branch in branches}) == 20
    assert set(nodes.statuses(two).values()) == {"stopped"}, "they end with the driver"
    assert nodes.statuses(one)[task.id] == "running", "what it has not made stays"


def test_an_error_is_a_value_in_its_place(nodes: Nodes) -> None:
    (one,) = nodes.start(1)

    def work(branch: Branch) -> str:
        if branch.name == "b.1":
            raise ZeroDivisionError
        return branch.exec("cat task").stdout

    with Fleet.open(one) as fleet:
        results = fleet.map(work, fleet.fork(task_on(fleet, one), 3, name="b.{index}"), parallel=2)
    assert [type(result) for result in results] == [str, ZeroDivisionError, str]


def test_a_branch_whose_node_has_gone_is_made_again_elsewhere(nodes: Nodes) -> None:
    one, two = nodes.start(2)
    with Fleet.open([one, two]) as fleet:
        branches = fleet.fork(task_on(fleet, one), 16, memory=MEMORY, per_node=8)
        worked = branches[8]
        worked.exec("echo more >> task")
        nodes.daemons[two].kill()
        fleet.map(lambda branch: None, branches)
        results = fleet.map(lambda branch: (branch.node, branch.files.read_text("task")), branches[8:])
        assert results[1:] == [(one, "a task\n")] * 7
        assert isinstance(results[0], DaemonUnavailable), "what was done in it is not done again"
        assert [branch.node for branch in branches[9:]] == [one] * 7


def test_a_token_makes_forks_and_their_commands_once(nodes: Nodes) -> None:
    one, two = nodes.start(2)

    def work(branch: Branch) -> str:
        branch.exec("echo once >> log", check=True)
        return branch.files.read_text("log")

    found = []
    for _ in range(2):
        with Fleet.open([one, two]) as fleet:
            task = found[0][0] if found else task_on(fleet, one).head().id
            branches = fleet.fork(task, 16, memory=MEMORY, per_node=8, token="night")
            found.append((task, [branch.id for branch in branches], fleet.map(work, branches, token="night")))
    assert found[0] == found[1]
    assert found[0][2] == ["once\n"] * 16
    with Fleet.open([one, two]) as fleet, pytest.raises(Conflict, match="used for other forks"):
        fleet.fork(task, 3, token="night")


def test_variants_are_shared_among_nodes(nodes: Nodes) -> None:
    one, two = nodes.start(2)
    with Fleet.open([one, two]) as fleet:
        variants = {f"v{number}": {"env": {"NUMBER": "{index}"}} for number in range(16)}
        branches = fleet.fork(task_on(fleet, one), variants=variants, memory=MEMORY, per_node=8)
        said = fleet.map(lambda branch: branch.exec("echo $NUMBER").stdout.strip(), branches)
        assert said == [str(number) for number in range(16)]


def test_a_pickled_branch_is_the_same_sandbox(nodes: Nodes) -> None:
    (one,) = nodes.start(1)
    with Fleet.open(one) as fleet:
        branch = fleet.create()
        branch.files.write("note", "here\n")
        again = pickle.loads(pickle.dumps(branch))
        assert (again.node, again.files.read_text("note")) == (one, "here\n")


def test_a_detached_branch_outlives_the_driver(nodes: Nodes) -> None:
    (one,) = nodes.start(1)
    with Fleet.open(one) as fleet:
        (kept,) = fleet.fork(task_on(fleet, one), detached=True)
    assert nodes.statuses(one)[kept.id] == "running"


DRIVER = """
import sys, time
from snapshotd.client import Fleet
fleet = Fleet.open(sys.argv[1], lease_s=2)
print(*(branch.id for branch in fleet.fork(sys.argv[2], 2)), flush=True)
time.sleep(600)
"""


def test_branches_end_with_a_driver_that_is_killed(nodes: Nodes) -> None:
    (one,) = nodes.start(1)
    with Fleet.open(one) as fleet:
        task = task_on(fleet, one)
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, one, task.id], stdout=subprocess.PIPE, text=True, env=environment()
    )
    try:
        assert driver.stdout is not None
        made = driver.stdout.readline().split()
        assert len(made) == 2
        until = time.monotonic() + 5  # two and a half leases
        while time.monotonic() < until:
            assert {nodes.statuses(one)[each] for each in made} == {"running"}
            time.sleep(0.2)
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.communicate()
    eventually(lambda: {nodes.statuses(one)[each] for each in made} == {"stopped"})
    assert nodes.statuses(one)[task.id] == "running"


def test_refusals_say_what_to_do(nodes: Nodes) -> None:
    one, two = nodes.start(2)
    with Fleet.open([one, two]) as fleet:
        task = task_on(fleet, one)
        with pytest.raises(LimitExceeded, match="no room in the fleet for 4 more forks"):
            fleet.fork(task, 20, memory=MEMORY, per_node=8)
        with pytest.raises(NotFound):
            fleet.fork("nothing")
        with pytest.raises(NotFound, match="no node"):
            fleet.client("three")
    with pytest.raises(UsageError, match="empty"):
        Fleet.open([])
    with pytest.raises(UsageError, match="is no place"):
        Fleet.open("somewhere")


def test_this_machines_daemon_is_a_fleet_of_one(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = nodes.start(1)
    daemon = nodes.daemons[one]
    monkeypatch.setenv("SNAPSHOTD_SOCKET", str(daemon.socket_path))
    with Fleet.open() as fleet:
        task = Sandbox.create(client=Snapshotd(daemon.state_dir, daemon.socket_path))
        assert (
            fleet.map(lambda branch: branch.exec("echo hi").stdout, fleet.fork(task.name or task.id, 2)) == ["hi\n"] * 2
        )


@pytest.mark.parametrize("where", ["here", "https"])
def test_one_script_runs_here_and_over_nodes_with_one_other_line(nodes: Nodes, where: str, tmp_path: Path) -> None:
    places = nodes.start(1 if where == "here" else 2)
    line = OURS if where == "here" else f"FLEET = {places}\n"
    done = subprocess.run(
        example(tmp_path, line),
        env=environment(SNAPSHOTD_SOCKET=str(nodes.daemons[places[0]].socket_path)),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.splitlines() == [*SAID, f"{len(places)} node(s)"], done.stderr


EXPERIMENT = """
name = "way"
from = "{snapshot}"
program = ["sh", "-c", "echo $WAY {{index}} > way"]
repeat = 3
[variants.left]
env = {{ WAY = "{{variant}}" }}
[variants.right]
env = {{ WAY = "{{variant}}" }}
[score]
command = ["sh", "-c", "cat way; grep -c left way || true"]
kind = "number"
{stop}
"""


def test_an_experiment_is_shared_by_nodes_and_has_one_outcome(nodes: Nodes, tmp_path: Path) -> None:
    one, two = sorted(nodes.start(2))
    with Fleet.open([one, two]) as fleet:
        task = task_on(fleet, one)
        (file := tmp_path / "way.toml").write_text(EXPERIMENT.format(snapshot=task.id, stop=""))
        seen = []
        info = fleet.run_experiment(file, on_change=seen.append)
        assert [one.called for one in info.branches] == ["left.0", "right.0", "left.1", "right.1", "left.2", "right.2"]
        assert [(one.score, one.error) for one in info.branches] == [(1.0, None), (0.0, None)] * 3
        assert {each.label: each.scores.mean for each in info.variants} == {"left": 1.0, "right": 0.0}
        assert info.ended == "all branches have ended"
        assert len(seen) > 1
        names = [
            {each.name for each in nodes.daemons[place].client.trajectories() if each.experiment}
            for place in (one, two)
        ]
        assert names == [
            {"way.left.0.0", "way.right.0.0", "way.left.1.0"},
            {"way.right.1.0", "way.left.2.0", "way.right.2.0"},
        ]
        assert fleet.client(two).snapshot("way.right.2.0").tool is not None
        again = fleet.run_experiment(file)
        assert again.branches == info.branches, "the same command finds it again"


def test_a_stop_rule_holds_for_the_branches_of_all_nodes(nodes: Nodes, tmp_path: Path) -> None:
    one, two = nodes.start(2)
    with Fleet.open([one, two]) as fleet:
        task = task_on(fleet, one)
        stop = "[stop]\nbest_of = 4"
        text = EXPERIMENT.format(snapshot=task.id, stop=stop).replace("repeat = 3", "repeat = 20\nparallel = 2")
        (file := tmp_path / "way.toml").write_text(text)
        info = fleet.run_experiment(file)
    assert info.ended == "4 branches scored", info.branches
    assert 4 <= sum(each.state == "scored" for each in info.branches) < 12
    assert "skipped" in {each.state for each in info.branches}


def test_the_nodes_of_a_database_are_found_and_reserved_there(
    nodes: Nodes, postgres: PostgresServer, postgres_url: str
) -> None:
    """The rows are what nodes write when they renew."""
    places = nodes.start(2)
    names = [NodeID("north"), NodeID("south")]
    with new_fleet(postgres_url) as coordination:
        for name, address in zip(names, places, strict=True):
            coordination.register(name, f"host-{name}", 0)
            room = NodeRoom(name, address=address, cpus=2.0, free_bytes=1 << 30, starting_most=10)
            coordination.renew(name, 1, room)
    try:
        with Fleet.open(postgres_url) as fleet:
            assert [room.node for room in fleet.nodes()] == names
            task = fleet.create()
            with pytest.raises(
                UsageError, match="no node of a fleet"
            ):  # home is asked to publish it, and these only say so
                fleet.fork(task, 18, memory=MEMORY)
            assert not postgres.ask("SELECT * FROM snapshotd_fleet.reservations")
            postgres.ask(f"INSERT INTO snapshotd_fleet.published VALUES ('{task.head().id}', '{task.id}')")
            branches = fleet.fork(task, 18, memory=MEMORY)
            others = {branch.node for branch in branches} - {task.node}
            assert [branch.node for branch in branches] == [task.node] * 10 + [*others] * 8
            assert fleet.map(lambda branch: branch.exec("echo hi").stdout, branches) == ["hi\n"] * 18
            reserved = postgres.ask("SELECT sum(reserved) FROM snapshotd_fleet.nodes")
            assert reserved == [(0,)], "their nodes count them from now on"
            postgres.ask("UPDATE snapshotd_fleet.nodes SET starting = 9")
            with pytest.raises(LimitExceeded, match="no room in the fleet for 1 more fork"):
                fleet.fork(task, 3, memory=MEMORY)
            with pytest.raises(NotFound, match="no node west"):
                fleet.client("west")
    finally:
        postgres.ask("DROP SCHEMA snapshotd_fleet CASCADE")
