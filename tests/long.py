"""The switch between the two sets of tests: `make test` runs the short one, `make test-all` (SNAPSHOTD_TEST=all)
everything.

The long set has every test, longer random walks, more kills and power cuts, larger scale, and both runtimes where one
will do. Its random tests begin with a seed that is another one each time; pytest prints it first. SNAPSHOTD_SEED=N
begins with that one, in either set. The short set always begins with the same seed, so that it gives the same answer
twice.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

LONG = os.environ.get("SNAPSHOTD_TEST", "") == "all"
SEED = int(os.environ.setdefault("SNAPSHOTD_SEED", str(secrets.randbelow(1 << 30)) if LONG else "1"))
"""In the environment it is the same one for all processes of a run."""


def size(short: int, long: int) -> int:
    """How many, how far, how often: in the short set and in the long one."""
    return long if LONG else short


def seeds(short: int, long: int) -> range:
    """So many seeds, from the one that the run begins with."""
    return range(SEED, SEED + size(short, long))


def some(values: Iterable[T], short: int) -> list[T]:
    """All of `values` in the long set; in the short one `short` of them, evenly spread from the first on: the points of
    one way at which a process is killed, the kinds of one thing."""
    every = list(values)
    return every if LONG or short >= len(every) else [every[place * len(every) // short] for place in range(short)]
