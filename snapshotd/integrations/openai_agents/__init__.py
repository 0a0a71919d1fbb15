"""Files and memory of the OpenAI Agents SDK, kept by snapshotd: `pip install 'snapshotd[openai-agents]'`
(docs/integrations/openai-agents.md)."""

from snapshotd.engine.host.integrations import require_at_import

with require_at_import("openai-agents"):
    from snapshotd.integrations.openai_agents.client import SnapshotdSandboxClient
    from snapshotd.integrations.openai_agents.session import SnapshotdSandboxSession
    from snapshotd.integrations.openai_agents.state import SnapshotdOptions, SnapshotdSessionState, SnapshotdSnapshot
    from snapshotd.integrations.openai_agents.thread import SnapshotdThread

__all__ = [
    "SnapshotdOptions",
    "SnapshotdSandboxClient",
    "SnapshotdSandboxSession",
    "SnapshotdSessionState",
    "SnapshotdSnapshot",
    "SnapshotdThread",
]
