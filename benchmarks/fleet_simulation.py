"""Placement in a large fleet: what a fork and a node cost as both grow, without any machine.

    python -m benchmarks.fleet_simulation [--nodes 10,100,1000] [--trajectories 100] [--json FILE]

Trajectories begin on nodes of 64 processors and 256 GiB, and are forked in groups of 1 to 64 (a processor and 2 GiB each),
until there are `--trajectories` for each node; a third of them end as others begin. Four callers place at the same time, each by
a roster that is as old as the last round, so reservations fail as they do in a fleet: the guarded update is a function
here. A node's cost is what its renewal asks of the database: rows that are read and written.

The figures are of the placement alone. What a fork costs on its node is in `many.py`, what a transaction costs is the
database's.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from snapshotd.catalog.postgres.catalog import open_database
from snapshotd.errors import Conflict, LimitExceeded
from snapshotd.fleet.base import Claim, NodeID
from snapshotd.fleet.coordination import PostgresCoordination
from snapshotd.fleet.places import ForkBlock, ForkNeed, NodeRoom, Roster
from snapshotd.fleet.tables import FleetTables
from snapshotd.types import SnapshotID, TrajectoryID
from tests.postgres_server import PostgresServer

GIB = 1 << 30
CPUS, MEMORY_BYTES, STARTING_MOST = 128.0, 512 * GIB, 16
CALLERS, ROUND = 4, 0.3
"""A roster is read again after so many requests for each node, which is also when sandboxes have started: together they
ask for a third of the starts that the nodes allow at once."""
TRANSACTIONS = 200
FORK = ForkNeed(2 * GIB, 1.0, base="")


@dataclass
class Figures:
    forks: int = 0
    requests: int = 0
    refused: int = 0
    blocks: int = 0
    cold: int = 0
    full: int = 0
    spent_s: float = 0.0


class Fleet:
    """The truth about the nodes, which callers know as of the last round."""

    def __init__(self, nodes: int, chance: random.Random) -> None:
        self.rooms = {
            node: NodeRoom(node, cpus=CPUS, free_bytes=MEMORY_BYTES, starting_most=STARTING_MOST, lease_ns=1)
            for node in (NodeID(f"node-{number}") for number in range(nodes))
        }
        self.chance = chance
        self.live: deque[tuple[NodeID, int]] = deque()
        self.count = 0
        self.figures = Figures()

    def reserve(self, block: ForkBlock, need: ForkNeed) -> str:
        """The guarded update."""
        room = self.rooms[block.node]
        if room.free_bytes < block.count * need.memory_bytes or room.starting + block.count > room.starting_most:
            self.figures.refused += 1
            raise Conflict("taken")
        self.figures.blocks += 1
        self.figures.cold += need.base not in room.warm
        self.rooms[block.node] = replace(
            room,
            free_bytes=room.free_bytes - block.count * need.memory_bytes,
            promised_cpus=room.promised_cpus + block.count * need.cpus,
            starting=room.starting + block.count,
            warm=frozenset((*list(room.warm)[-31:], need.base)),
        )
        self.live.append((block.node, block.count))
        self.count += block.count
        return ""

    def end_oldest(self) -> None:
        node, count = self.live.popleft()
        room = self.rooms[node]
        self.count -= count
        self.rooms[node] = replace(
            room,
            free_bytes=room.free_bytes + count * FORK.memory_bytes,
            promised_cpus=room.promised_cpus - count * FORK.cpus,
        )

    def start_all(self) -> list[Roster]:
        """Sandboxes have started; every caller reads the nodes again."""
        self.rooms = {node: replace(room, starting=0) for node, room in self.rooms.items()}
        return [Roster(list(self.rooms.values())) for _ in range(CALLERS)]

    def request(self, roster: Roster) -> None:
        """A group of forks of a snapshot somewhere."""
        chance, figures = self.chance, self.figures
        size = chance.choice((1, 2, 4, 8, 16, 32, 64))
        home = self.live[chance.randrange(len(self.live))][0] if self.live else None
        base = f"base-{chance.randrange(64)}" if home is None or chance.random() < 0.1 else ""
        known = sorted(self.rooms[home].warm) if home is not None and not base else []
        need = replace(FORK, home=home, base=base or (known[0] if known else "base-0"))
        began = time.perf_counter()
        try:
            roster.place(need, size, lambda block: self.reserve(block, need), chance)
            figures.forks += size
            figures.requests += 1
        except LimitExceeded:
            figures.full += 1
        figures.spent_s += time.perf_counter() - began

    def load(self) -> list[float]:
        return sorted(room.promised_cpus / room.cpus for room in self.rooms.values())


def simulate(nodes: int, trajectories: int) -> dict[str, float]:
    """The table's row."""
    fleet = Fleet(nodes, random.Random(nodes))
    target = nodes * trajectories
    while fleet.figures.forks < target * 1.5:
        rosters = fleet.start_all()
        for number in range(max(1, int(ROUND * nodes))):
            fleet.request(rosters[number % CALLERS])
            while fleet.count > target:
                fleet.end_oldest()
    figures, load = fleet.figures, fleet.load()
    return {
        "trajectories": fleet.count,
        "placement of a fork": figures.spent_s / figures.forks * 1e6,
        "reservations for 100 forks": (figures.blocks + figures.refused) / figures.forks * 100,
        "refused": figures.refused / figures.forks * 100,
        "cold blocks": figures.cold / figures.forks * 100,
        "load p50": statistics.median(load) * 100,
        "load max": load[-1] * 100,
        "no room": figures.full,
    }


