"""Sandboxes for NeMo Gym: `pip install 'snapshotd[nemo-gym]'` (docs/integrations/nemo-gym.md)."""

from snapshotd.engine.host.integrations import require_at_import

with require_at_import("nemo-gym"):
    from snapshotd.integrations.nemo_gym.generations import StaleHandleError
    from snapshotd.integrations.nemo_gym.provider import GymProvider

__all__ = ["GymProvider", "StaleHandleError"]
