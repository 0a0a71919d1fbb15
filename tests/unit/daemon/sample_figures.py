"""Figures and hits with something in every field."""

from __future__ import annotations

from snapshotd.api.find import FindInfo, HitInfo
from snapshotd.api.service import (
    NodeStats,
    PauseMinute,
    PauseStats,
    RequestStats,
    SandboxStats,
    StatsInfo,
    TrajectoryDisk,
)
from snapshotd.api.storage import UsageInfo

_ID, _AT = "7" * 32, "2026-01-31T12:00:00.000000Z"
FOUND = FindInfo(
    (HitInfo(_ID, "box", _ID, 3, "output", "stdout", "… a word\nhere", ((4, 8),), True, _AT),), next=7, waiting=1
)
STATS = StatsInfo(
    measured_at=_AT,
    began_at=_AT,
    sandboxes=(SandboxStats(_ID, "box", "runc", True, _AT, 1500.0, 3 << 20, 4, 2.0, 2 << 30),),
    disk=(TrajectoryDisk(_ID, "box", 4096, 1000),),
    usage=UsageInfo(4096, 1 << 30, 8192, 0, {"captured": 1, "stored": 2, "lost": 0, "pruned": 0}, 1),
    pauses=PauseStats((1.0, 5.0), (1, 2, 1), 20.0, (PauseMinute(_AT, (1, 2, 1), 20.0, 9.5),)),
    requests=(RequestStats("GET /version", "200", 2, 1.5),),
    watchers=1,
    nodes=(
        NodeStats("north", "leased", 12.5, 3, 1 << 30, 1, 16, 7, "x86_64"),
        NodeStats("west", "draining", 0.0, 0, 0, 0, 16, 0, "x86_64"),
    ),
)
