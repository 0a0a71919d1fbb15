"""The index of texts on a trajectory of many calls: `python -m benchmarks.find [CALLS]`. Needs no root and no daemon.

Each call has a message of 600 bytes and an output of 2,000, lines of this program's own source.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.unit.engine.test_finding import World, begun

_QUERIES = ("needle", "self", '"from __future__ import"', "snap*", "missingword")


def main() -> None:
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    lines = [line for path in Path("snapshotd").rglob("*.py") for line in path.read_text().splitlines() if line.strip()]
    rng = random.Random(3)

    def text(size: int) -> str:
        at = rng.randrange(len(lines) - 1000)
        return "\n".join(lines[at : at + 1000])[:size]

    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        world.filling.close()
        _, last = begun(world, "big")
        size = 0
        for number in range(calls):
            said, printed = text(600), text(2000) + "\nneedle" * (number == calls // 2)
            size += len(said) + len(printed)
            last = world.step(last, said, output=printed.encode(), arguments={"command": f"step {number}"})
        world.close()
        world.open()
        began, cpu = time.monotonic(), time.process_time()
        while not world.filling.catch_up(60):
            pass
        took, cpu = time.monotonic() - began, time.process_time() - cpu
        world.close()
        share = world.path.stat().st_size / size
        print(f"{calls} calls, {size / 1e6:.1f} MB of text: index {share:.0%} of it, made in {took:.1f} s", end=", ")
        print(f"{cpu / calls * 1e3:.2f} ms of processor time a call")
        world.open()
        for query in _QUERIES:
            times = []
            for _ in range(5):
                began = time.monotonic()
                hits = len(world.find(query).hits)
                times.append(time.monotonic() - began)
            print(f"{query:28} {hits:3} excerpts {statistics.median(times) * 1e3:8.1f} ms")
        world.close()
        world.catalog.close()


if __name__ == "__main__":
    main()
