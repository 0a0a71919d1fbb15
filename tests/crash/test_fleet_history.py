"""The history of a node of a fleet, on another node: published, looked at, forked, taken over. Real daemons over a real PostgreSQL
server and one store."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import suppress

import pytest

from snapshotd import failpoints
from snapshotd.client.client import Snapshotd
from snapshotd.client.sandbox import Sandbox
from snapshotd.errors import Conflict, DataLoss, NotFound, SnapshotdError, Unavailable, UsageError
from tests import long
from tests.node_rig import Fleet, await_that
from tests.postgres_server import PROGRAMS
from tests.unit.daemon.process import Daemon

PUBLICATION = (
    "engine.publish.segment",
    "engine.publish.written",
    "engine.publish.committed",
    "catalog.postgres.commit",
    "repo.fleet.segment_made",
    "repo.fleet.segment_put",
    "repo.fleet.segment_noted",
)
BRINGING = ("engine.takeover.merged", "engine.takeover.added", "repo.fleet.merged")


def published(fleet: Fleet, snapshot: str) -> bool:
    return bool(fleet.ask(f"SELECT 1 FROM snapshotd_fleet.published WHERE snapshot = '{snapshot}'"))


def head_of(box: Sandbox) -> str:
    return box.head().id


def work(client: Snapshotd, *words: str) -> Sandbox:
    """A sandbox with a snapshot for each word, which its file gets as a line."""
    box = Sandbox.create(client=client)
    for word in words:
        write(box, word)
    return box


def write(box: Sandbox, word: str) -> str:
    assert box.exec(["sh", "-c", f"echo {word} >> file"]).exit_code == 0
    return head_of(box)


def read(client: Snapshotd, snapshot: str) -> str:
    return b"".join(client.cat(snapshot, "/workspace/file")).decode()


def wait_published(fleet: Fleet, snapshot: str) -> None:
    await_that(lambda: published(fleet, snapshot), "it is not published")


def line(client: Snapshotd, trajectory: str) -> list[str]:
    return [one.id for one in client.log(trajectory)]


def restart(fleet: Fleet, daemon: Daemon, node: str, **environment: str) -> Daemon:
    daemon.kill()
    daemon.close()
    return fleet.begin(node, **environment)


def test_another_node_has_the_files_and_the_log_and_forks_and_the_first_one_has_the_fork(fleet: Fleet) -> None:
    north, south = fleet.begin("north").client, fleet.begin("south").client
    box = work(north, "one", "two")
    head = head_of(box)
    wait_published(fleet, head)
    assert read(south, head) == "one\ntwo\n"
    assert south.log(box.id) == north.log(box.id)
    assert [str(change) for change in south.diff(head)] == [str(change) for change in north.diff(head)]
    fork = Sandbox.connect(head, client=south).fork()[0]
    assert fork.exec(["cat", "file"]).stdout == "one\ntwo\n"
    theirs = write(fork, "three")
    wait_published(fleet, theirs)
    assert read(north, theirs) == "one\ntwo\nthree\n"
    again = Sandbox.connect(theirs, client=north).fork()[0]
    assert again.exec(["cat", "file"]).stdout == "one\ntwo\nthree\n"
    last = write(again, "four")
    wait_published(fleet, last)
    assert read(south, last) == "one\ntwo\nthree\nfour\n"
    for client in (north, south):
        assert client.check(read_data=True).damages == ()
    with pytest.raises(NotFound):
        south.snapshot("feedfeedfeed")


def test_a_caller_waits_until_other_nodes_can_read_a_snapshot_of_a_sandbox_that_runs(fleet: Fleet) -> None:
    north, south = fleet.begin("north").client, fleet.begin("south").client
    box = work(north, "one")
    head = head_of(box)
    assert {one.published for one in north.log(box.id)} <= {True, False}
    north.flush(box.id, published=True)
    assert published(fleet, head)
    assert north.snapshot(head).published
    assert [one.published for one in south.log(box.id)] == [True, True]
    assert read(south, head) == "one\n"
    south.flush(box.id, published=True)  # what it knows of the trajectory is published, by whomever


def test_a_log_on_another_node_goes_on_and_a_tag_comes_with_it(fleet: Fleet) -> None:
    north, south = fleet.begin("north").client, fleet.begin("south").client
    box = work(north, "one")
    wait_published(fleet, head_of(box))
    assert line(south, box.id) == line(north, box.id)
    head = write(box, "two")
    north.tag(head, "best")
    await_that(lambda: fleet.ask("SELECT 1 FROM snapshotd.tags WHERE name = 'best'"), "the tag is not published")
    await_that(lambda: line(south, box.id) == line(north, box.id), "it stays behind")
    assert south.snapshot("best").id == head


@pytest.mark.parametrize("point", long.some(PUBLICATION, 1))
def test_a_publication_that_is_cut_off_goes_on(fleet: Fleet, point: str) -> None:
    first, south = fleet.begin("north"), fleet.begin("south").client
    box = work(first.client, "one")
    wait_published(fleet, head_of(box))
    first.kill()
    first.close()
    dying = fleet.begin("north", SNAPSHOTD_FAILPOINT=f"{point}:{_hit(point)}")
    box = Sandbox.connect(box.id, client=dying.client)
    head = write(box, "two")
    await_that(lambda: "worker process ended" in dying.log() or not alive(dying), "it is not reached")
    north = restart(fleet, dying, "north").client
    wait_published(fleet, head)
    await_that(lambda: not north.status()["unpublished_count"], "the node does not note it")
    more = write(Sandbox.connect(box.id, client=north), "three")
    wait_published(fleet, more)
    assert read(south, more) == "one\ntwo\nthree\n"
    assert line(south, box.id) == line(north, box.id)


def _hit(point: str) -> int:
    """The begin of a node commits to PostgreSQL, too."""
    return {"catalog.postgres.commit": 12}.get(point, 1)


def alive(daemon: Daemon) -> bool:
    return daemon.process.poll() is None


@pytest.mark.parametrize("point", long.some(BRINGING, 1))
def test_a_history_whose_bringing_is_cut_off_comes_at_the_next_attempt(fleet: Fleet, point: str) -> None:
    walked = {name for name in failpoints.NAMES if name.startswith(("engine.publish.", "engine.takeover."))}
    assert walked <= {*PUBLICATION, *BRINGING}
    north, south = fleet.begin("north").client, fleet.begin("south", SNAPSHOTD_FAILPOINT=point)
    head = head_of(work(north, "one", "two"))
    wait_published(fleet, head)
    try:
        south.client.snapshot(head)
    except Exception:  # noqa: BLE001 - it dies, or its child does
        pass
    client = restart(fleet, south, "south").client
    assert read(client, head) == "one\ntwo\n"


@pytest.mark.long  # crash/test_fleet_node.py has the watchdog, a publication that is cut off is above
def test_steps_go_on_while_the_database_is_away_and_are_published_after_it(fleet: Fleet) -> None:
    north, south = fleet.begin("north").client, fleet.begin("south").client
    box = work(north, "one")
    wait_published(fleet, head_of(box))
    fleet.server.stop()
    try:
        head = write(box, "two")
        assert [one.published for one in north.log(box.id)] == [True, True, False]
        with pytest.raises(Unavailable, match="is not on this node, and other nodes cannot be asked"):
            south.snapshot(head)
    finally:
        fleet.server.start()
    wait_published(fleet, head)
    assert read(south, head) == "one\ntwo\n"


def test_a_trajectory_whose_node_died_goes_on_elsewhere_and_the_rest_becomes_a_side_branch(fleet: Fleet) -> None:
    first, south = fleet.begin("north"), fleet.begin("south").client
    program = ["sh", "-c", "test -e file || echo begun > file; sleep 1000"]
    made = first.client.run(command=program, detach=True)
    shared = Sandbox.connect(made.id, client=first.client).snapshot().id
    wait_published(fleet, shared)
    fleet.server.stop()
    lost = Sandbox.connect(made.id, client=first.client).snapshot().id
    first.kill()
    first.close()
    fleet.server.start()
    south.snapshot(shared)

    def take_over() -> bool:
        try:
            south.resume(made.id)
        except (Conflict, Unavailable):
            return False
        return True

    await_that(take_over, "it is not taken over")
    assert fleet.owner(made.id)[0] == "south"  # type: ignore[index]
    assert line(south, made.id) == line(south, made.id)[: line(south, made.id).index(shared) + 1]
    south.stop(made.id)
    north = fleet.begin("north").client
    side = await_that(
        lambda: north.snapshot(lost).trajectory != made.id and north.snapshot(lost).trajectory, "no side branch"
    )
    wait_published(fleet, lost)
    assert south.snapshot(lost).trajectory == side
    assert line(south, side) == [lost]
    assert line(north, made.id) == line(south, made.id)


@pytest.mark.long  # system/test_fleet_cold.py reads from the disk of a node
def test_a_node_reads_what_it_has_read_from_its_disk_after_a_kill_too(fleet: Fleet) -> None:
    north = fleet.begin("north").client
    south = fleet.begin("south")
    head = head_of(work(north, "one"))
    wait_published(fleet, head)
    assert read(south.client, head) == "one\n"
    usage = south.client.usage()
    assert 0 < usage.cache_bytes <= usage.cache_budget_bytes
    packs = list((fleet.directory / "store").glob("nodes/north/packs/*/*"))
    for pack in packs:
        pack.rename(pack.with_suffix(".away"))
    assert packs
    south = restart(fleet, south, "south")
    assert read(south.client, head) == "one\n"
    south = restart(fleet, south, "south", SNAPSHOTD_NODE_CACHE="0")
    assert south.client.usage().cache_bytes == 0
    with pytest.raises(DataLoss):
        read(south.client, head)
    for pack in packs:
        pack.with_suffix(".away").rename(pack)
    assert read(south.client, head) == "one\n"


def dies_at(fleet: Fleet, point: str, act: Callable[[Snapshotd], object]) -> None:
    """The next daemon of north dies there."""
    dying = restart(fleet, fleet.nodes["north"], "north", SNAPSHOTD_FAILPOINT=point)
    with pytest.raises(SnapshotdError):
        act(dying.client)
    assert dying.process.wait(60) == failpoints.EXIT_CODE
    dying.kill()
    dying.close()


def taken_over(client: Snapshotd, box: Sandbox) -> bool:
    try:
        client.resume(box.id)
    except UsageError:  # it has no program
        return True
    except (Conflict, Unavailable):
        return False
    return True


def left_in_a_call(fleet: Fleet) -> tuple[Sandbox, Snapshotd]:
    """A sandbox whose node died when an irreversible call had begun, and another node."""
    first, south = fleet.begin("north"), fleet.begin("south").client
    box = work(first.client, "one")
    first.client.flush(box.id, published=True)
    dies_at(
        fleet, "engine.journal.begun", lambda client: Sandbox.connect(box.id, client=client).exec(["effect", "pay"])
    )
    return box, south


def test_an_irreversible_call_of_a_node_that_died_is_asked_about_on_the_next_one(fleet: Fleet) -> None:
    box, south = left_in_a_call(fleet)
    ((call, state, _),) = fleet.ask("SELECT call, state, said FROM snapshotd_fleet.intents")
    assert state == "open"
    await_that(lambda: taken_over(south, box), "it is not taken over")
    theirs = Sandbox.connect(box.id, client=south)
    refused = theirs.exec(["effect", "pay again"])
    assert refused.exit_code != 0
    assert "say whether it has" in refused.stderr
    with pytest.raises(NotFound, match=r"was cut off; calls that were: [0-9a-f]{12}$"):
        south.resume(box.id, skip=["feedfeedfeed"])
    with suppress(UsageError):  # it has no program
        south.resume(box.id, skip=[call])
    assert fleet.ask(f"SELECT state FROM snapshotd_fleet.intents WHERE call = '{call}'") == [("happened",)]
    assert theirs.exec(["effect", "pay again"]).exit_code == 0
    wait_published(fleet, head_of(theirs))
    north = fleet.begin("north").client  # it has the call itself, as an open one of its own
    assert read(north, head_of(theirs)) == "one\n"
    await_that(lambda: not north.status()["unpublished_count"], "what it could not publish stays")


@pytest.mark.long  # test_an_irreversible_call_of_a_node_that_died_is_asked_about_on_the_next_one
def test_a_word_about_a_call_that_is_lost_with_its_node_is_asked_for_again(fleet: Fleet) -> None:
    """The fleet knows that the call has happened; what it gave, and that the program is past it, nobody knows any more."""
    box, south = left_in_a_call(fleet)
    await_that(lambda: taken_over(south, box), "it is not taken over")
    ((call,),) = fleet.ask("SELECT call FROM snapshotd_fleet.intents")
    with suppress(UsageError):  # it has no program
        south.resume(box.id, skip=[call])
    assert fleet.ask("SELECT state FROM snapshotd_fleet.intents") == [("happened",)]
    fleet.nodes["south"].kill()
    west = fleet.begin("west").client
    await_that(lambda: taken_over(west, box), "it is not taken over again")
    with pytest.raises(NotFound, match=r"was cut off; calls that were: [0-9a-f]{12}$"):
        west.resume(box.id, skip=["feedfeedfeed"])


@pytest.mark.long  # test_an_irreversible_call_of_a_node_that_died_is_asked_about_on_the_next_one
def test_a_compensation_that_began_on_a_node_that_died_does_not_run_again(fleet: Fleet) -> None:
    first, south = fleet.begin("north"), fleet.begin("south").client
    box = work(first.client, "one")
    before = head_of(box)
    assert box.exec(["effect", "pay"]).exit_code == 0
    first.client.rewind(box.id, before)
    first.client.flush(box.id, published=True)
    dies_at(fleet, "engine.compensate.begun", lambda client: client.compensate(box.id))
    await_that(lambda: taken_over(south, box), "it is not taken over")
    assert [one.compensated for one in south.effects(box.id)] == ["unknown"]
    assert [one.compensated for one in south.compensate(box.id)] == ["unknown"], "nobody knows whether it ran"
    assert Sandbox.connect(box.id, client=south).exec(["effect", "pay again"]).exit_code == 0, (
        "and nothing waits for a word"
    )


def test_what_was_captured_when_a_daemon_ends_is_published_before_it_has_ended(fleet: Fleet) -> None:
    first, south = fleet.begin("north"), fleet.begin("south").client
    box = work(first.client, "one")
    wait_published(fleet, head_of(box))
    last = write(box, "two")
    assert first.terminate() == 0
    assert published(fleet, last)
    assert read(south, last) == "one\ntwo\n"


class Backup:
    """The fleet's database as of now."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._file = fleet, fleet.directory / "dump"
        self._run("pg_dump", "--format=custom", f"--file={self._file}")

    def restore(self) -> None:
        self._run("pg_restore", "--clean", "--single-transaction", f"--dbname={self._fleet.database}", str(self._file))

    def _run(self, program: str, *arguments: str) -> None:
        server = self._fleet.server
        places = {"PGHOST": str(server.folder), "PGPORT": str(server.port), "PGUSER": "postgres"}
        subprocess.run(
            [PROGRAMS / program, *arguments],
            env={**os.environ, **places, "PGDATABASE": self._fleet.database},
            check=True,
            capture_output=True,
        )


@pytest.mark.long  # a publication that is cut off goes on, above
@pytest.mark.parametrize("restarted", [True, pytest.param(False, marks=pytest.mark.long)])
def test_what_a_restored_database_does_not_know_is_published_again(fleet: Fleet, *, restarted: bool) -> None:
    north, south = fleet.begin("north"), fleet.begin("south").client
    box = work(north.client, "one")
    north.client.flush(box.id, published=True)
    backup = Backup(fleet)
    write(box, "two")
    younger = work(north.client, "another")
    north.client.tag(younger.id, "kept")
    north.client.flush(younger.id, published=True)
    north.client.flush(box.id, published=True)
    if restarted:
        assert north.terminate() == 0
        north.close()
    backup.restore()
    client = (fleet.begin("north") if restarted else north).client
    wait_published(fleet, head_of(younger))
    wait_published(fleet, head_of(box))
    box = Sandbox.connect(box.id, client=client)
    last = write(box, "three")
    client.flush(box.id, published=True)
    assert line(south, box.id) == line(client, box.id)
    assert read(south, last) == "one\ntwo\nthree\n"
    assert read(south, "kept") == "another\n"
