"""`snapshotd stats`."""

from __future__ import annotations

import sys
import time

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.commands.service.fleet import show_nodes
from snapshotd.cli.text import ago, id_text, milliseconds, print_json, printable, size, table
from snapshotd.client.results import PauseStats, SandboxStats, StatsInfo
from snapshotd.terms import number_of

_EVERY_S = 1.0
_DISK_SHOWN = 10


@declare(
    "stats",
    examples=[
        "snapshotd stats",
        "snapshotd stats --no-stream --json | jq '.sandboxes[] | {name, used_memory_bytes}'",
        "snapshotd stats --prometheus > /var/lib/node_exporter/snapshotd.prom",
    ],
)
@click.option("--no-stream", is_flag=True, help="Show it once.")
@click.option("--prometheus", is_flag=True, help="Print the text format of Prometheus, once.")
@click.option("--no-trunc", is_flag=True, help="Whole ids.")
@json_option
def command(ctx: click.Context, no_stream: bool, prometheus: bool, no_trunc: bool, as_json: bool) -> None:
    """Show what sandboxes take, and how long they stand still.

    Live sandboxes with their load and memory, the trajectories with most layers on disk, snapshots that are not stored
    yet, and the pauses of the last hour. On a terminal it is shown anew every second until Ctrl-C; else it is shown once,
    as with --no-stream. With --json, once: {measured_at,began_at,sandboxes: [{trajectory,name,runtime,agent_running,
    started_at,cpu_ms,used_memory_bytes,process_count,cpus,memory_bytes}],disk: [{trajectory,name,layer_bytes,file_bytes}],
    usage (as `df`),pauses: {bounds_ms,counts,sum_ms,minutes: [{began_at,counts,sum_ms,longest_ms}]},requests:
    [{operation,status,count,sum_ms}],watchers,nodes: [as `fleet status`]}.
    """
    client = connect(ctx)
    if prometheus:
        click.echo(client.metrics(), nl=False)
        return
    if as_json:
        print_json(client.stats())
        return
    before = client.stats(trajectories=_DISK_SHOWN)
    live = sys.stdout.isatty() and not no_stream
    while True:
        if before.sandboxes:
            time.sleep(_EVERY_S)  # a load is a rate
        now = client.stats(trajectories=_DISK_SHOWN)
        if live:
            click.clear()
        _show(before, now, full=no_trunc)
        if not live:
            return
        if not before.sandboxes:
            time.sleep(_EVERY_S)
        before = now


def _show(before: StatsInfo, now: StatsInfo, *, full: bool) -> None:
    earlier = {one.trajectory: one for one in before.sandboxes}
    rows = [
        (
            id_text(one.trajectory, full=full),
            printable(one.name or "-"),
            _load(earlier.get(one.trajectory), one),
            f"{size(one.used_memory_bytes)} / {size(one.memory_bytes)}",
            str(one.process_count),
            "running" if one.agent_running else "-",
            ago(one.started_at),
        )
        for one in now.sandboxes
    ]
    table(("TRAJECTORY", "NAME", "CPU", "MEMORY / LIMIT", "PROCESSES", "AGENT", "STARTED"), rows, right=(2, 3, 4))
    click.echo()
    disk = [(id_text(one.trajectory, full=full), printable(one.name or "-"), size(one.layer_bytes)) for one in now.disk]
    usage = now.usage
    budget = f"of {size(usage.layer_budget_bytes)}" if usage.layer_budget_bytes else "-"  # a tenant is not told
    disk.append(("all layers", budget, size(usage.layer_bytes)))
    if usage.cache_budget_bytes:
        disk.append(("cache", f"of {size(usage.cache_budget_bytes)}", size(usage.cache_bytes)))
    table(("DISK", "NAME", "LAYERS"), disk, right=(2,))
    if now.nodes:
        click.echo()
        show_nodes(now.nodes)
    click.echo(f"\n{number_of(usage.unarchived, 'snapshot')} to be stored; {_pauses(now.pauses)}")


def _load(before: SandboxStats | None, now: SandboxStats) -> str:
    """Processor time within the time between, in percent of one processor."""
    if before is None or before.started_at != now.started_at:
        return "-"
    return f"{max(0.0, now.cpu_ms - before.cpu_ms) / (_EVERY_S * 10):.0f}%"


def _pauses(pauses: PauseStats) -> str:
    counts = [sum(column) for column in zip(*(one.counts for one in pauses.minutes), strict=True)]
    total = sum(counts)
    if not total:
        return "no pause within the last hour"
    longest, middle = max(one.longest_ms for one in pauses.minutes), 0
    while 2 * sum(counts[: middle + 1]) < total:
        middle += 1
    half = min([*pauses.bounds_ms, longest][middle], longest)
    return (
        f"{number_of(total, 'pause')} within the last hour, half of them up to {milliseconds(half)}, "
        f"the longest {milliseconds(longest)}"
    )
