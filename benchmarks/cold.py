"""Starting from cold snapshots, and steps while the archive is at work. As root, on an idle machine:

    python benchmarks/cold.py [--runtime runc] [--rounds 20] [--files 50000] [--mib 2048]

cold fork   as many snapshots of many files, neighbours, whose layers were evicted: from the request to fork until its first command's
            output is here, served through FUSE; beside it the same forks while they are hot. What writes the layers back stands still
            meanwhile, since each would take seconds and as much disk; it begins half a second after a cold start in any case
beside      one file changed per step in one sandbox: the pause with an idle archive, and while 5,000-file, 300 MiB steps of another
            sandbox are being archived (they wait for it, stopped, until the measurement begins)
looks       the same steps while three clients at once compare, patch or export a snapshot of another sandbox: one that has 3,000 files and
            one of 32 MiB more than its beginning
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from snapshotd.client import Snapshotd

FILL = """
import os, random, sys
folder, files, size, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
rng = random.Random(seed)
text = " ".join(rng.randbytes(6).hex() for _ in range(100000)).encode()
for number in range(files):
    path = f"{folder}/d{number % 500}"
    os.makedirs(path, exist_ok=True)
    length = rng.randrange(size // files // 2, size // files * 3 // 2)
    at = rng.randrange(len(text) // 2)
    half = text[at : at + length // 2]
    with open(f"{path}/f{number}", "wb") as f:
        f.write(half + rng.randbytes(length - len(half)))
"""
LOOKER = """
import sys
from snapshotd.client import Snapshotd

client, (look, first, last) = Snapshotd(sys.argv[1]), sys.argv[2:]
while True:
    if look == "diff":
        list(client.diff(first, last))
    elif look == "patch":
        client.patch(first, last, write=len)
    else:
        client.export(last, len)
    print(flush=True)
"""
LOOKS = ("diff", "patch", "export")
MIB = 1 << 20


def until(condition: Any, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            sys.exit("the daemon did not get there in time")
        time.sleep(0.05)


def first_command(client: Snapshotd, snapshot: str, path: str) -> tuple[float, str]:
    start = time.perf_counter()
    (fork,) = client.fork(snapshot, 1).trajectories
    client.exec(fork.id, ["tail", "-c", "10", path])
    return (time.perf_counter() - start) * 1e3, fork.id


def cold(client: Snapshotd, runtime: str, rounds: int, files: int, size: int) -> dict[str, Any]:
    parent, _ = client.create(runtime=runtime)
    client.exec(parent.id, ["python3", "-c", FILL, "data", str(files), str(size), "1"], wait="stored")
    snapshots = [client.exec(parent.id, ["sh", "-c", f"echo {n} > data/d3/new"]).snapshot.id for n in range(rounds)]
    client.flush()
    hot = [_measured(client, snapshot) for snapshot in snapshots]
    client.stop(parent.id)
    other, first = client.create(runtime=runtime, wait="stored")
    until(lambda: client.usage().layer_bytes < MIB)
    client.remove(client.fork(first.id, 1).trajectories[0].id, force=True)  # the pool is warm, as for the hot ones
    time.sleep(1)
    times = []
    for snapshot in snapshots:
        for writer in _children(client, b"cold"):
            os.kill(writer, signal.SIGSTOP)
        times.append(_measured(client, snapshot))
    for writer in _children(client, b"cold"):
        os.kill(writer, signal.SIGKILL)
    for trajectory in (parent.id, other.id):
        client.remove(trajectory, force=True)
    return {
        "hot_ms": sorted(hot),
        "cold_ms": sorted(times),
        "hot_p50_ms": statistics.median(hot),
        "cold_p50_ms": statistics.median(times),
        "cold_p95_ms": sorted(times)[int(0.95 * (rounds - 1))],
        "load": os.getloadavg()[0],
    }


def _measured(client: Snapshotd, snapshot: str) -> float:
    taken, fork = first_command(client, snapshot, "data/d7/f7")
    client.remove(fork, force=True)
    time.sleep(1)
    return taken


def beside(client: Snapshotd, runtime: str, rounds: int) -> dict[str, Any]:
    small, _ = client.create(runtime=runtime, wait="stored")
    large, _ = client.create(runtime=runtime, wait="stored")
    idle = _pauses(client, small.id, 40)
    (archive,) = _children(client, b"archive")
    os.kill(archive, signal.SIGSTOP)
    for number in range(rounds):
        client.exec(large.id, ["python3", "-c", FILL, f"data{number}", "5000", str(300 * MIB), str(number)])
    before = client.usage().unarchived
    os.kill(archive, signal.SIGCONT)
    start = time.perf_counter()
    busy: list[float] = []
    while client.usage().unarchived > 1 and time.perf_counter() - start < 120:
        busy += _pauses(client, small.id, 5)
    taken = time.perf_counter() - start
    for trajectory in (small.id, large.id):
        client.remove(trajectory, force=True)
    return {
        "idle_p50_ms": statistics.median(idle),
        "busy_p50_ms": statistics.median(busy),
        "busy_steps": len(busy),
        "waiting_before": before,
        "archive_s": taken,
        "ratio": statistics.median(busy) / statistics.median(idle),
    }


def looks(client: Snapshotd, runtime: str) -> dict[str, Any]:
    small, _ = client.create(runtime=runtime)
    other, first = client.create(runtime=runtime)
    fill = "head -c 32M /dev/urandom > big; mkdir d; for i in $(seq 3000); do echo $i > d/f$i; done"
    last = client.exec(other.id, ["sh", "-c", fill], wait="stored").snapshot
    assert last is not None
    found: dict[str, Any] = {"idle_p50_ms": statistics.median(_pauses(client, small.id, 40))}
    for look in LOOKS:
        lookers = [
            subprocess.Popen(
                [sys.executable, "-c", LOOKER, str(client.state_dir), look, first.id, last.id], stdout=subprocess.PIPE
            )
            for _ in range(3)
        ]
        try:
            for looker in lookers:
                assert looker.stdout is not None
                looker.stdout.readline()  # it has looked once
            found[f"{look}_p50_ms"] = statistics.median(_pauses(client, small.id, 40))
            assert all(looker.poll() is None for looker in lookers)
        finally:
            for looker in lookers:
                looker.kill()
                looker.wait()
    for trajectory in (small.id, other.id):
        client.remove(trajectory, force=True)
    return found


def _pauses(client: Snapshotd, trajectory: str, count: int) -> list[float]:
    return [client.exec(trajectory, ["sh", "-c", "date +%N > now"]).snapshot.pause_ms for _ in range(count)]


def _children(client: Snapshotd, role: bytes) -> list[int]:
    """The processes of the daemon that have this role."""
    daemon, found = client.status()["pid"], []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
                parent = int(Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == daemon and b"snapshotd.daemon.children" in words and role in words:
                found.append(int(name))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", default="runc")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--files", type=int, default=50_000)
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--only", default="beside,looks,cold")
    options = parser.parse_args()
    state = Path(tempfile.mkdtemp(prefix="snapshotd-bench-"))
    os.environ["SNAPSHOTD_LAYER_BUDGET"] = "0"
    client = Snapshotd(state_dir=state)
    try:
        client.build_image("default", progress=lambda line: print(line, file=sys.stderr))
        if "beside" in options.only:
            print("beside", json.dumps(beside(client, options.runtime, min(options.rounds, 5)), indent=2), flush=True)
        if "looks" in options.only:
            print("looks", json.dumps(looks(client, options.runtime), indent=2), flush=True)
        if "cold" in options.only:
            print(
                "cold",
                json.dumps(cold(client, options.runtime, options.rounds, options.files, options.mib * MIB), indent=2),
                flush=True,
            )
    finally:
        subprocess.run([sys.executable, "-m", "snapshotd", "--state-dir", str(state), "daemon", "--stop"], check=False)
        shutil.rmtree(state, ignore_errors=True)


if __name__ == "__main__":
    main()
