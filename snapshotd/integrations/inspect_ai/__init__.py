"""Sandboxes for Inspect AI: `pip install 'snapshotd[inspect-ai]'` (docs/integrations/inspect-ai.md)."""

from snapshotd.engine.host.integrations import require_at_import

with require_at_import("inspect-ai"):
    from snapshotd.integrations.inspect_ai.environment import SnapshotdConfig, SnapshotdEnvironment

__all__ = ["SnapshotdConfig", "SnapshotdEnvironment"]
