"""A long trajectory: what looking and forking cost, and what the daemon's processes hold, as its snapshots grow to ten
thousand. As root:

    python benchmarks/many.py [--runtime runc] [--at 100,1000,3000,10000] [--files 500] [--image TAR] [--json FILE]

One agent in one sandbox writes one file a tool call, over and over the same `--files` files in 50 folders; each call is
a snapshot, taken over the agent protocol. When so many are there and stored as `--at` says, every verb is asked
`ROUNDS` times over the API, and each is given as a median in milliseconds:

    log 50, log all      the newest 50 snapshots, and every one (what that costs grows with what it returns; also per snapshot)
    show new, show old   the newest snapshot and the first
    diff neighbours      of the newest 16 snapshots each against the one before; and the slowest of them
    diff ends            the first against the newest
    cat                  a file of the newest
    fork                 the newest, until the sandbox stands; and until its first command's output is here
    rm                   of that fork
    fork old             the first snapshot, until its first command's output is here

Memory is the proportional and the resident size of the daemon and of each of its child processes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from snapshotd.client import Snapshotd

ROUNDS = 15
NEIGHBOURS = 16
MIB = 1 << 20
AGENT = """
import os, sys
from snapshotd.agent import tool

files = int(sys.argv[3])

@tool
def write(number):
    os.makedirs(f"d{number % 50}", exist_ok=True)
    with open(f"d{number % 50}/f{number % files}", "w") as f:
        f.write(f"step {number}\\n" * 20)

for number in range(int(sys.argv[1]), int(sys.argv[2])):
    write(number)
"""


def median_ms(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def steps(client: Snapshotd, trajectory: str, first: int, end: int, files: int) -> float:
    """Make snapshots up to number `end`, until all are stored. Milliseconds a step."""
    began = time.perf_counter()
    done = client.exec(trajectory, ["python3", "agent.py", str(first), str(end), str(files)], cwd="/workspace")
    if done.exit_code != 0:
        sys.exit(f"the agent failed with exit code {done.exit_code}")
    client.flush()
    return (time.perf_counter() - began) / (end - first) * 1e3


def verbs(client: Snapshotd, trajectory: str, first: str) -> dict[str, float]:
    """The table's row."""
    newest = client.log(trajectory, last=NEIGHBOURS + 2)[
        :-1
    ]  # the very last is the command's own, which changed nothing
    last, count = newest[-1], client.log(trajectory, last=1)[0].seq + 1
    path = next(
        c.path
        for c in client.diff(newest[-2].id, last.id)
        if c.path.startswith("/workspace/d") and c.path.count("/") == 3
    )
    neighbours = [_diff(client, a.id, b.id, 3) for a, b in itertools.pairwise(newest)]
    whole = median_ms(lambda: client.log(trajectory), 5)
    return {
        "log 50": median_ms(lambda: client.log(trajectory, last=50)),
        "log all": whole,
        "log all, us each": whole * 1e3 / count,
        "show new": median_ms(lambda: client.snapshot(last.id)),
        "show old": median_ms(lambda: client.snapshot(first)),
        "diff neighbours": statistics.median(neighbours),
        "slowest of them": max(neighbours),
        "diff ends": _diff(client, first, last.id, ROUNDS),
        "cat": median_ms(lambda: list(client.cat(last.id, path))),
        **forks(client, last.id, path),
        "fork old": forks(client, first, b"etc/passwd")["fork, command"],
    }


def _diff(client: Snapshotd, a: str, b: str, rounds: int) -> float:
    return median_ms(lambda: list(client.diff(a, b)), rounds)


def forks(client: Snapshotd, snapshot: str, path: str) -> dict[str, float]:
    """Bare, with the first command, and taken away."""
    bare, command, gone = [], [], []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        (made,) = client.fork(snapshot).trajectories
        stood = time.perf_counter()
        client.exec(made.id, ["cat", path])
        done = time.perf_counter()
        client.remove(made.id, force=True)
        gone.append(time.perf_counter() - done)
        bare.append(stood - began)
        command.append(done - began)
        time.sleep(0.5)  # the pool makes the next warm container meanwhile
    return {
        name: statistics.median(times) * 1e3
        for name, times in (("fork", bare), ("fork, command", command), ("rm", gone))
    }


def memory(client: Snapshotd) -> dict[str, float]:
    """MiB of every process of the daemon, by its role: resident, and proportional."""
    daemon = client.version().pid
    found: dict[str, float] = {}
    for pid in (daemon, *_children(daemon)):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        role = (
            "daemon"
            if pid == daemon
            else next((w.decode() for w in words if w in (b"archive", b"cold", b"lazy", b"browse")), "")
        )
        if not role and b"snapshotd.engine.storage.worker" in words:
            role = "worker"
        if role:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            for name, field in (("RSS", "Rss"), ("PSS", "Pss")):
                match = re.search(rf"^{field}:\s+(\d+) kB", rollup, re.MULTILINE)
                assert match is not None
                found[f"{role} {name}"] = int(match[1]) * 1024 / MIB
    found["daemon descriptors"] = len(os.listdir(f"/proc/{daemon}/fd"))
    found["daemon threads"] = len(os.listdir(f"/proc/{daemon}/task"))
    return found


def _children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def measure(client: Snapshotd, options: argparse.Namespace, folder: Path) -> dict[int, dict[str, float]]:
    (folder / "agent.py").write_text(AGENT)
    made, first = client.create(runtime=options.runtime, workspace=folder)
    report: dict[int, dict[str, float]] = {}
    done = 0
    for until in (int(word) for word in options.at.split(",")):
        step = steps(client, made.id, done, until, options.files)
        done = until
        if not report:
            verbs(client, made.id, first.id)  # the first time, modules are loaded and containers made
        layers = client.log(made.id, last=1)[0].layers
        before = memory(client)  # without what the looking itself leaves in caches
        row = {"a step": step, **verbs(client, made.id, first.id), "layers of the newest": layers}
        report[until] = {
            **row,
            **memory(client),
            "daemon RSS before looking": before["daemon RSS"],
            "load": os.getloadavg()[0],
        }
        print(f"{until}: {json.dumps(report[until])}", file=sys.stderr, flush=True)
    client.remove(made.id, force=True)
    return report


def table(report: dict[int, dict[str, float]]) -> str:
    """The report as Markdown."""
    names = list(dict.fromkeys(name for row in report.values() for name in row))
    lines = ["| snapshots | " + " | ".join(f"{count:,}" for count in report) + " |", "|---|" + "---|" * len(report)]
    lines.extend(
        f"| {name} | " + " | ".join(f"{row[name]:.1f}" if name in row else "" for row in report.values()) + " |"
        for name in names
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", default="runc")
    parser.add_argument("--at", default="100,1000,3000,10000")
    parser.add_argument("--files", type=int, default=500)
    parser.add_argument(
        "--image", type=Path, help="an archive of a root with Python, instead of the built default image"
    )
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="snapshotd-bench-"))
    client = Snapshotd(state_dir=base / "state")
    (base / "workspace").mkdir()
    try:
        if options.image:
            client.import_image(str(options.image), name="default", progress=lambda line: print(line, file=sys.stderr))
        else:
            client.build_image("default", progress=lambda line: print(line, file=sys.stderr))
        report = measure(client, options, base / "workspace")
        print(table(report))
        if options.json:
            options.json.write_text(json.dumps(report, indent=2) + "\n")
    finally:
        subprocess.run(
            [sys.executable, "-m", "snapshotd", "--state-dir", str(base / "state"), "daemon", "--stop"], check=False
        )
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
