"""From the daemon's records to an exporter of spans."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from snapshotd.api.snapshots import SnapshotInfo
from snapshotd.client import AsyncSnapshotd
from snapshotd.errors import DaemonUnavailable, NotFound
from snapshotd.integrations.otel.spans import Spans

_TICK_S = 1.0
_BATCH = 500
_PAGE = 1000


class SpanSource:
    """Exports each trajectory, and remembers how far it has come. An exporter that fails gets the same spans again later."""

    def __init__(self, client: AsyncSnapshotd, exporter: SpanExporter) -> None:
        self._client, self._exporter = client, exporter
        self._done: dict[str, int] = {}

    async def skip(self, trajectory: str) -> None:
        """Begin behind what a trajectory has done so far."""
        newest = await self._client.log(trajectory, 1)
        self._done[trajectory] = newest[-1].seq if newest else -1

    async def export(self, trajectory: str) -> bool:
        """Export what is new of a trajectory, and its root as it is now. False: the exporter has failed. NotFound."""
        info = await self._client.trajectory(trajectory)
        taken = await self._new(info.id)
        origin = None if info.forked_from is None else await self._owner(info.forked_from)
        spans = Spans(info, origin)
        made = [spans.step(one) for one in taken]
        if any(one.model_use is not None for one in taken):
            new = {one.id for one in taken}
            entries = [entry async for entry in self._client.journal(info.id) if entry.snapshot in new]
            made += [spans.model_call(entry) for entry in entries if entry.kind == "model"]
        ends = [span.end_time or 0 for span in made]
        if not ends and info.status == "running":
            return True
        made.append(spans.root(max(ends, default=0)))
        if not await asyncio.to_thread(self._send, made):
            return False
        if taken:
            self._done[info.id] = taken[-1].seq
        return True

    def _send(self, spans: list[ReadableSpan]) -> bool:
        batches = (spans[at : at + _BATCH] for at in range(0, len(spans), _BATCH))
        return all(self._exporter.export(batch) is SpanExportResult.SUCCESS for batch in batches)

    async def _new(self, trajectory: str) -> list[SnapshotInfo]:
        done, before = self._done.get(trajectory, -1), None
        found: list[SnapshotInfo] = []
        while True:
            page = await self._client.log(trajectory, _PAGE, before=before)
            found = [one for one in page if one.seq > done and one.trajectory == trajectory] + found
            if len(page) < _PAGE or page[0].seq <= done:
                return found
            before = page[0].seq

    async def _owner(self, snapshot: str) -> str | None:
        try:
            return (await self._client.snapshot(snapshot)).trajectory
        except NotFound:
            return None


async def export(client: AsyncSnapshotd, exporter: SpanExporter, *refs: str) -> None:
    """Export all that trajectories have done. NotFound; DaemonUnavailable: the exporter's end does not take it."""
    source = SpanSource(client, exporter)
    for ref in refs:
        if not await source.export(ref):
            raise DaemonUnavailable("the spans could not be exported; see what the exporter has logged, then try again")


async def follow(client: AsyncSnapshotd, exporter: SpanExporter, ready: Callable[[], object] = lambda: None) -> None:
    """Export what all trajectories do from now on, until the task is cancelled or the daemon stops. `ready` is called once
    nothing is missed any more."""
    source, waiting = SpanSource(client, exporter), set[str]()
    for one in await client.trajectories():
        await source.skip(one.id)

    async def listen() -> None:
        async for event in client.watch():
            if event["event"] == "lost":
                waiting.update([one.id for one in await client.trajectories()])
            elif (trajectory := event.get("trajectory")) is not None:
                waiting.add(trajectory if isinstance(trajectory, str) else trajectory["id"])

    listening = asyncio.create_task(listen())
    waiting.update([one.id for one in await client.trajectories()])
    ready()
    try:
        while not listening.done():
            await asyncio.wait({listening}, timeout=_TICK_S)
            now, known = list(waiting), set[str]()
            for trajectory in now:
                try:
                    if await source.export(trajectory):
                        known.add(trajectory)
                except NotFound:
                    known.add(trajectory)  # it was removed meanwhile
            waiting.difference_update(known)
        await listening
    finally:
        listening.cancel()
