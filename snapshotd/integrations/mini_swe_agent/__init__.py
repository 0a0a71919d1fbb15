"""Sandboxes for mini-swe-agent: `pip install 'snapshotd[mini-swe-agent]'` (docs/integrations/mini-swe-agent.md)."""

from snapshotd.engine.host.integrations import require_at_import

with require_at_import("mini-swe-agent"):
    from snapshotd.integrations.mini_swe_agent.agent import SnapshotdAgent, SnapshotdInteractiveAgent
    from snapshotd.integrations.mini_swe_agent.environment import MiniEnvironment

__all__ = ["MiniEnvironment", "SnapshotdAgent", "SnapshotdInteractiveAgent"]
