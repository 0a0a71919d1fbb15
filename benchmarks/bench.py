"""What a snapshot, a fork and a rewind cost, with distributions. `make bench`, or:

    python benchmarks/bench.py [--runtime runc] [--rounds 60] [--only pauses|commands|scored] [--image TAR] [--json FILE]

Starts a daemon of its own in a temporary state directory (a sparse XFS image where the file system has no reflinks) and
removes it again. Pause: from the moment the daemon is told that the call has ended to the moment the new root is in
place, as recorded with each snapshot. Client: what the agent inside the sandbox waits at the end of a call, its own
parking included. Figures of one run on one machine: compare within a run, and give ratios.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from snapshotd.client import Snapshotd
from snapshotd.kernel.processes import descendants, stat_fields

T = TypeVar("T")
HERE = Path(__file__).parent
SANDBOXES = 8
WARM_UP = 5
"""Commands before those that count."""
SCORED = 100
"""Forks of one snapshot that are scored."""
MIB = 1 << 20
SCENARIOS = {
    "no change": "none",
    "one file": "1-file",
    "200 files": "200-files",
    "5,000 files": "5000-files",
    "4 KiB into 1 GiB": "4k-in-1g",
}


def quantiles(values: list[float]) -> dict[str, float]:
    """p50, p95 and maximum, in milliseconds."""
    ordered = sorted(values)
    return {
        "n": len(ordered),
        "p50": statistics.median(ordered),
        "p95": ordered[int(0.95 * (len(ordered) - 1))],
        "max": ordered[-1],
    }


def pauses(client: Snapshotd, runtime: str, scenario: str, rounds: int) -> dict[str, Any]:
    """One agent run: the daemon's and the agent's view of `rounds` snapshots."""
    trajectory = client.run(agent=HERE / "pause_agent.py", args=[scenario, str(rounds)], runtime=runtime)
    output = b""
    for event in client.events(trajectory.id):
        if event["event"] == "output":
            output += base64.b64decode(event["data_b64"])
    line = json.loads(output.decode().strip().splitlines()[-1])
    measured = [s for s in client.log(trajectory.id) if s.tool.name == "change"]
    client.remove(trajectory.id, force=True)
    methods = {m: sum(s.method == m for s in measured) for m in {s.method for s in measured}}
    return {
        "pause_ms": quantiles([s.pause_ms for s in measured[1:]]),
        "client_ms": quantiles(line["client_ms"][1:]),
        "methods": methods,
    }


def repeated(action: Callable[[], None], rounds: int) -> dict[str, float]:
    seen = []
    for _ in range(rounds):
        start = time.perf_counter()
        action()
        seen.append((time.perf_counter() - start) * 1e3)
        time.sleep(0.3)  # the pool makes the next warm container meanwhile
    return quantiles(seen[1:])


def forks(client: Snapshotd, runtime: str, rounds: int) -> dict[str, Any]:
    """From the request to fork until the first command's output is here, and the command alone in a running sandbox."""
    parent, _ = client.create(runtime=runtime)
    client.exec(parent.id, ["sh", "-c", "mkdir d; cd d; for i in $(seq 2000); do echo $i > $i; done"])
    made: list[str] = []

    def fork() -> None:
        (fork,) = client.fork(parent.id, 1).trajectories
        client.exec(fork.id, ["cat", "d/2000"])
        made.append(fork.id)

    result = {
        "fork to first command": repeated(fork, rounds),
        "command alone": repeated(lambda: _run(client, made[0]), rounds),
    }
    for trajectory in made:
        client.remove(trajectory, force=True)
    client.remove(parent.id, force=True)
    return result


def commands(client: Snapshotd, runtime: str, rounds: int) -> dict[str, Any]:
    """`true` through the client, its snapshot included; the rate of eight sandboxes at once, and the processor's time for
    one command, of the daemon and all that it started."""
    trajectories = [client.create(runtime=runtime)[0].id for _ in range(SANDBOXES)]
    one = trajectories[0]
    numbers = iter(range(10 * rounds))
    result: dict[str, Any] = {
        "nothing changed": quantiles(_timed(lambda: client.exec(one, ["true"]), rounds)),
        "a file changed": quantiles(_timed(lambda: client.exec(one, ["touch", f"f{next(numbers)}"]), rounds)),
    }
    with ThreadPoolExecutor(SANDBOXES) as threads:
        for each in trajectories:
            client.exec(each, ["true"])
        pid = client.version().pid
        used, began = processor_s(pid), time.perf_counter()
        list(threads.map(lambda each: _timed(lambda: client.exec(each, ["true"]), rounds), trajectories))
        took, used = time.perf_counter() - began, processor_s(pid) - used
    for each in trajectories:
        client.remove(each, force=True)
    count = SANDBOXES * (rounds + WARM_UP)
    return {**result, "per second": count / took, "processor": used / count * 1e3}


