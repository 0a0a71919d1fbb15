"""Sandboxes for SWE-ReX: `pip install 'snapshotd[swe-rex]'` (docs/integrations/swe-rex.md)."""

from snapshotd.engine.host.integrations import require_at_import

with require_at_import("swe-rex"):
    from snapshotd.integrations.swe_rex.deployment import RexDeployment
    from snapshotd.integrations.swe_rex.runtime import RexObservation, RexResponse, RexRuntime

__all__ = ["RexDeployment", "RexObservation", "RexResponse", "RexRuntime"]
