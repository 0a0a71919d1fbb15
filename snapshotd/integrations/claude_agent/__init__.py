"""Sessions of the Claude Agent SDK in snapshotd, bound to snapshots of the working folder: `pip install
'snapshotd[claude-agent]'` (docs/integrations/claude-agent.md)."""

from snapshotd.engine.host.integrations import require_at_import

with require_at_import("claude-agent"):
    from snapshotd.integrations.claude_agent.store import SnapshotdSessionStore

__all__ = ["SnapshotdSessionStore"]
