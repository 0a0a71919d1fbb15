"""Rounds of faults over two nodes: kill -9, a stop past the lease, a database that goes away, hangs, or whose clock jumps by a minute, a
bucket that is away, slow or answers 503, and collections of garbage by one node and by two at once. After each, on PostgreSQL and in
the world outside: one head, no irreversible call twice, every published snapshot readable, what is pinned is there. Real daemons, a
real PostgreSQL server, and moto behind a faulty way; the clocks of the nodes differ by a minute.

    SNAPSHOTD_TEST=all SNAPSHOTD_ROUNDS=30 pytest tests/crash/test_fleet_rounds.py
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import boto3
import pytest

from snapshotd.api.storage import Policy
from snapshotd.client import Sandbox
from snapshotd.client.client import Snapshotd
from snapshotd.errors import Conflict, DataLoss, SnapshotdError, Unavailable, Undecided, Unsupported, UsageError
from tests import long, s3_service
from tests.faulty_service import FaultyService, Manner
from tests.node_rig import TERMS_MS, Fleet, await_that, own_fleet

EVENTS = 5
ROUNDS = int(os.environ.get("SNAPSHOTD_ROUNDS", "5"))
"""In the long set."""
DAY_S = 25 * 3600
NEWEST = Policy(keep_last=2)
BRANCHED = """
SELECT t.id, s.parent, count(*) FROM snapshotd.snapshots s JOIN snapshotd.trajectories t ON t.pk = s.trajectory
GROUP BY t.id, s.parent HAVING count(*) > 1
"""
HEADS = """
SELECT o.trajectory, o.head, h.id FROM snapshotd_fleet.owners o JOIN snapshotd.trajectories t ON t.id = o.trajectory
JOIN snapshotd.snapshots h ON h.pk = t.head WHERE o.head IS DISTINCT FROM h.id
"""


@pytest.fixture
def bucket() -> Iterator[FaultyService]:
    with s3_service.running() as endpoint, closing(FaultyService(int(endpoint.rpartition(":")[2]))) as made:
        yield made


@pytest.fixture
def fleet(bucket: FaultyService) -> Iterator[Fleet]:
    endpoint = f"http://127.0.0.1:{bucket.port}"
    store = f"s3://{s3_service.make_bucket(endpoint)}/fleet?endpoint={endpoint}"
    with tempfile.TemporaryDirectory(prefix="node-") as name, own_fleet(Path(name), store) as made:
        yield made


@pytest.fixture
def world() -> Iterator[Path]:
    """A file that a command in a plain folder can write to: Landlock lets it write nowhere else."""
    with tempfile.TemporaryDirectory(prefix="node-", dir="/dev/shm") as name:
        Path(name).chmod(0o777)
        yield Path(name, "world")


class Round:
    """One trajectory that goes from node to node. `owner`: the node where it is."""

    def __init__(self, fleet: Fleet, bucket: FaultyService, world: Path, seed: int) -> None:
        self.fleet, self.bucket, self.world, self._chance = fleet, bucket, world, random.Random(seed)
        self.owner, self.other = "north", "south"
        fleet.have_clock()
        self.events: list[str] = []
        for node in (self.owner, self.other):
            self.begin(node)
        self.line = Sandbox.create(client=self.client(self.owner)).id
        self.first = self.client(self.owner).trajectory(self.line).head
        """No rule gives it up."""
        self._number = 0
        self.step()
        self.pin()

    def begin(self, node: str) -> None:
        self.fleet.begin(node, SMALL_OFF="60" if node == "south" else "0")

    def pin(self) -> None:
        """A fork on the other node, of which no other one knows, of a snapshot that no rule keeps."""
        box = Sandbox.connect(self.line, client=self.client(self.owner))
        assert box.exec("echo pinned > last").exit_code == 0
        self.pinned, self.reader = box.head().id, self.other
        self.client(self.owner).flush(self.line, published=True)
        self.client(self.reader).fork(self.pinned)
        self.step()

    def client(self, node: str) -> Snapshotd:
        return self.fleet.nodes[node].client

    def step(self) -> None:
        """One irreversible call, and a file. On a loaded machine a lease may be over for a moment."""

        def done() -> bool:
            try:
                self._try_step()
            except Unavailable:
                self._await_leases()
                return False
            return True

        await_that(done, "no step is taken", 120)

    def _step_or_not(self) -> None:
        with suppress(AssertionError, Unavailable):  # the irreversible call was refused, and did not run
            self._try_step()

    def _try_step(self) -> None:
        self._number += 1
        call = f"call-{self._number}"
        script = f"echo {call} > last; snapshotd-agent run {call} --side-effect irreversible -- sh -c 'echo {call} >> {self.world}'"
        box = Sandbox.connect(self.line, client=self.client(self.owner))
        try:
            ended = box.exec(script)
        except Undecided:
            self.decide()
            return
        if ended.exit_code and ("lease" in ended.stderr or "does not answer" in ended.stderr):
            raise Unavailable(ended.stderr)
        assert ended.exit_code == 0, ended.stderr

    def decide(self) -> None:
        """Say of every call that was cut off what the world says."""
        happened = self.world.read_text().split() if self.world.exists() else []
        client = self.client(self.owner)
        asked = [one for one in client.journal(self.line) if one.status is None and one.side_effect == "irreversible"]
        skip = [one.id for one in asked if one.name in happened]
        retry = [one.id for one in asked if one.id not in skip]
        if asked:
            client.resume(self.line, retry=retry, skip=skip)

    def published(self) -> bool:
        return bool(
            self.fleet.ask(
                f"SELECT 1 FROM snapshotd_fleet.owners WHERE trajectory = '{self.line}' AND head IS NOT NULL"
            )
        )

    def move(self) -> None:
        """The other node takes the trajectory over, once the owner's lease is over."""

        def taken() -> bool:
            try:
                self.client(self.other).resume(self.line)
            except UsageError:
                return True  # it has no program
            except (Conflict, Unavailable):
                return False
            return True

        await_that(taken, "the trajectory is not taken over", 120)
        self.owner, self.other = self.other, self.owner
        self.decide()

    def kill(self) -> None:
        """kill -9 of the owner; it comes back when the other one has the trajectory."""
        daemon = self.fleet.nodes[self.owner]
        daemon.kill()
        self.move()
        daemon.close()
        self.begin(self.other)

    def stop(self) -> None:
        """The owner stands still past its lease, and goes on."""
        process = self.fleet.nodes[self.owner].process
        os.kill(process.pid, signal.SIGSTOP)
        try:
            self.move()
        finally:
            os.kill(process.pid, signal.SIGCONT)
        await_that(
            lambda: self.client(self.other).status()["owned_count"] == self._owned_by(self.other),
            "it does not notice",
            120,
        )

    def lose_database(self) -> None:
        """PostgreSQL goes away, perhaps for longer than the leases, and comes back."""
        self._step_without_database(self.fleet.server.stop, self.fleet.server.start)

    def hang_database(self) -> None:
        """PostgreSQL's processes stand still, and close nothing."""
        send = self.fleet.server.send
        self._step_without_database(lambda: send(signal.SIGSTOP), lambda: send(signal.SIGCONT))

    def _step_without_database(self, end: Callable[[], None], begin: Callable[[], None]) -> None:
        """A step that begins without it; once the lease is over the sandbox stands still until it is back."""
        end()
        try:
            with ThreadPoolExecutor(1) as pool:
                stepping = pool.submit(self._step_or_not)
                time.sleep(self._chance.choice([0.2, TERMS_MS[0] / 1000]))
                begin()
                stepping.result()
        finally:
            self.fleet.server.send(signal.SIGCONT)
        self._await_leases()

    def jump_clock(self) -> None:
        """That of the database."""
        self.fleet.jump(self._chance.choice([-60, 60]))
        self._await_leases()

    def lose_bucket(self) -> None:
        """Steps go on, and are published when it answers."""
        manners: tuple[Manner, ...] = ("away", "slow", "refusing")
        with self.bucket.being(self._chance.choice(manners)):
            self.step()
            if self._chance.random() < 0.5:
                asked = self.bucket.asked
                await_that(lambda: self.bucket.asked > asked, "nothing is to be published")
        self._await_published()

    def collect(self) -> None:
        """Three collections with the grace between them, each by a node or by both at once."""
        for _ in range(3):
            self._await_published()
            nodes = self._chance.choice([[self.owner], [self.other], [self.owner, self.other]])
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(self._prune, nodes))
            self.fleet.pass_time(DAY_S)

    def _prune(self, node: str) -> None:
        with suppress(Conflict):  # the other one is at it
            self.client(node).prune(NEWEST)

    def _await_published(self) -> None:
        for node in (self.owner, self.other):
            await_that(
                lambda node=node: not self.client(node).status()["unpublished_count"], f"{node} does not publish", 120
            )

    def _await_leases(self) -> None:
        for node in (self.owner, self.other):
            await_that(
                lambda node=node: self.client(node).status()["node_state"] == "leased", f"{node} does not go on", 60
            )

    def run(self) -> None:
        await_that(self.published, "nothing is published")
        events = [self.step, self.kill, self.stop, self.lose_database, self.hang_database, self.jump_clock]
        for _ in range(EVENTS):
            event: Callable[[], None] = self._chance.choice([*events, self.lose_bucket, self.collect, self.collect])
            self.events.append(event.__name__)
            event()
            self.check(event.__name__)
            self.step()
        self.check("the end")

    def check(self, after: str) -> None:
        assert not self.fleet.ask(BRANCHED), f"two heads after {after}"
        assert not self.fleet.ask(HEADS), f"the rows and the heads differ after {after}"
        made = Counter(self.world.read_text().split() if self.world.exists() else [])
        assert not [call for call, count in made.items() if count > 1], f"an irreversible call ran twice after {after}"
        known = "\n".join(said for (said,) in self.fleet.ask("SELECT said FROM snapshotd_fleet.intents"))
        assert not [call for call in made if f'"{call}"' not in known], f"a call ran without its intent, after {after}"
        for (snapshot,) in self.fleet.ask(
            f"SELECT snapshot FROM snapshotd_fleet.published WHERE trajectory = '{self.line}'"
        ):
            self._read(snapshot)
        found = b"".join(self.client(self.reader).cat(self.pinned, "/workspace/last"))
        assert found == b"pinned\n", f"what is pinned is gone after {after}"

    def _read(self, snapshot: str) -> None:
        client = self.client(self.owner)
        try:
            for change in client.diff(self.first, snapshot):
                if change.path.endswith("last"):
                    b"".join(client.cat(snapshot, "/workspace/last"))
        except SnapshotdError as exc:
            raise AssertionError(f"published snapshot {snapshot} cannot be read: {exc}") from exc

    def _owned_by(self, node: str) -> int:
        return int(self.fleet.ask(f"SELECT count(*) FROM snapshotd_fleet.owners WHERE node = '{node}'")[0][0])