def when_full(nodes: int) -> float:
    """Microseconds of a placement when one node in a hundred, and at least one, has room."""
    rooms = list(Fleet(nodes, random.Random(1)).rooms.values())
    few = max(1, nodes // 100)
    rooms = rooms[:few] + [replace(room, free_bytes=0) for room in rooms[few:]]
    chance, times = random.Random(2), []
    for _ in range(200):
        roster = Roster(rooms)
        began = time.perf_counter()
        roster.choose(FORK, 8, chance)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def transactions(server: PostgresServer, nodes: int, trajectories: int) -> dict[str, float]:
    """Milliseconds of each, in a fleet of this size."""
    with closing(open_database(server.url)) as database:
        tables = FleetTables(database)
        tables.make()
        coordination = PostgresCoordination(tables)
        server.ask(
            "INSERT INTO snapshotd_fleet.nodes SELECT 'node-' || n, 'host-' || n, 1, 1, 9000000000000000000, false, '{}',"
            f" {MEMORY_BYTES}, 0, 1000000 FROM generate_series(1, {nodes}) n"
        )
        server.ask(
            f"INSERT INTO snapshotd_fleet.owners SELECT 't' || n, 'node-' || (n % {nodes} + 1), 1, 1, 's' || n"
            f" FROM generate_series(1, {nodes * trajectories}) n"
        )
        server.ask("ANALYZE")
        names = [NodeID(f"node-{number % nodes + 1}") for number in range(TRANSACTIONS)]
        room = NodeRoom(names[0], cpus=CPUS, free_bytes=MEMORY_BYTES, starting_most=1_000_000)

        def publish(number: int) -> None:
            claim = Claim(TrajectoryID(f"t{number + 1}"), NodeID(f"node-{(number + 1) % nodes + 1}"), 1, 1)
            head, new = SnapshotID(f"s{number + 1}"), SnapshotID(f"new{number}")
            with coordination.publishing(claim, head, new):
                pass

        figures = {
            "a reservation": _median_ms(lambda number: coordination.reserve(names[number], 8, 1)),
            "publishing": _median_ms(publish),
            "a renewal": _median_ms(lambda number: coordination.renew(names[number], 1, room)),
            "reading the nodes": _median_ms(lambda _: coordination.rooms(), 10),
        }
        server.ask("DROP SCHEMA snapshotd_fleet CASCADE")
    return figures


def _median_ms(work: Callable[[int], object], count: int = TRANSACTIONS) -> float:
    times = []
    for number in range(count):
        began = time.perf_counter()
        work(number)
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def table(report: dict[int, dict[str, float]]) -> str:
    """The report as Markdown."""
    lines = [
        "| nodes, trajectories | placing a fork | reservations for 100 forks | refused | cold blocks | load p50 | load max"
        " | a reservation | publishing | a renewal | reading all nodes | a block in a full fleet |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for nodes, row in report.items():
        cells = [
            f"{nodes:,}, {row['trajectories']:,.0f}",
            f"{row['placement of a fork']:.1f} µs",
            f"{row['reservations for 100 forks']:.1f}",
            f"{row['refused']:.1f}",
            f"{row['cold blocks']:.1f}",
            f"{row['load p50']:.0f} %",
            f"{row['load max']:.0f} %",
            f"{row['a reservation']:.2f} ms",
            f"{row['publishing']:.2f} ms",
            f"{row['a renewal']:.2f} ms",
            f"{row['reading the nodes']:.1f} ms",
            f"{row['full']:.0f} µs",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="10,100,1000")
    parser.add_argument("--trajectories", type=int, default=100, help="for each node")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    report = {}
    with closing(PostgresServer()) as server:
        for nodes in (int(word) for word in options.nodes.split(",")):
            report[nodes] = {
                **simulate(nodes, options.trajectories),
                **transactions(server, nodes, options.trajectories),
                "full": when_full(nodes),
            }
    print(table(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
