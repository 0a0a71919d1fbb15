"""Spans of steps, model calls and forks for OpenTelemetry: `pip install 'snapshotd[otel]'` (docs/integrations/otel.md)."""

from snapshotd.engine.host.integrations import require_at_import

with require_at_import("otel"):
    from snapshotd.integrations.otel.exporting import SpanSource, export, follow

__all__ = ["SpanSource", "export", "follow"]
