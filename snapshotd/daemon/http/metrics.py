"""The figures of `/stats` in the text format of Prometheus (version 0.0.4,
https://prometheus.io/docs/instrumenting/exposition_formats/). Written by hand: it is small, and `prometheus_client` keeps
figures of its own, in the process that imports it. Only live sandboxes have series of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import accumulate

from snapshotd.api.service import NodeStats, PauseStats, SandboxStats, StatsInfo

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Series = tuple[Mapping[str, str], float]
"""Labels and a value."""


def write_metrics(stats: StatsInfo, version: str) -> str:
    """All figures, each with its help and type."""
    usage = stats.usage
    parts = [
        _family("build_info", "gauge", "The daemon's version.", [({"version": version}, 1)]),
        _plain("start_time_seconds", "Start of the daemon, since the epoch.", _seconds_of(stats.began_at)),
        _plain("sandboxes", "Live sandboxes.", len(stats.sandboxes)),
        _family("sandbox_cpu_seconds_total", "counter", "Processor time of a live sandbox.", _cpu(stats.sandboxes)),
        _family("sandbox_memory_bytes", "gauge", "Memory of a live sandbox.", _memory(stats.sandboxes)),
        _family("sandbox_processes", "gauge", "Processes of a live sandbox.", _processes(stats.sandboxes)),
        _plain("layer_bytes", "Disk use of layers.", usage.layer_bytes),
        _plain("layer_budget_bytes", "Disk that layers of stored snapshots may use.", usage.layer_budget_bytes),
        _plain("repository_bytes", "Disk use of the repository.", usage.repository_bytes),
        _plain("spool_bytes", "Disk use of outputs that are not stored yet.", usage.spool_bytes),
        _plain("cache_bytes", "Disk use of the parts of packs that a node of a fleet keeps.", usage.cache_bytes),
        _plain("cache_budget_bytes", "Disk that those may use.", usage.cache_budget_bytes),
        _family(
            "snapshots",
            "gauge",
            "Snapshots by state. The captured ones are not stored yet.",
            [({"state": state}, count) for state, count in usage.states.items()],
        ),
        _histogram(stats.pauses),
        _family(
            "requests_total",
            "counter",
            "Requests to the API.",
            [({"operation": one.operation, "status": one.status}, one.count) for one in stats.requests],
        ),
        _family(
            "request_seconds_total",
            "counter",
            "Durations of requests to the API, added up.",
            [({"operation": one.operation, "status": one.status}, one.sum_ms / 1000) for one in stats.requests],
        ),
        _plain("watchers", "Clients that follow all events.", stats.watchers),
        *(_of_nodes(stats.nodes) if stats.nodes else ()),
    ]
    return "".join(f"{line}\n" for part in parts for line in part)


def _of_nodes(nodes: Sequence[NodeStats]) -> Iterator[Iterator[str]]:
    """Figures of the nodes of a fleet; each node tells all of them."""
    for name, says, read in (
        ("lease_seconds", "Time left of a node's lease.", lambda one: one.lease_s),
        ("draining", "1 for a node that gets no more forks.", lambda one: int(one.state == "draining")),
        ("trajectories", "Trajectories that a node owns.", lambda one: one.trajectory_count),
        ("free_memory_bytes", "Memory that a node has for more sandboxes.", lambda one: one.free_memory_bytes),
        ("starting_sandboxes", "Sandboxes that a node is starting.", lambda one: one.starting_count),
        (
            "unpublished_snapshots",
            "Snapshots of a node that the fleet does not have yet.",
            lambda one: one.unpublished_count,
        ),
    ):
        yield _family(f"node_{name}", "gauge", says, [({"node": one.node}, read(one)) for one in nodes])


def _cpu(sandboxes: Iterable[SandboxStats]) -> list[Series]:
    return [(_labels(one), one.cpu_ms / 1000) for one in sandboxes]


def _memory(sandboxes: Iterable[SandboxStats]) -> list[Series]:
    return [(_labels(one), one.used_memory_bytes) for one in sandboxes]


def _processes(sandboxes: Iterable[SandboxStats]) -> list[Series]:
    return [(_labels(one), one.process_count) for one in sandboxes]


def _labels(sandbox: SandboxStats) -> dict[str, str]:
    return {"trajectory": sandbox.trajectory, "name": sandbox.name or "", "runtime": sandbox.runtime}


def _histogram(pauses: PauseStats) -> Iterator[str]:
    bounds = [*(repr(bound / 1000) for bound in pauses.bounds_ms), "+Inf"]
    yield from _head("pause_seconds", "histogram", "How long sandboxes stood still for their snapshots.")
    for bound, count in zip(bounds, accumulate(pauses.counts), strict=True):
        yield _line("pause_seconds_bucket", {"le": bound}, count)
    yield _line("pause_seconds_sum", {}, pauses.sum_ms / 1000)
    yield _line("pause_seconds_count", {}, sum(pauses.counts))


def _plain(name: str, says: str, value: float) -> Iterator[str]:
    return _family(name, "gauge", says, [({}, value)])


def _family(name: str, kind: str, says: str, series: Iterable[Series]) -> Iterator[str]:
    yield from _head(name, kind, says)
    for labels, value in series:
        yield _line(name, labels, value)


def _head(name: str, kind: str, says: str) -> Iterator[str]:
    yield f"# HELP snapshotd_{name} {says}"
    yield f"# TYPE snapshotd_{name} {kind}"


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    shown = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
    return f"snapshotd_{name}{f'{{{shown}}}' if shown else ''} {value!r}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _seconds_of(iso: str) -> float:
    return datetime.fromisoformat(iso).timestamp()
