"""Garbage of a fleet: what a prune on a node gives up and deletes, what it keeps for the others, and what `rm` removes. Real daemons
over a real PostgreSQL server and one store; only the clock by which garbage grows old is the test's."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from snapshotd import failpoints
from snapshotd.api.storage import Policy, PruneInfo
from snapshotd.client.client import Snapshotd
from snapshotd.client.sandbox import Sandbox
from snapshotd.errors import Conflict, NotFound, SnapshotdError, UsageError
from tests.node_rig import Fleet, await_that

DAY_S = 25 * 3600
NEWEST = Policy(keep_last=1)
PRUNE = ("engine.prune.told", "engine.prune.recorded")
REMOVAL = ("engine.remove.recorded", "engine.remove.published")
COLLECTION = (
    "repo.fleet.segment_made",
    "repo.fleet.segment_put",
    "repo.fleet.segment_noted",
    "repo.fleet.tombstone_put",
    "repo.fleet.objects_forgotten",
    "repo.fleet.pack_deleted",
    "repo.fleet.pack_forgotten",
)
SHORT = ("repo.fleet.tombstone_put",)


def write(box: Sandbox, word: str) -> str:
    """A snapshot with a file of its own, which no other one has."""
    assert box.exec(["sh", "-c", f"head -c 200000 /dev/urandom > big; echo {word} > file"]).exit_code == 0
    return str(box.head().id)


def read(client: Snapshotd, snapshot: str) -> str:
    return b"".join(client.cat(snapshot, "/workspace/file")).decode().strip()


def wait_published(fleet: Fleet, snapshot: str) -> None:
    sql = f"SELECT 1 FROM snapshotd_fleet.published WHERE snapshot = '{snapshot}'"
    await_that(lambda: fleet.ask(sql), "it is not published")


def state(fleet: Fleet, snapshot: str) -> str:
    return str(fleet.ask(f"SELECT state FROM snapshotd.snapshots WHERE id = '{snapshot}'")[0][0])


def in_fleet(fleet: Fleet, trajectory: str) -> bool:
    tables = ("snapshotd.trajectories WHERE id", "snapshotd_fleet.owners WHERE trajectory")
    return any(fleet.ask(f"SELECT 1 FROM {where} = '{trajectory}'") for where in tables)


def bucket_bytes(fleet: Fleet) -> int:
    return sum(path.stat().st_size for path in (fleet.directory / "store").rglob("packs/*/*"))


def prune_until_gone(fleet: Fleet, client: Snapshotd) -> PruneInfo:
    """Condemn garbage, copy what lives out of old packs, and delete what is left: a grace lies between each two of them."""
    report = client.prune(NEWEST)
    for _ in range(2):
        fleet.pass_time(DAY_S)
        client.prune(NEWEST)
    return report


def fork_of(client: Snapshotd, snapshot: str) -> Sandbox:
    return Sandbox.connect(client.fork(snapshot).trajectories[0].id, client=client)


def line(client: Snapshotd, count: int) -> tuple[Sandbox, list[str]]:
    box = Sandbox.create(client=client)
    return box, [write(box, f"word{number}") for number in range(count)]


def test_a_prune_on_a_node_deletes_from_the_bucket_and_the_other_nodes_know(fleet: Fleet) -> None:
    north, south = fleet.begin("north").client, fleet.begin("south").client
    (_, ours), (_, theirs) = line(north, 5), line(south, 3)
    wait_published(fleet, ours[-1])
    wait_published(fleet, theirs[-1])
    assert read(south, ours[1]) == "word1"
    await_that(lambda: not fleet.ask("SELECT 1 FROM snapshotd_fleet.pins"), "it is pinned still")
    before = bucket_bytes(fleet)
    assert {one.snapshot for one in north.prune(NEWEST, dry_run=True).pruned} >= set(ours[1:-1])
    assert {state(fleet, one) for one in ours} == {"stored"}, "a dry run changes nothing"
    first = north.prune(NEWEST)
    assert {one.snapshot for one in first.pruned} >= set(ours[1:-1])
    assert {state(fleet, one) for one in ours[1:-1]} == {"pruned"}
    assert {state(fleet, one) for one in theirs} == {"stored"}, "those of other nodes are theirs to give up"
    assert bucket_bytes(fleet) >= before, "nothing is deleted within the grace"
    fleet.pass_time(DAY_S)
    prune_until_gone(fleet, north)
    assert bucket_bytes(fleet) < before - 2 * 200_000
    with pytest.raises(SnapshotdError, match="given up by the retention policy"):
        read(south, ours[1])
    for client in (north, south):
        assert read(client, ours[-1]) == "word4"
        assert [read(client, one) for one in theirs] == ["word0", "word1", "word2"]


def test_what_a_tag_a_fork_or_a_sandbox_of_another_node_needs_is_kept(fleet: Fleet) -> None:
    north, south = fleet.begin("north").client, fleet.begin("south").client
    _, ours = line(north, 6)
    wait_published(fleet, ours[-1])
    south.tag(ours[1], "kept")
    await_that(lambda: fleet.ask("SELECT 1 FROM snapshotd.tags WHERE name = 'kept'"), "the tag is not published")
    fork = fork_of(south, ours[2])
    assert fleet.ask(f"SELECT node FROM snapshotd_fleet.pins WHERE snapshot = '{ours[2]}'") == [("south",)]
    gone = {one.snapshot for one in prune_until_gone(fleet, north).pruned} | {
        one for one in ours if state(fleet, one) == "pruned"
    }
    assert gone >= {ours[3], ours[4]}
    assert not gone & {ours[1], ours[2], ours[5]}
    assert read(south, "kept") == "word1"
    assert fork.exec(["cat", "file"]).stdout.strip() == "word2"


@pytest.mark.long  # model/test_fleet_postgres.py has removals and pins
def test_what_the_owner_removes_goes_from_the_fleet_when_no_fork_and_no_reader_is_left(fleet: Fleet) -> None:
    north, south = fleet.begin("north").client, fleet.begin("south").client
    box, ours = line(north, 2)
    wait_published(fleet, ours[-1])
    fork = fork_of(south, ours[0])  # no other node knows of it
    box.remove(force=True)
    with pytest.raises(NotFound):
        north.snapshot(ours[0])
    theirs = write(fork, "more")
    wait_published(fleet, theirs)
    assert in_fleet(fleet, box.id), "a fork needs it"
    assert read(south, ours[0]) == "word0"
    fork.remove(force=True)
    await_that(lambda: not in_fleet(fleet, fork.id), "the fork is not removed from the fleet")
    north.prune(NEWEST)
    await_that(
        lambda: not in_fleet(fleet, box.id) or (north.prune(NEWEST) and False), "it is not removed from the fleet"
    )
    before = bucket_bytes(fleet)
    prune_until_gone(fleet, north)
    assert bucket_bytes(fleet) < before - 2 * 200_000
    await_that(lambda: is_unknown(south, ours[0]), "the other node shows it still")
    with pytest.raises(NotFound):
        north.snapshot(ours[0])


def has_pruned(client: Snapshotd) -> bool:
    try:
        client.prune(NEWEST)
    except Conflict:
        return False
    return True


def is_unknown(client: Snapshotd, snapshot: str) -> bool:
    try:
        client.snapshot(snapshot)
    except NotFound:
        return True
    return False


@pytest.mark.long  # model/test_fleet_postgres.py::test_one_node_collects_and_an_earlier_one_removes_nothing
def test_a_second_collector_is_refused_and_one_that_stood_still_harms_nothing(fleet: Fleet) -> None:
    north, south = fleet.begin("north"), fleet.begin("south").client
    (_, ours), (_, theirs) = line(north.client, 4), line(south, 4)
    wait_published(fleet, ours[-1])
    wait_published(fleet, theirs[-1])
    collects = "SELECT 1 FROM snapshotd_fleet.collector WHERE node = 'north' AND until_ns > 0"
    ended: list[object] = []

    def prune() -> None:
        try:
            ended.append(north.client.prune(NEWEST))
        except SnapshotdError as exc:
            ended.append(exc)

    pruning = threading.Thread(target=prune)
    pruning.start()
    await_that(lambda: fleet.ask(collects) or ended, "it does not begin")
    os.kill(north.process.pid, signal.SIGSTOP)
    try:
        if fleet.ask(collects):  # else it was faster than the signal
            with pytest.raises(Conflict, match=r"node north collects|is locked by another process"):
                south.prune(NEWEST)
        fleet.ask("UPDATE snapshotd_fleet.collector SET until_ns = 0")  # its lease runs out
        await_that(lambda: has_pruned(south), "it waits for what stands still", 150)  # the server ends its transaction
        fleet.pass_time(DAY_S)
        south.prune(NEWEST)
        newest = write(Sandbox.create(client=south), "new")
        wait_published(fleet, newest)
    finally:
        os.kill(north.process.pid, signal.SIGCONT)
    pruning.join()
    await_that(lambda: north.client.status()["node_state"] == "leased", "the node does not go on")
    prune_until_gone(fleet, north.client)
    for client in (north.client, south):
        assert [read(client, one) for one in (ours[-1], theirs[-1], newest)] == ["word3", "word3", "new"]


@pytest.mark.parametrize(
    "point",
    [pytest.param(point, marks=[pytest.mark.long] * (point not in SHORT)) for point in (*PRUNE, *COLLECTION, *REMOVAL)],
)
def test_a_prune_that_is_cut_off_is_finished_by_the_next_one(fleet: Fleet, point: str) -> None:
    assert {name for name in failpoints.NAMES if name.startswith(("engine.prune.", "engine.remove."))} == {
        *PRUNE,
        *REMOVAL,
    }
    first, south = fleet.begin("north"), fleet.begin("south").client
    _, ours = line(first.client, 4)
    removed, gone = line(first.client, 2)
    wait_published(fleet, ours[-1])
    wait_published(fleet, gone[-1])
    before = bucket_bytes(fleet)
    for _ in range(2 if point in COLLECTION[-2:] else point in COLLECTION[3:-2]):
        first.client.prune(NEWEST)
        fleet.pass_time(DAY_S)
    first.kill()
    first.close()
    dying = fleet.begin("north", SNAPSHOTD_FAILPOINT=point)
    fleet.pass_time(DAY_S)
    with pytest.raises(Exception) as failure:  # noqa: PT012
        dying.client.remove(removed.id)
        dying.client.prune(NEWEST)
    said = dying.process.stderr
    assert said is not None
    os.set_blocking(said.fileno(), False)
    assert f"failpoint {point} reached" in said.read().decode(), failure.value
    dying.kill()
    dying.close()
    north = fleet.begin("north").client
    try:
        north.remove(removed.id)
    except (NotFound, UsageError):
        pass  # it was removed before
    await_that(lambda: not in_fleet(fleet, removed.id), "it is not removed from the fleet")
    fleet.pass_time(DAY_S)
    prune_until_gone(fleet, north)
    assert bucket_bytes(fleet) < before - 3 * 200_000
    for client in (north, south):
        assert read(client, ours[-1]) == "word3"
    assert not list((fleet.directory / "store").rglob("tombstones/*"))


def test_a_node_that_has_not_merged_for_days_finds_what_was_moved_meanwhile(fleet: Fleet, tmp_path: Path) -> None:
    north = fleet.begin("north").client
    south = fleet.begin("south", SMALL_MERGE_S="3600").client
    _, ours = line(north, 10)
    wait_published(fleet, ours[-1])
    assert read(south, ours[-1]) == "word9"
    fleet.ask("DELETE FROM snapshotd_fleet.pins")  # it has ended reading; the look that says so is hours away, too
    packs = set((fleet.directory / "store").rglob("packs/*/*"))
    prune_until_gone(fleet, north)
    assert packs - set((fleet.directory / "store").rglob("packs/*/*")), "no pack is gone"
    big = b"".join(north.cat(ours[-1], "/workspace/big"))
    assert b"".join(south.cat(ours[-1], "/workspace/big")) == big
    south.restore(ours[-1], tmp_path / "restored")
    assert (tmp_path / "restored" / "workspace" / "big").read_bytes() == big
    assert fork_of(south, ours[-1]).exec("cat big | wc -c").stdout.strip() == str(len(big))


@pytest.mark.long  # contract/test_fleet_repository.py takes back what a publication needs
def test_an_output_that_others_have_condemned_before_it_was_published_is_stored_again(fleet: Fleet) -> None:
    """It was stored, so its only copy is the one that the fleet takes for garbage."""
    north, south = fleet.begin("north").client, fleet.begin("south").client
    words = ["seq", "1", "20000"]
    theirs = Sandbox.create(client=south)
    assert theirs.exec(words).exit_code == 0
    wait_published(fleet, theirs.head().id)
    mine = Sandbox.create(client=north)
    wait_published(fleet, mine.head().id)
    assert north.snapshot(theirs.head().id), "its index knows the output"
    fleet.nodes["north"].kill()
    fleet.nodes["north"].close()
    dying = fleet.begin("north", SNAPSHOTD_FAILPOINT="engine.archive.stored")
    with suppress(SnapshotdError):
        Sandbox.connect(mine.id, client=dying.client).exec(words)
    assert dying.process.wait(60) == failpoints.EXIT_CODE
    dying.kill()
    dying.close()
    fleet.pass_time(DAY_S)
    south.remove(theirs.id, force=True)
    south.prune(NEWEST)
    fleet.pass_time(DAY_S * 0.8)
    north = fleet.begin("north").client
    head = Sandbox.connect(mine.id, client=north).head()
    wait_published(fleet, head.id)
    assert b"19999" in b"".join(north.output(head.id, "stdout"))
