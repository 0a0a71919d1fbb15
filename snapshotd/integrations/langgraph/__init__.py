"""LangGraph's memory, kept by snapshotd: `pip install 'snapshotd[langgraph]'` (docs/integrations/langgraph.md)."""

from snapshotd.engine.host.integrations import require_at_import

with require_at_import("langgraph"):
    from snapshotd.integrations.langgraph.saver import SnapshotdSaver
    from snapshotd.integrations.langgraph.store import SnapshotdStore
    from snapshotd.integrations.langgraph.transfer import copy_threads

__all__ = ["SnapshotdSaver", "SnapshotdStore", "copy_threads"]
