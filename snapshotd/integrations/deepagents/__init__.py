"""A sandbox for DeepAgents: `pip install 'snapshotd[deepagents]'` (docs/integrations/deepagents.md)."""

from snapshotd.engine.host.integrations import require_at_import

with require_at_import("deepagents"):
    from snapshotd.integrations.deepagents.backend import SnapshotdBackend

__all__ = ["SnapshotdBackend"]
