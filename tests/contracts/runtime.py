"""The contract of `runtime/base.py` as checks that run real containers. Needs root and the driver's runtime.

A `Rig` makes containers for one driver and gives each a real root, the way the engine does (an overlay over a shared
tree, pivoted in from outside). A check is a function `check_*(rig)` that raises AssertionError; `CHECKS` lists them
all. A check has containers of its own, or one that is as new to it, so they run in any order.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.contracts import runtime_commands, runtime_isolation, runtime_kept, runtime_lifecycle, runtime_starting
from tests.contracts.runtime_rig import Rig, eventually

__all__ = ["CHECKS", "Rig", "eventually"]

CHECKS: tuple[Callable[[Rig], None], ...] = (
    *runtime_isolation.CHECKS,
    *runtime_commands.CHECKS,
    *runtime_kept.CHECKS,
    *runtime_lifecycle.CHECKS,
    *runtime_starting.CHECKS,
)