@pytest.mark.long  # the bucket does not answer in a round, too
def test_a_bucket_that_does_not_answer_is_called_so(fleet: Fleet, bucket: FaultyService) -> None:
    north, south = fleet.begin("north").client, fleet.begin("south").client
    box = Sandbox.create(client=north)
    assert box.exec(["sh", "-c", "head -c 2000000 /dev/urandom > file"]).exit_code == 0  # more than a look brings
    north.flush(box.id, published=True)
    assert [one.id for one in south.log(box.id)] == [one.id for one in north.log(box.id)]
    with bucket.being("refusing"), pytest.raises(Unavailable, match=r"reading .* failed: .* answered 503"):
        b"".join(south.cat(box.head().id, "/workspace/file"))
    assert len(b"".join(south.cat(box.head().id, "/workspace/file"))) == 2_000_000


@pytest.mark.long  # e2e/test_damage.py repairs what one daemon has
def test_a_repair_gives_up_an_output_that_keeps_a_node_from_publishing(fleet: Fleet, bucket: FaultyService) -> None:
    north, south = fleet.begin("north"), fleet.begin("south").client
    box = Sandbox.create(client=north.client)
    north.client.flush(box.id, published=True)
    with pytest.raises(Unsupported, match="from a backup of the bucket"):
        north.client.repair()
    with bucket.being("refusing"):
        assert box.exec(["sh", "-c", "echo kept > file; echo spoiled"]).stdout == "spoiled\n"
        spoiled = box.head()
        spool = fleet.directory / "north" / "state" / "repo" / "blobs"
        for blob in spool.glob("*/*"):
            data = blob.read_bytes()
            blob.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        assert box.exec(["true"]).exit_code == 0
    with pytest.raises((DataLoss, Unavailable), match="`snapshotd repair`"):
        north.client.flush(box.id)
    assert north.client.repair().actions == (f"an output of snapshot {spoiled.id[:12]} is damaged and was given up",)
    north.client.flush(box.id, published=True)
    assert b"".join(south.cat(box.head().id, "/workspace/file")) == b"kept\n"
    assert [one.output for one in south.snapshot(spoiled.id).tool.damaged] == ["stdout"]


