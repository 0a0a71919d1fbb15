"""Spans of records. Ids are those of the records, so that a record that is exported twice is the same span again: a trace is a
trajectory, a span a snapshot or an entry of the journal."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from snapshotd import __version__
from snapshotd.api.history import JournalInfo
from snapshotd.api.snapshots import SnapshotInfo
from snapshotd.api.trajectories import TrajectoryInfo

CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""OpenTelemetry's variable: with "true" the arguments of calls are in the spans, too."""
_FAILED = ("failed", "timed-out", "interrupted", "unknown")
_SCOPE = InstrumentationScope("snapshotd", __version__)
_TEXT_MAX = 8192
Attributes = Mapping[str, Any]


class Spans:
    """Makes the spans of one trajectory. `origin`: the trajectory whose snapshot it was forked from."""

    def __init__(self, info: TrajectoryInfo, origin: str | None) -> None:
        self._info = info
        self._resource = Resource.create({"service.name": "snapshotd"})
        self._root = _context(info.id, info.id)
        forked = None if origin is None or info.forked_from is None else _context(origin, info.forked_from)
        self._links = [] if forked is None else [Link(forked, {"snapshotd.link": "forked_from"})]

    def root(self, end_ns: int) -> ReadableSpan:
        """The trajectory itself, from its beginning to the newest thing that is known of it."""
        info = self._info
        attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.id": info.id,
            "gen_ai.agent.name": info.name,
            "gen_ai.conversation.id": info.id,
            "snapshotd.status": info.status,
            "snapshotd.image": info.image,
            "snapshotd.forked_from": info.forked_from,
            "process.exit.code": info.exit_code,
        }
        bad = info.status in ("failed", "interrupted")
        name = f"invoke_agent {info.name or info.id[:12]}"
        return self._span(
            name, self._root, None, attributes, _ns(info.created_at), end_ns, info.status if bad else None
        )

    def step(self, taken: SnapshotInfo) -> ReadableSpan:
        """A call with its snapshot, or a marker of the daemon (a rewind, a start)."""
        tool = taken.tool
        is_call = taken.kind != "marker"
        attributes = {
            "gen_ai.operation.name": "execute_tool" if is_call else None,
            "gen_ai.tool.name": tool.name if is_call else None,
            "gen_ai.tool.call.arguments": _content(tool.arguments),
            "gen_ai.conversation.id": taken.trajectory,
            "process.exit.code": tool.exit_code,
            "snapshotd.snapshot.id": taken.id,
            "snapshotd.snapshot.parent": taken.parent,
            "snapshotd.snapshot.method": taken.method,
            "snapshotd.pause_ms": taken.pause_ms,
            "snapshotd.side_effect": taken.side_effect,
            "snapshotd.sub_agent": taken.sub_agent,
        }
        begin = _ns(tool.started_at)
        end = begin + int(tool.duration_ms * 1e6)
        error = (tool.error or tool.status) if tool.status in _FAILED else None
        name = f"execute_tool {tool.name}" if is_call else f"snapshotd {tool.name}"
        return self._span(name, _context(taken.trajectory, taken.id), self._root, attributes, begin, end, error)

    def model_call(self, entry: JournalInfo) -> ReadableSpan:
        usage = entry.details.get("usage") or {}
        stop = entry.details.get("stop_reason")
        attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": entry.name,
            "gen_ai.conversation.id": self._info.id,
            "gen_ai.usage.input_tokens": usage.get("input_tokens"),
            "gen_ai.usage.output_tokens": usage.get("output_tokens"),
            "gen_ai.usage.cache_read.input_tokens": usage.get("cached_tokens"),
            "gen_ai.response.finish_reasons": [stop] if isinstance(stop, str) else None,
            "snapshotd.snapshot.id": entry.snapshot,
        }
        begin = _ns(entry.started_at)
        end = begin if entry.ended_at is None else _ns(entry.ended_at)
        error = (entry.error or entry.status) if entry.status in _FAILED else None
        context = _context(self._info.id, entry.id)
        return self._span(f"chat {entry.name}", context, self._root, attributes, begin, end, error, SpanKind.CLIENT)

    def _span(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        attributes: Attributes,
        begin_ns: int,
        end_ns: int,
        error: str | None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> ReadableSpan:
        known = {key: value for key, value in attributes.items() if value is not None}
        return ReadableSpan(
            name,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=known if error is None else {**known, "error.type": error.partition(":")[0][:100]},
            links=self._links if parent is None else (),
            kind=kind,
            instrumentation_scope=_SCOPE,
            status=Status(StatusCode.UNSET) if error is None else Status(StatusCode.ERROR, error[:_TEXT_MAX]),
            start_time=begin_ns,
            end_time=max(begin_ns, end_ns),
        )


def _context(trajectory: str, record: str) -> SpanContext:
    """Ids are 128 random bits in hexadecimal: as long as that of a trace, and twice as long as that of a span."""
    return SpanContext(int(trajectory, 16), int(record[-16:], 16), False, TraceFlags(TraceFlags.SAMPLED))


def _ns(moment: str) -> int:
    at = datetime.fromisoformat(moment)
    return int(at.timestamp()) * 1_000_000_000 + at.microsecond * 1000


def _content(arguments: Any) -> str | None:
    if os.environ.get(CONTENT, "").lower() != "true":
        return None
    return json.dumps(arguments)[:_TEXT_MAX]
