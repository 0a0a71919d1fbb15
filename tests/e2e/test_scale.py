"""A long trajectory costs what a short one does: times of the verbs, memory, descriptors, threads, layers and packs.

In the long set of tests it takes ten thousand snapshots.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshotd.client import Policy, Snapshotd
from snapshotd.engine.storage.merging import FAN_IN
from snapshotd.layers.pivot import MAX_CACHED_LOWERS
from tests import long
from tests.e2e.prepared import daemon_on
from tests.e2e.support import Snap

STEPS = long.size(180, 10_000)
FIRST = 100
BUDGET_BYTES = 4 << 20
FILES, FILE_BYTES = 500, 4096
LIVE_BYTES = (4 << 20) + sum(
    min(FAN_IN, STEPS // FAN_IN**level) * min(FAN_IN**level, FILES) * FILE_BYTES for level in range(6)
)
"""What the layers of the live sandbox take; they stay: some runs of each level, each with at most every file once, and
those that were merged count twice as long as their parts are there."""
TIMES = 15
RATIO, FLOOR_S = 3.0, 0.030
"""A verb may take so many times what it took at first, and in any case the floor more: medians on a busy machine are
not exact."""
MEMORY_BYTES = 60 << 20
DESCRIPTORS = 64
"""Connections come and go: those of clients, and to the databases, of which each thread holds its own. A leak of one
descriptor in four snapshots is more."""

AGENT = """
import os, sys
from snapshotd.agent import tool

@tool
def write(number):
    os.makedirs(f"d{number % 50}", exist_ok=True)
    with open(f"d{number % 50}/f{number % 500}", "w") as f:
        f.write(f"step {number}\\n" * 20)

for number in range(int(sys.argv[1]), int(sys.argv[2])):
    write(number)
"""


@pytest.fixture
def budgeted(
    minimal_state: Path, tmp_path_factory: pytest.TempPathFactory, engine_env: dict[str, str]
) -> Iterator[Snap]:
    """A daemon whose layers may take little."""
    with daemon_on(
        minimal_state,
        tmp_path_factory.mktemp("scale") / "state",
        {**engine_env, "SNAPSHOTD_LAYER_BUDGET": str(BUDGET_BYTES)},
    ) as snap:
        yield snap


@pytest.mark.runc
@pytest.mark.timeout(300 + STEPS // 4)
def test_the_last_snapshot_costs_what_the_first_hundred_did(budgeted: Snap, tmp_path: Path) -> None:
    client = Snapshotd(state_dir=budgeted.state_dir, autostart=False)
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "agent.py").write_text(AGENT)
    trajectory = client.create(runtime="runc", workspace=workspace)[0].id
    _steps(client, trajectory, 0, FIRST)
    _times(client, trajectory)  # the first time, modules are loaded and containers made
    at_first = {**_times(client, trajectory), **_sizes(client)}
    began = time.monotonic()
    _steps(client, trajectory, FIRST, STEPS)
    took = (time.monotonic() - began) / (STEPS - FIRST)
    at_last = {**_times(client, trajectory), **_sizes(client)}
    usage = client.usage()
    report = {
        "steps": STEPS,
        "step_ms": round(took * 1e3, 2),
        "first": at_first,
        "last": at_last,
        "layer_bytes": usage.layer_bytes,
    }
    (tmp_path / "report.json").write_text(json.dumps(report))
    for name in ("log", "show", "diff", "cat", "fork"):
        assert at_last[name] <= max(at_first[name] * RATIO, at_first[name] + FLOOR_S), report
    for name in ("daemon_bytes", "archive_bytes"):
        assert at_last[name] <= at_first[name] + MEMORY_BYTES, report
    assert at_last["descriptors"] <= at_first["descriptors"] + DESCRIPTORS, report
    assert at_last["mounts"] <= MAX_CACHED_LOWERS + 16, report
    assert at_last["threads"] <= at_first["threads"] + 8, report
    assert usage.layer_bytes <= BUDGET_BYTES + LIVE_BYTES, report
    _pruned_small(client, trajectory, report)
    if "SNAPSHOTD_SCALE_REPORT" in os.environ:
        Path(os.environ["SNAPSHOTD_SCALE_REPORT"]).write_text(json.dumps(report, indent=1))


def _steps(client: Snapshotd, trajectory: str, first: int, end: int) -> None:
    done = client.exec(trajectory, ["python3", "agent.py", str(first), str(end)], cwd="/workspace")
    assert done.exit_code == 0
    client.flush()
    (info,) = client.log(trajectory, last=1)
    assert info.state == "stored"
    assert info.seq >= end, "one snapshot for each call"


def _times(client: Snapshotd, trajectory: str) -> dict[str, float]:
    """Medians, in seconds."""
    before, last = client.log(trajectory, last=3)[:2]  # the very last is the command's own, which changed nothing
    (change,) = [
        c for c in client.diff(before.id, last.id) if c.path.startswith("/workspace/d") and c.path.count("/") == 3
    ]

    def fork() -> None:
        (made,) = client.fork(last.id).trajectories
        client.remove(made.id, force=True)

    return {
        "log": _median(lambda: client.log(trajectory, last=50)),
        "show": _median(lambda: client.snapshot(last.id)),
        "diff": _median(lambda: list(client.diff(before.id, last.id))),
        "cat": _median(lambda: list(client.cat(last.id, change.path))),
        "fork": _median(fork),
    }


def _median(work: Callable[[], object]) -> float:
    times = []
    for _ in range(TIMES):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _sizes(client: Snapshotd) -> dict[str, float]:
    pid = client.version().pid
    (archive,) = [child for child in _children(pid) if b"\0archive\0" in Path(f"/proc/{child}/cmdline").read_bytes()]
    held = [_leads_to(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    return {
        "daemon_bytes": _status(pid, "VmRSS") * 1024,
        "archive_bytes": _status(archive, "VmRSS") * 1024,
        "descriptors": len(held) - held.count("/"),
        "mounts": held.count("/"),  # of layers, most of them a cache that is full sooner or later
        "threads": _status(pid, "Threads"),
        "packs": client.check().packs,
        "repository_bytes": client.usage().repository_bytes,
    }


def _leads_to(fd: Path) -> str:
    try:
        return os.readlink(fd)
    except FileNotFoundError:
        return "closed a moment ago"


def _status(pid: int, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def _children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def _pruned_small(client: Snapshotd, trajectory: str, report: dict[str, object]) -> None:
    """What a policy gives up is gone from the packs, and what it keeps is there."""
    began = time.monotonic()
    pruned = client.prune(Policy(keep_last=20), grace_s=0)
    report["prune_s"] = round(time.monotonic() - began, 2)
    assert len(pruned.pruned) >= STEPS - 22
    checked = client.check(read_data=True)
    assert not checked.damages
    assert checked.packs <= 40, "small packs are put together"
    (last,) = client.log(trajectory, last=1)
    number = STEPS - 1
    content = b"".join(client.cat(last.id, f"/workspace/d{number % 50}/f{number % 500}"))
    assert content == f"step {number}\n".encode() * 20
