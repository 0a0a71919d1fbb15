"""The making of forks on several nodes: a snapshot is brought to those that lack it, and forks are numbered among all."""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from snapshotd.api.wire import FORK_MAX
from snapshotd.at_once import at_once
from snapshotd.client.exchange import use_keys
from snapshotd.client.fleet.base import KnownNodes
from snapshotd.client.fleet.branch import Branch
from snapshotd.client.fleet.placing import ForkPlaces
from snapshotd.errors import DaemonUnavailable, LimitExceeded, NotFound, UsageError
from snapshotd.fleet.base import NodeID
from snapshotd.fleet.places import ForkBlock

_PLACE = re.compile(r"\{(index|variant)\}")


class Making:
    """Forks of one snapshot. `made`: all so far. Used as a context manager, or closed."""

    def __init__(
        self,
        nodes: KnownNodes,
        placement: ForkPlaces,
        labels: list[tuple[str, dict[str, Any]]] | None,
        idle_s: float | None,
        *,
        token: str,
        resume: bool = False,
    ) -> None:
        self._nodes, self._placement, self._labels = nodes, placement, labels
        self._idle_s, self._resume, self._token = idle_s, resume, token
        self._folder = tempfile.TemporaryDirectory(prefix="snapshotd-fleet-")
        self._bundling = threading.Lock()
        self.made: list[Branch] = []

    def make(self, blocks: Sequence[ForkBlock]) -> list[Branch]:
        """The forks of these blocks, which are made side by side, in their order."""
        parts = list(_parts(blocks))
        found = dict(at_once(parts, max(1, len(parts)), self._make_part, thread="fleet"))
        for block in blocks:
            self._nodes.end_reservation(block)
        return [branch for part in parts for branch in found[part]]

    def _make_part(self, part: tuple[NodeID, int, int]) -> list[Branch]:
        """Where a node fails before it has made its forks, others do."""
        node, first, count = part
        try:
            return self._fork(node, first, count)
        except (DaemonUnavailable, LimitExceeded):
            if len(self._nodes.names()) == 1:
                raise
            blocks = self._placement.place(count, without=[node])
            return [branch for other in _parts(blocks, first) for branch in self._fork(*other)]

    def _fork(self, node: NodeID, first: int, count: int) -> list[Branch]:
        client, snapshot = self._nodes.client(node), self._placement.snapshot.id
        self.bring(node)
        some = None if self._labels is None else dict(self._labels[first : first + count])
        with use_keys(f"{self._token} {node} {first}"):
            forked = client.fork(
                snapshot, count if some is None else 1, variants=some, resume=self._resume, idle_timeout=self._idle_s
            )
        branches = [Branch(client, info, node) for info in forked.trajectories]
        self.made += branches
        return branches

    def bring(self, node: NodeID) -> None:
        """Have a node know the snapshot: by itself, where it can, else by a bundle."""
        if node == self._placement.home:
            return
        client = self._nodes.client(node)
        try:
            client.snapshot(self._placement.snapshot.id)
        except NotFound:
            client.import_bundle(self._bundle())

    def _bundle(self) -> Path:
        """It is written once, when the first node needs it."""
        path = Path(self._folder.name, "bundle")
        with self._bundling:
            if not path.exists():
                self._nodes.client(self._placement.home).export_file(self._placement.snapshot.id, path)
        return path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()


def _parts(blocks: Sequence[ForkBlock], first: int = 0) -> Iterator[tuple[NodeID, int, int]]:
    """Node, first number and count of each request: a daemon takes so many forks at most."""
    for block in blocks:
        for done in range(0, block.count, FORK_MAX):
            count = min(FORK_MAX, block.count - done)
            yield block.node, first, count
            first += count


def number_forks(
    n: int, variants: Mapping[str, Mapping[str, Any]] | None, args: Sequence[str] | None, name: str | None
) -> list[tuple[str, dict[str, Any]]] | None:
    """Label and keywords of each fork, with numbers and labels in their places; None: they do not differ. UsageError: there
    are variants, and another number of forks."""
    if variants is None:
        if args is None and name is None:
            return None
        variants = {str(index): {} for index in range(n)}
    elif n not in (1, len(variants)):
        raise UsageError("a fork with variants has one child for each; leave the number out")
    if name is not None and len(variants) > 1 and not _PLACE.search(name):
        name = f"{name}-{{variant}}"
    return [(label, filled(index, label, one, args, name)) for index, (label, one) in enumerate(variants.items())]


def filled(
    index: int, label: str, variant: Mapping[str, Any], args: Sequence[str] | None, name: str | None = None
) -> dict[str, Any]:
    """A variant's keywords, with `args` and `name` where it has none, and its number and label in their places."""

    def fill(text: str) -> str:
        return _PLACE.sub(lambda found: str(index) if found[1] == "index" else label, text)

    one = {**({} if args is None else {"args": args}), **({} if name is None else {"name": name}), **variant}
    if "name" in one:
        one["name"] = fill(one["name"])
    if "args" in one:
        one["args"] = [fill(word) for word in one["args"]]
    if "env" in one:
        one["env"] = {key: fill(value) for key, value in one["env"].items()}
    return one