def _timed(action: Callable[[], object], rounds: int) -> list[float]:
    """Milliseconds of each, one right after the other."""
    seen = []
    for _ in range(rounds + WARM_UP):
        start = time.perf_counter()
        action()
        seen.append((time.perf_counter() - start) * 1e3)
    return seen[WARM_UP:]


def processor_s(pid: int) -> float:
    """Seconds that a process, its live descendants and the ended ones have used."""
    ticks = sum(map(int, stat_fields(pid)[13:15]))
    for each in (pid, *descendants(pid)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            ticks += sum(map(int, stat_fields(each)[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _run(client: Snapshotd, trajectory: str) -> None:
    client.exec(trajectory, ["cat", "d/2000"])


def scored(client: Snapshotd, runtime: str) -> dict[str, Any]:
    """Forks of a snapshot with a file of 1 GiB: each runs a command that changes a file, and a score looks at it. One
    alone, then `SCORED` at once; wall clock and processor for one of these, by phase, and by how much the daemon grows
    while all of them live."""
    parent, _ = client.create(runtime=runtime)
    client.exec(parent.id, ["sh", "-c", "head -c 1G /dev/urandom > large"])
    client.flush()
    _scored(client, parent.id, SANDBOXES)
    time.sleep(2)  # the pool makes the next warm containers meanwhile
    before = resident_bytes(client.version().pid)
    (first, _), (phases, memory) = _scored(client, parent.id, 1), _scored(client, parent.id, SCORED)
    client.remove(parent.id, force=True)
    alone = sum(wall for wall, _ in first.values())
    return {
        "alone": alone,
        "phases": {name: {"wall": wall / SCORED, "processor": used / SCORED} for name, (wall, used) in phases.items()},
        "beyond": (sum(wall for wall, _ in phases.values()) - alone) / (SCORED - 1),
        "MiB": (memory - before) / SCORED / MIB,
    }


def _scored(client: Snapshotd, snapshot: str, n: int) -> tuple[dict[str, tuple[float, float]], int]:
    """Milliseconds of wall clock and processor for all of `n` forks, by phase, and the daemon's memory while they
    live."""
    pid, found = client.version().pid, dict[str, tuple[float, float]]()
    write = ["sh", "-c", "echo $SNAPSHOTD_FORK_INDEX > mine"]

    def phase(name: str, work: Callable[[], T]) -> T:
        used, began = processor_s(pid), time.perf_counter()
        result = work()
        found[name] = ((time.perf_counter() - began) * 1e3, (processor_s(pid) - used) * 1e3)
        return result

    made = phase("fork", lambda: [one.id for one in client.fork(snapshot, n).trajectories])
    with ThreadPoolExecutor(SANDBOXES) as threads:
        phase("command", lambda: list(threads.map(lambda each: client.exec(each, write), made)))
        rows = phase("score", lambda: client.score(made, ["cat", "mine"], number=True, parallel=SANDBOXES))
        memory = resident_bytes(pid)
        list(threads.map(lambda each: client.remove(each, force=True), made))
    if sorted(row.mean or 0 for row in rows) != list(range(n)):
        sys.exit(f"wrong scores: {[row.mean or row.error for row in rows]}")
    return found, memory


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def rewinds(client: Snapshotd, runtime: str, rounds: int) -> dict[str, Any]:
    """Restore in place: a running sandbox gets the files of an older snapshot, whatever changed since."""
    trajectory, _ = client.create(runtime=runtime)
    small = client.exec(trajectory.id, ["sh", "-c", "echo 1 > a"]).snapshot.id
    client.exec(trajectory.id, ["sh", "-c", "mkdir d; cd d; for i in $(seq 5000); do echo $i > $i; done"])
    large = client.trajectory(trajectory.id).head
    turn = iter([small, large] * rounds)
    result = {"restore in place": repeated(lambda: _rewind(client, trajectory.id, next(turn)), rounds)}
    client.remove(trajectory.id, force=True)
    return result


def _rewind(client: Snapshotd, trajectory: str, to: str) -> None:
    client.rewind(trajectory, to)


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    machine = report["machine"]
    lines = [
        f"{machine['cpus']} processors, Linux {machine['kernel']}, layers on {machine['layers']}, runtime {machine['runtime']}",
        "",
        "| scenario | method | pause p50 | p95 | max | agent sees p50 | p95 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in report["pauses"].items():
        p, c = row["pause_ms"], row["client_ms"]
        methods = ", ".join(f"{m} {n}" for m, n in row["methods"].items())
        lines.append(
            f"| {name} | {methods} | {p['p50']:.2f} | {p['p95']:.2f} | {p['max']:.2f} | {c['p50']:.2f} | {c['p95']:.2f} |"
        )
    if "scored" in report:
        one = report["scored"]
        lines += [
            "",
            "| one of a hundred forks of 1 GiB | " + " | ".join(one["phases"]) + " | together |",
            "|---|---|---|---|---|",
        ]
        for kind in ("wall", "processor"):
            row = [phase[kind] for phase in one["phases"].values()]
            lines.append(f"| {kind} | " + " | ".join(f"{each:.1f}" for each in (*row, sum(row))) + " |")
        lines += [
            "",
            f"One fork alone: {one['alone']:.1f}; each beyond the first: {one['beyond']:.1f}; the daemon's memory for each: "
            f"{one['MiB']:.2f} MiB.",
        ]
    lines += ["", "| operation | p50 | p95 | max |", "|---|---|---|---|"]
    for name, row in report["operations"].items():
        lines.append(f"| {name} | {row['p50']:.1f} | {row['p95']:.1f} | {row['max']:.1f} |")
    lines += [
        "",
        "| commands started by | nothing changed p50 | a file changed p50 | fork to first command p50 | per second | processor |",
    ]
    lines += ["|---|---|---|---|---|---|"]
    for name, row in report["commands"].items():
        times = " | ".join(
            f"{row[key]['p50']:.1f}" for key in ("nothing changed", "a file changed", "fork to first command")
        )
        lines.append(f"| {name} | {times} | {row['per second']:.0f} | {row['processor']:.1f} |")
    return "\n".join(lines) + "\n\nAll times in milliseconds."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", default="runc")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--only", choices=["pauses", "commands", "scored"], help="leave out everything else")
    parser.add_argument("--scenario", action="append", choices=list(SCENARIOS), help="of the pauses: not all of them")
    parser.add_argument(
        "--image", type=Path, help="an archive of a root with Python, instead of the built default image"
    )
    options = parser.parse_args()
    state = Path(tempfile.mkdtemp(prefix="snapshotd-bench-"))
    client = Snapshotd(state_dir=state)
    try:
        if options.image:
            client.import_image(str(options.image), name="default", progress=lambda line: print(line, file=sys.stderr))
        else:
            client.build_image("default", progress=lambda line: print(line, file=sys.stderr))
        report: dict[str, Any] = {
            "machine": {
                "cpus": os.cpu_count(),
                "kernel": platform.release(),
                "layers": client.status()["layer_kind"],
                "runtime": options.runtime,
            },
            "pauses": {},
            "operations": {},
            "commands": {},
        }
        if options.only in (None, "pauses"):
            for name in options.scenario or SCENARIOS:
                report["pauses"][name] = pauses(client, options.runtime, SCENARIOS[name], options.rounds)
        if not options.only:
            report["operations"] = {**forks(client, options.runtime, 20), **rewinds(client, options.runtime, 20)}
        if options.only in (None, "scored"):
            report["scored"] = scored(client, options.runtime)
        for starter in ("starter", "runc") if options.only in (None, "commands") else ():
            stop(state)
            os.environ["SNAPSHOTD_EXEC"] = starter
            report["commands"][starter] = {
                **commands(client, options.runtime, options.rounds),
                **forks(client, options.runtime, 20),
            }
        print(table(report))
        if options.json:
            options.json.write_text(json.dumps(report, indent=2) + "\n")
    finally:
        stop(state)
        shutil.rmtree(state, ignore_errors=True)


def stop(state: Path) -> None:
    """Stop the daemon; the client starts the next one."""
    subprocess.run([sys.executable, "-m", "snapshotd", "--state-dir", str(state), "daemon", "--stop"], check=False)


main()
