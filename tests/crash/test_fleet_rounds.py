"""Rounds of faults over two nodes: kill -9, a stop past the lease, a database that goes away. After each, on PostgreSQL and in the
world outside: one head, no irreversible call twice, every published snapshot readable. Real daemons, a real server."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshotd.client import Sandbox
from snapshotd.client.client import Snapshotd
from snapshotd.errors import Conflict, SnapshotdError, Undecided, UsageError
from tests import long
from tests.node_rig import TERMS_MS, Fleet, await_that, own_fleet

EVENTS = 5
BRANCHED = """
SELECT t.id, s.parent, count(*) FROM snapshotd.snapshots s JOIN snapshotd.trajectories t ON t.pk = s.trajectory
GROUP BY t.id, s.parent HAVING count(*) > 1
"""
HEADS = """
SELECT o.trajectory, o.head, h.id FROM snapshotd_fleet.owners o JOIN snapshotd.trajectories t ON t.id = o.trajectory
JOIN snapshotd.snapshots h ON h.pk = t.head WHERE o.head IS DISTINCT FROM h.id
"""


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with tempfile.TemporaryDirectory(prefix="node-") as name, own_fleet(Path(name)) as made:
        yield made


@pytest.fixture
def world() -> Iterator[Path]:
    """A file that a command in a plain folder can write to: Landlock lets it write nowhere else."""
    with tempfile.TemporaryDirectory(prefix="node-", dir="/dev/shm") as name:
        Path(name).chmod(0o777)
        yield Path(name, "world")


class Round:
    """One trajectory that goes from node to node. `owner`: the node where it is."""

    def __init__(self, fleet: Fleet, world: Path, seed: int) -> None:
        self.fleet, self.world, self._chance = fleet, world, random.Random(seed)
        self.owner, self.other = "north", "south"
        for node in (self.owner, self.other):
            fleet.begin(node)
        self.line = Sandbox.create(client=self.client(self.owner)).id
        self._number = 0
        self.step()

    def client(self, node: str) -> Snapshotd:
        return self.fleet.nodes[node].client

    def step(self) -> None:
        """One irreversible call, and a file."""
        self._number += 1
        call = f"call-{self._number}"
        script = f"echo {call} > last; snapshotd-agent run {call} --side-effect irreversible -- sh -c 'echo {call} >> {self.world}'"
        box = Sandbox.connect(self.line, client=self.client(self.owner))
        try:
            assert box.exec(script).exit_code == 0
        except Undecided:
            self.decide()

    def decide(self) -> None:
        """Say of every undecided call what the world says."""
        happened = self.world.read_text().split() if self.world.exists() else []
        rows = self.fleet.ask("SELECT call, said FROM snapshotd_fleet.intents WHERE state = 'undecided'")
        retry = [call for call, said in rows if not any(f'"{one}"' in said for one in happened)]
        skip = [call for call, _ in rows if call not in retry]
        if rows:
            self.client(self.owner).resume(self.line, retry=retry, skip=skip)

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
            except Conflict:
                return False
            return True

        await_that(taken, "the trajectory is not taken over")
        self.owner, self.other = self.other, self.owner
        self.decide()

    def kill(self) -> None:
        """kill -9 of the owner; it comes back when the other one has the trajectory."""
        daemon = self.fleet.nodes[self.owner]
        daemon.kill()
        self.move()
        daemon.close()
        self.fleet.begin(self.other)

    def stop(self) -> None:
        """The owner stands still past its lease, and goes on."""
        process = self.fleet.nodes[self.owner].process
        os.kill(process.pid, signal.SIGSTOP)
        try:
            self.move()
        finally:
            os.kill(process.pid, signal.SIGCONT)
        await_that(
            lambda: self.client(self.other).status()["owned_count"] == self._owned_by(self.other), "it does not notice"
        )

    def lose_database(self) -> None:
        """PostgreSQL goes away, perhaps for longer than the leases, and comes back."""
        self.fleet.server.stop()
        try:
            self.step()
        except AssertionError:
            pass  # the irreversible call was refused, and did not run
        time.sleep(self._chance.choice([0.2, TERMS_MS[0] / 1000]))
        self.fleet.server.start()
        await_that(lambda: self.client(self.owner).status()["node_state"] == "leased", "the node does not go on")

    def run(self) -> None:
        await_that(self.published, "nothing is published")
        for _ in range(EVENTS):
            event: Callable[[], None] = self._chance.choice([self.step, self.kill, self.stop, self.lose_database])
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

    def _read(self, snapshot: str) -> None:
        client = self.client(self.owner)
        try:
            list(client.diff(snapshot))
        except SnapshotdError as exc:
            raise AssertionError(f"published snapshot {snapshot} cannot be read: {exc}") from exc

    def _owned_by(self, node: str) -> int:
        return int(self.fleet.ask(f"SELECT count(*) FROM snapshotd_fleet.owners WHERE node = '{node}'")[0][0])


@pytest.mark.parametrize("seed", long.seeds(1, 5))
def test_no_fault_makes_two_heads_or_repeats_a_call_or_loses_a_snapshot(fleet: Fleet, world: Path, seed: int) -> None:
    Round(fleet, world, seed).run()
