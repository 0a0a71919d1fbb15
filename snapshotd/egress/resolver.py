"""The file that tells a sandbox whom it asks for names."""

from __future__ import annotations

from pathlib import Path

from snapshotd.egress.base import OWN_ADDRESS
from snapshotd.types import Network

RESOLV_CONF = "resolv.conf"
"""Name of the file in a container's run directory that becomes /etc/resolv.conf where there is a network."""


def write_resolver(run_dir: Path, network: Network, of_bridge: str = "") -> Path:
    """Write the file, and return its path. `of_bridge`: the name server of the network bridge."""
    path = run_dir / RESOLV_CONF
    path.write_text(f"nameserver {OWN_ADDRESS if network.allows_names else of_bridge}\n")
    path.chmod(0o644)
    return path
