"""Comparison of trajectories, call by call: where they part, what differs, and how each came out."""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from snapshotd.client.branching.lineage import lineage
from snapshotd.client.results import ChangeInfo, SnapshotInfo
from snapshotd.errors import NotFound, UsageError

if TYPE_CHECKING:
    from snapshotd.client.client import Snapshotd

_MARKS = ("start", "exit", "stop", "diverged", "approval", "snapshot")
Difference = Literal["same", "arguments", "outcome", "left", "right"]
"""How two aligned calls differ. `left`, `right`: the call is only in the first, or only in the second."""


@dataclass(frozen=True, slots=True)
class AlignedCall:
    """One row of an alignment. `number` counts calls from 1 at the beginning of both trajectories, on the first one's
    side (for a call that is only in the second, on its side)."""

    number: int
    difference: Difference
    left: SnapshotInfo | None
    right: SnapshotInfo | None


@dataclass(frozen=True, slots=True)
class BranchInfo:
    """How one side came out. Calls, failures and times are those after the fork point; files compare its head with the
    fork point, or with its first snapshot where the sides have none in common. `seconds` begin at the fork point for the
    trajectory that went on from it, and for a fork when it was made. `tokens` (in, out) are of model calls that reported
    them."""

    ref: str
    head: SnapshotInfo
    name: str | None
    status: str
    exit_code: int | None
    calls: int
    failed: int
    seconds: float
    tokens: tuple[int, int]
    added: int
    changed: int
    deleted: int


@dataclass(frozen=True, slots=True)
class PairInfo:
    """The second of two sides against the first one."""

    calls: tuple[AlignedCall, ...]
    files: tuple[ChangeInfo, ...]

    @property
    def first_difference(self) -> AlignedCall | None:
        return next((call for call in self.calls if call.difference != "same"), None)


@dataclass(frozen=True, slots=True)
class CompareInfo:
    """`fork_point` is the last snapshot that all have; None where they have none in common. `pairs[i]` compares
    `branches[i + 1]` with `branches[0]`."""

    fork_point: SnapshotInfo | None
    branches: tuple[BranchInfo, ...]
    pairs: tuple[PairInfo, ...]


def compare(client: Snapshotd, refs: Sequence[str]) -> CompareInfo:
    """See `Snapshotd.compare`."""
    if len(refs) < 2:
        raise UsageError("there are at least two sides to a comparison; name another trajectory or snapshot")
    lines = [lineage(client, ref) for ref in refs]
    try:
        return _compared(client, refs, lines)
    except NotFound as exc:
        raise _removed(client, refs, lines) or exc from exc


def _removed(client: Snapshotd, refs: Sequence[str], lines: Sequence[list[SnapshotInfo]]) -> NotFound | None:
    """The error that names the side that was removed meanwhile. None: all are there."""
    for ref, line in zip(refs, lines, strict=True):
        try:
            client.snapshot(line[-1].id)
        except NotFound:
            return NotFound(f"{ref} was removed while it was compared; compare the others without it")
    return None


def _compared(client: Snapshotd, refs: Sequence[str], lines: Sequence[list[SnapshotInfo]]) -> CompareInfo:
    shared = sum(1 for _ in itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(*map(_ids, lines), strict=False)))
    fork_point = lines[0][shared - 1] if shared else None
    after = [line[shared:] for line in lines]
    number = 1 + sum(is_call(one) for one in lines[0][:shared])
    outputs = _Outputs(client)
    pairs = tuple(
        PairInfo(tuple(_align(after[0], other, number, outputs)), tuple(client.diff(lines[0][-1].id, line[-1].id)))
        for other, line in zip(after[1:], lines[1:], strict=True)
    )
    branches = tuple(
        _branch(client, ref, own, line[-1], fork_point) for ref, own, line in zip(refs, after, lines, strict=True)
    )
    return CompareInfo(fork_point, branches, pairs)


def _ids(line: list[SnapshotInfo]) -> list[str]:
    return [one.id for one in line]


def is_call(one: SnapshotInfo) -> bool:
    """True for what an agent or a person did, false for the daemon's own marks."""
    return one.tool.name not in _MARKS