@pytest.mark.long  # a bucket that does not answer, above
def test_the_status_says_what_keeps_a_node_from_publishing(fleet: Fleet) -> None:
    """One node's segment that is damaged in the bucket keeps all others from it: nothing may build upon what is not known."""
    north, south = fleet.begin("north").client, fleet.begin("south").client
    box, other = (Sandbox.create(client=client) for client in (north, south))
    for one, client in ((box, north), (other, south)):
        assert one.exec(["true"]).exit_code == 0
        client.flush(one.id, published=True)
    assert south.status()["node_failure"] == ""
    address = urlsplit(fleet.store)
    bucket = boto3.client("s3", endpoint_url=parse_qs(address.query)["endpoint"][0])
    (number,) = fleet.ask("SELECT number + 1 FROM snapshotd_fleet.segments WHERE node = 'north'")[0]
    bucket.put_object(Bucket=address.netloc, Key=f"fleet/nodes/north/index/{number:010}", Body=b"no segment")
    fleet.ask("UPDATE snapshotd_fleet.segments SET number = number + 1 WHERE node = 'north'")
    said = await_that(lambda: south.status()["node_failure"], "it says nothing")
    assert f"index segment {number} of node north is damaged" in said
    assert other.exec(["true"]).exit_code == 0, "nothing else stops"
    assert south.status()["unpublished_count"] == 1
    bucket.delete_object(Bucket=address.netloc, Key=f"fleet/nodes/north/index/{number:010}")
    fleet.ask("UPDATE snapshotd_fleet.segments SET number = number - 1 WHERE node = 'north'")
    south.flush(other.id, published=True)
    await_that(lambda: not south.status()["node_failure"], "it says so still")


@pytest.mark.long  # crash/test_fleet_history.py has its faults one by one
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", long.seeds(1, ROUNDS))
def test_no_fault_makes_two_heads_or_repeats_a_call_or_loses_a_snapshot(
    fleet: Fleet, bucket: FaultyService, world: Path, seed: int
) -> None:
    played = Round(fleet, bucket, world, seed)
    try:
        played.run()
    except BaseException as exc:
        exc.add_note(f"seed {seed}: {', '.join(played.events)}")
        for name, daemon in fleet.nodes.items():
            told = [line for line in daemon.log().splitlines() if '"level": "info"' not in line]
            exc.add_note("\n".join([f"log of {name}:", *told[-30:]]))
        raise
