"""What going back and going on cost: `python benchmarks/mind.py [--state-dir DIR]` (as root; else with a daemon and an image of its own).

Rewind, in place, over a step that made one file and over one that made 20,000: the ratio should be near 1. Resume: the time in which a
program meets 100 recorded calls, as it sees it itself. Figures of one run on one machine: compare within a run.
"""

from __future__ import annotations

import argparse
import base64
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from snapshotd.client import Snapshotd

ROUNDS = 9
CALLS = 100
PROGRAM = f"""
import os, time
from snapshotd.agent import tool
first_time = []
@tool
def call(number):
    first_time.append(number)
    with open("/workspace/log", "a") as log:
        log.write("%d\\n" % number)
began = time.perf_counter()
for number in range({CALLS}):
    call(number)
print(time.perf_counter() - began, flush=True)
if first_time:
    os._exit(9)
"""


def rewinds(client: Snapshotd, script: str) -> tuple[float, float]:
    """Medians, in milliseconds, of a rewind over what `script` does and of its undo."""
    trajectory, first = client.create(runtime="runc")
    client.exec(trajectory.id, ["sh", "-c", script])
    taken: dict[str, list[float]] = {"rewind": [], "undo": []}
    for _ in range(ROUNDS):
        began = time.perf_counter()
        client.rewind(trajectory.id, first.id)
        between = time.perf_counter()
        client.undo(trajectory.id)
        taken["rewind"].append((between - began) * 1e3)
        taken["undo"].append((time.perf_counter() - between) * 1e3)
    client.remove(trajectory.id, force=True)
    return statistics.median(taken["rewind"]), statistics.median(taken["undo"])


def replay(client: Snapshotd, folder: Path) -> tuple[float, float]:
    """Seconds for a program's calls when they run, and when they are met again."""
    program = folder / "agent.py"
    program.write_text(PROGRAM)
    trajectory = client.run(agent=program, runtime="runc")
    ran = float(_output(client, trajectory.id))
    client.resume(trajectory.id)
    met = float(_output(client, trajectory.id))
    client.remove(trajectory.id, force=True)
    return ran, met


def _output(client: Snapshotd, trajectory: str) -> str:
    events = [event for event in client.events(trajectory) if event["event"] == "output"]
    return b"".join(base64.b64decode(event["data_b64"]) for event in events).decode().splitlines()[-1]


def measure(client: Snapshotd, folder: Path) -> None:
    one, undo_one = rewinds(client, "echo 1 > file")
    many, undo_many = rewinds(client, "mkdir d; cd d; for i in $(seq 20000); do echo $i > $i; done")
    print(f"rewind: one file {one:.1f} ms, 20,000 files {many:.1f} ms, ratio {many / one:.2f}")
    print(f"undo: one file {undo_one:.1f} ms, 20,000 files {undo_many:.1f} ms, ratio {undo_many / undo_one:.2f}")
    ran, met = replay(client, folder)
    print(f"{CALLS} calls: {ran:.2f} s when they run, {met:.2f} s when they are met again")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state-dir", type=Path, help="of a daemon that has the image `default`")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="snapshotd-bench-"))
    client = Snapshotd(state_dir=options.state_dir or folder / "state")
    try:
        if options.state_dir is None:
            client.build_image("default", progress=lambda line: print(line, file=sys.stderr))
        measure(client, folder)
    finally:
        if options.state_dir is None:
            subprocess.run([sys.executable, "-m", "snapshotd", "--state-dir", str(folder / "state"), "daemon", "--stop"], check=False)
        shutil.rmtree(folder, ignore_errors=True)


main()