class _Outputs:
    """Digests of recorded outputs. One that is damaged or gone is like no other."""

    def __init__(self, client: Snapshotd) -> None:
        self._client = client

    def same(self, a: SnapshotInfo, b: SnapshotInfo) -> bool:
        if (a.tool.status, a.tool.exit_code, a.tool.error) != (b.tool.status, b.tool.exit_code, b.tool.error):
            return False
        if set(a.tool.outputs) != set(b.tool.outputs) or a.tool.damaged or b.tool.damaged:
            return False
        return all(self._digest(a.id, which) == self._digest(b.id, which) for which in a.tool.outputs)

    def _digest(self, snapshot: str, which: str) -> bytes:
        digest = hashlib.blake2b()
        for piece in self._client.output(snapshot, which):  # type: ignore[arg-type]
            digest.update(piece)
        return digest.digest()


def _align(left: list[SnapshotInfo], right: list[SnapshotInfo], number: int, outputs: _Outputs) -> list[AlignedCall]:
    a, b = [one for one in left if is_call(one)], [one for one in right if is_call(one)]
    rows: list[AlignedCall] = []

    def row(i: int | None, j: int | None, difference: Difference) -> None:
        at = number + (i if i is not None else j or 0)
        rows.append(AlignedCall(at, difference, None if i is None else a[i], None if j is None else b[j]))

    matcher = difflib.SequenceMatcher(None, [_key(one) for one in a], [_key(one) for one in b], autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            for i, j in zip(range(i1, i2), range(j1, j2), strict=True):
                row(i, j, "same" if outputs.same(a[i], b[j]) else "outcome")
            continue
        inner = difflib.SequenceMatcher(
            None, [one.tool.name for one in a[i1:i2]], [one.tool.name for one in b[j1:j2]], autojunk=False
        )
        for kind, k1, k2, l1, l2 in inner.get_opcodes():
            if kind == "equal":  # the same tool with other arguments
                for k, m in zip(range(k1, k2), range(l1, l2), strict=True):
                    row(i1 + k, j1 + m, "arguments")
            else:
                for k in range(k1, k2):
                    row(i1 + k, None, "left")
                for m in range(l1, l2):
                    row(None, j1 + m, "right")
    return rows


def _key(one: SnapshotInfo) -> tuple[str, str]:
    return one.tool.name, json.dumps(one.tool.arguments, sort_keys=True)


def _branch(
    client: Snapshotd, ref: str, own: list[SnapshotInfo], head: SnapshotInfo, fork_point: SnapshotInfo | None
) -> BranchInfo:
    start = fork_point or own[0]
    calls = [one for one in own if is_call(one)]
    trajectory = client.trajectory(head.trajectory)
    at_end = trajectory.head == head.id
    counts = dict.fromkeys(("added", "changed", "deleted"), 0)
    for change in client.diff(start.id, head.id) if head.id != start.id else ():
        counts[change.change] += 1
    return BranchInfo(
        ref=ref,
        head=head,
        name=trajectory.name,
        status=trajectory.status if at_end else "in the past",
        exit_code=trajectory.exit_code if at_end else None,
        calls=len(calls),
        failed=sum(one.tool.status != "done" or bool(one.tool.exit_code) for one in calls),
        seconds=_seconds(client, own, fork_point),
        tokens=tokens_of(client, head, {one.id for one in own}),
        added=counts["added"],
        changed=counts["changed"],
        deleted=counts["deleted"],
    )


def _seconds(client: Snapshotd, own: list[SnapshotInfo], fork_point: SnapshotInfo | None) -> float:
    """Time from where each trajectory of a line began, or went on, to its last snapshot of the line."""
    total, before = 0.0, fork_point
    for identity, taken in itertools.groupby(own, key=lambda one: one.trajectory):
        goes_on = before is not None and before.trajectory == identity
        since = before.created_at if before is not None and goes_on else client.trajectory(identity).created_at
        *_, before = taken
        total += (datetime.fromisoformat(before.created_at) - datetime.fromisoformat(since)).total_seconds()
    return max(0.0, total)


def tokens_of(client: Snapshotd, head: SnapshotInfo, own: set[str]) -> tuple[int, int]:
    """Tokens in and out of the model calls that these snapshots of a line bind, as far as they were reported."""
    found = [0, 0]
    try:
        for entry in client.journal(head.id):
            usage = entry.details.get("usage")
            if entry.kind == "model" and entry.snapshot in own and isinstance(usage, dict):
                for place, name in enumerate(("input_tokens", "output_tokens")):
                    value = usage.get(name)
                    found[place] += value if isinstance(value, int) else 0
    except NotFound:
        pass  # a trajectory without a program has no journal
    return found[0], found[1]
