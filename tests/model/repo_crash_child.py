"""A collection or a repair in a process of its own, which a failpoint ends: `REPOSITORY KEPT collect|repair`."""

from __future__ import annotations

import pickle
import sys
import time
from pathlib import Path

from tests.model.repo_world import Opened, roots_of, silent


def main() -> int:
    """Returns when the failpoint was not reached."""
    _, directory, kept, what = sys.argv
    opened = Opened(Path(directory))
    if what == "repair":
        opened.repair(silent)
        return 0
    roots = roots_of(pickle.loads(Path(kept).read_bytes()).items())
    opened.collect(roots, grace_s=0, now=time.time() + 10, dry_run=False, progress=silent)
    return 0
