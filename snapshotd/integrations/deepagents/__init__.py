"""A sandbox for DeepAgents: `pip install 'snapshotd[deepagents]'` (docs/integrations/deepagents.md)."""

from snapshotd.integrations.deepagents.backend import SnapshotdBackend

__all__ = ["SnapshotdBackend"]
