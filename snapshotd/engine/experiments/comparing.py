"""Comparison of trajectories, call by call: where they part, what differs, and how each came out."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
import shlex
from collections import Counter
from collections.abc import Hashable, Sequence, Set

from snapshotd.api.experiments import AlignedCall, BranchInfo, CompareInfo, Difference, PairInfo
from snapshotd.engine import records
from snapshotd.engine.experiments.parts import Services
from snapshotd.engine.history.lineage import lineage
from snapshotd.engine.markers import EDIT
from snapshotd.errors import Ambiguous, NotFound, UsageError
from snapshotd.types import CallStatus, EntryKind, Snapshot, SnapshotID, ToolCall, Trajectory

_EQUAL_PAIRS = 1_000_000


def compare(services: Services, refs: Sequence[str]) -> CompareInfo:
    """See `ExperimentService.compare`."""
    if len(refs) < 2:
        raise UsageError("there are at least two sides to a comparison; name another trajectory or snapshot")
    lines = [lineage(services.snapshots.get, ref) for ref in refs]
    try:
        return _compare_lines(services, refs, lines)
    except NotFound as exc:
        raise _removal_error(services, refs, lines) or exc from exc


def _removal_error(services: Services, refs: Sequence[str], lines: Sequence[list[Snapshot]]) -> NotFound | None:
    """The error that names the side that was removed meanwhile. None: all are there."""
    for ref, line in zip(refs, lines, strict=True):
        try:
            services.snapshots.get(line[-1].id)
        except NotFound:
            return NotFound(f"{ref} was removed while it was compared; compare the others without it")
    return None


def _compare_lines(services: Services, refs: Sequence[str], lines: Sequence[list[Snapshot]]) -> CompareInfo:
    in_step = zip(*([one.id for one in line] for line in lines), strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda ids: len(set(ids)) == 1, in_step))
    fork_point = lines[0][shared - 1] if shared else None
    after = [line[shared:] for line in lines]
    number = 1 + len(_calls(services, lines[0][:shared]))
    calls = [_calls(services, own) for own in after]
    pairs = []
    for other, line in zip(calls[1:], lines[1:], strict=True):
        aligned = _align(calls[0], other, number)
        changes = map(records.change, services.snapshots.diff(lines[0][-1].id, line[-1].id))
        parted = next((call for call in aligned if call.difference != "same"), None)
        pairs.append(PairInfo(parted, tuple(aligned), tuple(changes)))
    branches = tuple(
        _branch(services, ref, own, line[-1], fork_point, made)
        for ref, own, line, made in zip(refs, after, lines, calls, strict=True)
    )
    return CompareInfo(None if fork_point is None else records.snapshot(fork_point), branches, tuple(pairs))


def _calls(services: Services, line: Sequence[Snapshot]) -> list[Snapshot]:
    """The snapshots of calls, without markers."""
    return [one for one in line if not services.snapshots.is_marker(one)]


def _trajectory_of_side(services: Services, ref: str, head: Snapshot) -> Trajectory:
    """The trajectory that a side is: the one that was named, which has no snapshot of its own yet where a fork took no
    step; else that of the snapshot."""
    with contextlib.suppress(NotFound, Ambiguous):
        named = services.snapshots.trajectory(ref)
        if named.head == head.id:
            return named
    return services.snapshots.trajectory(head.trajectory)


def _fork_changes(services: Services, own: Sequence[Snapshot], last: Trajectory) -> str:
    """The changes that the forks on a line began with: those of an edit, and other arguments of the program."""
    found = []
    for identity in dict.fromkeys((*(one.trajectory for one in own), last.id)):
        line = services.snapshots.trajectory(identity)
        if line.forked_from is None or line.agent is None:
            continue
        source = services.snapshots.trajectory(services.snapshots.get(line.forked_from).trajectory)
        if source.agent is not None and source.agent.argv != line.agent.argv:
            found.append(f"arguments: {shlex.join(line.agent.argv[line.agent.program :])}")
    edits = [one.call.arguments for one in own if services.snapshots.is_marker(one, (EDIT,))]
    return "; ".join([*found, *(str(one["with"]) for one in edits if isinstance(one, dict) and "with" in one)])


def _same_outcome(a: ToolCall, b: ToolCall) -> bool:
    """Outputs are compared by the hashes of their contents. One that is damaged is like no other."""

    def outcome(call: ToolCall) -> tuple[object, ...]:
        return call.status, call.exit_code, call.error, call.output, call.stdout, call.stderr

    return outcome(a) == outcome(b) and not a.damaged and not b.damaged


def _align(a: list[Snapshot], b: list[Snapshot], number: int) -> list[AlignedCall]:
    rows: list[AlignedCall] = []

    def row(i: int | None, j: int | None, difference: Difference) -> None:
        at = number + (i if i is not None else j or 0)
        left, right = None if i is None else records.snapshot(a[i]), None if j is None else records.snapshot(b[j])
        rows.append(AlignedCall(at, difference, left, right))

    matcher = difflib.SequenceMatcher(None, *_keys(a, b), autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            for i, j in zip(range(i1, i2), range(j1, j2), strict=True):
                row(i, j, "same" if _same_outcome(a[i].call, b[j].call) else "outcome")
            continue
        inner = difflib.SequenceMatcher(
            None, [one.call.name for one in a[i1:i2]], [one.call.name for one in b[j1:j2]], autojunk=False
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


def _keys(left: list[Snapshot], right: list[Snapshot]) -> tuple[list[Hashable], list[Hashable]]:
    """The values by which calls are matched. The time of a match grows with the number of equal pairs, which the agent decides
    on. So where one call is made over and over, each also gets its number among its equals."""
    keys = [[(one.call.name, json.dumps(one.call.arguments, sort_keys=True)) for one in side] for side in (left, right)]
    a, b = map(Counter, keys)
    if sum(count * b[key] for key, count in a.items()) <= _EQUAL_PAIRS:
        return list(keys[0]), list(keys[1])
    met: list[Counter[tuple[str, str]]] = [Counter(), Counter()]
    numbered: list[list[Hashable]] = [[], []]
    for found, seen, side in zip(numbered, met, keys, strict=True):
        for key in side:
            seen[key] += 1
            found.append((key, seen[key]))
    return numbered[0], numbered[1]


def _branch(
    services: Services,
    ref: str,
    own: list[Snapshot],
    head: Snapshot,
    fork_point: Snapshot | None,
    calls: list[Snapshot],
) -> BranchInfo:
    start = fork_point or own[0]
    trajectory = _trajectory_of_side(services, ref, head)
    at_end = trajectory.head == head.id
    counts = dict.fromkeys(("added", "changed", "deleted"), 0)
    for change in services.snapshots.diff(start.id, head.id) if head.id != start.id else ():
        counts[change.kind] += 1
    return BranchInfo(
        ref=ref,
        head=records.snapshot(head),
        name=trajectory.name,
        status=trajectory.status if at_end else "in the past",
        exit_code=trajectory.exit_code if at_end else None,
        call_count=len(calls),
        failed=sum(one.call.status is not CallStatus.DONE or bool(one.call.exit_code) for one in calls),
        seconds=_seconds(services, own, fork_point),
        tokens=tokens_of(services, head, {one.id for one in own}),
        added=counts["added"],
        changed=counts["changed"],
        deleted=counts["deleted"],
        forked_with=_fork_changes(services, own, trajectory),
    )


def _seconds(services: Services, own: list[Snapshot], fork_point: Snapshot | None) -> float:
    """Time from where each trajectory of a line began, or went on, to its last snapshot of the line."""
    total, before = 0.0, fork_point
    for identity, taken in itertools.groupby(own, key=lambda one: one.trajectory):
        goes_on = before is not None and before.trajectory == identity
        since = before if before is not None and goes_on else services.snapshots.trajectory(identity)
        *_, before = taken
        total += seconds_between(since.created_at_ns, before.created_at_ns)
    return max(0.0, total)


def seconds_between(began_ns: int, ended_ns: int) -> float:
    return (ended_ns // 1000 - began_ns // 1000) / 1e6


def tokens_of(services: Services, head: Snapshot, own: Set[SnapshotID]) -> tuple[int, int]:
    """Tokens in and out of the model calls that these snapshots of a line bind, as far as they were reported."""
    found = [0, 0]
    try:
        for entry in services.journal.entries(head.id):
            usage = entry.details.get("usage")
            if entry.kind is EntryKind.MODEL and entry.snapshot in own and isinstance(usage, dict):
                for place, name in enumerate(("input_tokens", "output_tokens")):
                    value = usage.get(name)
                    found[place] += value if isinstance(value, int) else 0
    except NotFound:
        pass  # a trajectory without a program has no journal
    return found[0], found[1]
