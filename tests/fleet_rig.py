"""Nodes of a fleet over one bucket, each with a directory of its own, for the tests of its repository."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from snapshotd.repo.base import Peers, Reclaimed
from snapshotd.repo.fleet.index import FleetIndex
from snapshotd.repo.fleet.maintenance import FleetMaintenance
from snapshotd.repo.writing.writer import PackRepository
from snapshotd.store.base import Store
from tests.model.repo_world import KEY, Author, Files, Saved, is_as_saved, roots_of, save, silent

Kept = dict[str, Saved]
GRACE_S = 24 * 3600.0
_SEGMENT = re.compile(r"nodes/([a-z0-9-]+)/index/([0-9]{10})")


class BucketPeers(Peers):
    """The nodes as the bucket lists them, or as a test says."""

    def __init__(self, bucket: Store) -> None:
        self._bucket = bucket
        self.said: Mapping[str, int] | None = None
        self.oldest_pin_s = None

    @property
    def segments(self) -> Mapping[str, int]:  # type: ignore[override]
        if self.said is not None:
            return self.said
        found: dict[str, int] = {}
        for key in self._bucket.keys("nodes/"):
            match = _SEGMENT.fullmatch(key)
            if match and int(match[2]) == found.get(match[1], 0) + 1:
                found[match[1]] = int(match[2])
        return found


class Node(FleetMaintenance):
    """One node, below a directory of its own. Its clock is the test's: `later_s` seconds ahead."""

    def __init__(self, directory: Path, name: str, bucket: Store, key: bytes = KEY) -> None:
        (directory / name).mkdir(parents=True, exist_ok=True)
        self.name, self.bucket, self.peers = name, bucket, BucketPeers(bucket)
        super().__init__(bucket, name, self.peers, directory / name / "index.db", key)

    @property
    def repo(self) -> PackRepository:
        return self.writer()

    @property
    def index(self) -> FleetIndex:
        return self._index_of(self.writer())

    def close(self) -> None:
        self._end_writer()

    def save(self, files: Files, name: str, previous: Saved | None = None) -> Saved:
        return save(self.repo, files, name, previous)

    def publish_all(self, kept: Mapping[str, Saved], later_s: float = 0) -> int:
        return self.publish(roots_of(kept.items()), now=time.time() + later_s, grace_s=GRACE_S)

    def collect_all(self, kept: Mapping[str, Saved], later_s: float, *, dry_run: bool = False) -> Reclaimed:
        """`later_s` counts from now: packs younger than the grace stay."""
        now = time.time() + later_s
        return self.collect(roots_of(kept.items()), grace_s=GRACE_S, now=now, dry_run=dry_run, progress=silent)

    def reads(self, kept: Mapping[str, Saved]) -> bool:
        """Everything, from the packs and not from memory."""
        self.repo.reader.forget()
        return all(is_as_saved(self.repo, one) for one in kept.values())


def write(node: Node, seed: int, count: int, previous: Saved | None = None) -> Kept:
    """Snapshots that build upon each other, one pack each, with a file that is a delta in each."""
    rng = random.Random(seed)
    author = Author(rng, dict(previous.files) if previous else {}, big=False)
    large = rng.randbytes(400_000)
    kept: Kept = {}
    for number in range(count):
        at = rng.randrange(len(large))
        large = large[:at] + b"step %d" % number + large[at:]
        name = f"{node.name}{seed}-{number}"
        previous = node.save(author.step() | {b"large": large}, name, previous)
        node.repo.flush()
        kept[name] = previous
    return kept


def packs_in(bucket: Store) -> list[str]:
    return [key for key in bucket.keys("nodes/") if "/packs/" in key]


def tombstones_in(bucket: Store) -> list[str]:
    return [key for key in bucket.keys("nodes/") if "/tombstones/" in key]


NewNode = Callable[[str], Node]
