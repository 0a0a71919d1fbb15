"""The services that comparisons, scores, bisections and experiments are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from snapshotd.engine.base import Event
from snapshotd.engine.services.branching import BranchingService
from snapshotd.engine.services.mind import MindService
from snapshotd.engine.services.runs import RunService
from snapshotd.engine.services.snapshots import SnapshotService


@dataclass(frozen=True, slots=True)
class Services:
    """`watch`: as `Life.watch`."""

    runs: RunService
    snapshots: SnapshotService
    branching: BranchingService
    mind: MindService
    watch: Callable[[], Iterator[Event]]
