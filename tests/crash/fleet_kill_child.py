"""A node of a fleet in a process that a failpoint ends: `DIRECTORY NODE URL KEPT LATER_S publish|collect|merge`."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from snapshotd.store.open import open_store
from tests.fleet_rig import Node


def main() -> int:
    """Returns when the failpoint was not reached."""
    _, directory, name, url, kept, later_s, what = sys.argv
    bucket = open_store(url)
    node = Node(Path(directory), name, bucket)
    saved = pickle.loads(Path(kept).read_bytes())
    if what == "publish":
        node.publish_all(saved, float(later_s))
    elif what == "collect":
        node.collect_all(saved, float(later_s))
    else:
        node.merge()
    node.close()
    bucket.close()
    return 0
