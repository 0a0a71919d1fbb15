"""Retention: the rules of `Policy` as pure functions. They decide which snapshots keep their files, and why.

    find_protected(catalog, running)                      snapshots that stay under any policy
    plan(snapshots, policy, protected=..., now_ns=)  every snapshot with keep or drop, and the reason in words
    trim(decisions, sizes, max_bytes)                drops the oldest that only rules keep, until the repository fits

Nothing here changes anything but `set_policy`. `prune --dry-run` and `prune` print and act on the same decisions.
Only a snapshot that is *stored* is ever dropped. Rules count only snapshots that hold files (stored or captured): a
lost one does not use up a place among the newest five, and doing a plan and planning again drops nothing more.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace

from snapshotd.api.storage import Policy
from snapshotd.catalog.base import Catalog
from snapshotd.errors import UsageError
from snapshotd.types import (
    SECONDS_MOST,
    ApprovalStatus,
    CallStatus,
    Snapshot,
    SnapshotID,
    SnapshotState,
    TrajectoryID,
    duration,
    short,
)

META_KEY = "retention"
"""The catalog's fact with the global policy; a trajectory's own is under `retention.<its id>`."""
COUNT_MAX = 1 << 53
"""Largest number in a policy: every reader of JSON keeps it exactly."""

_HOLDS_FILES = frozenset((SnapshotState.STORED, SnapshotState.CAPTURED))


@dataclass(frozen=True, slots=True)
class RetentionDecision:
    """The fate of one snapshot. `rule`: it is kept by a rule of the policy alone, so `trim` may still drop it."""

    snapshot: Snapshot
    keep: bool
    reason: str
    rule: bool = False


# -- what must stay ----------------------------------------------------------------------------------------------------


def find_protected(catalog: Catalog, running: set[SnapshotID]) -> dict[SnapshotID, str]:
    """Every snapshot that must keep its files, with the reason in words: heads, tagged ones, the first of each
    trajectory, the origins of forks, the begins of trajectories' programs (a resume starts there again), the snapshots
    of pending approvals, the base of every captured snapshot (the archive needs its tree), and `running`, the snapshots
    that running sandboxes stand on.

    One pass over the catalog; memory for one id per trajectory, tag, pending approval and captured snapshot. A tag or
    fork made later is not in the answer, so the caller keeps them from being made meanwhile or asks again before it
    acts.
    """
    reasons: dict[SnapshotID, str] = dict.fromkeys(running, "a running sandbox stands on it")
    first: dict[TrajectoryID, tuple[int, SnapshotID]] = {}
    for item in catalog.snapshots.all():
        if item.tags:
            reasons[item.id] = "tag " + ", ".join(item.tags)
        if item.trajectory not in first or item.seq < first[item.trajectory][0]:
            first[item.trajectory] = (item.seq, item.id)
        if item.state is SnapshotState.CAPTURED and item.base is not None:
            reasons.setdefault(item.base, f"snapshot {short(item.id)}, not stored yet, is built on it")
    for line in catalog.trajectories.list():
        name = line.shown_name
        if line.head != line.forked_from:
            reasons.setdefault(line.head, f"head of {name}")
        if line.forked_from is not None:
            reasons.setdefault(line.forked_from, f"fork {name} began here")
        if line.began is not None:
            reasons.setdefault(line.began, f"the program of {name} began here")
    for approval in catalog.approvals.list(ApprovalStatus.PENDING):
        reasons.setdefault(approval.snapshot, f"approval {short(approval.id)} is pending")
    for _, snapshot_id in first.values():
        reasons.setdefault(snapshot_id, "first of its trajectory")
    return reasons


# -- the rules ---------------------------------------------------------------------------------------------------------


def plan(
    snapshots: Sequence[Snapshot], policy: Policy, *, protected: Mapping[SnapshotID, str], now_ns: int
) -> list[RetentionDecision]:
    """A decision for each of `snapshots`, in their order. They may come from several trajectories, each with all its
    snapshots; the newest are counted for each apart. `max_bytes` does not count here: see `trim`.

    `keep_failed` keeps, of each trajectory, the newest N snapshots whose tool call failed.
    A policy without any rule (`max_bytes` is a limit, no rule) keeps everything. Cost: n log n.
    """
    _check(policy)
    lines: dict[TrajectoryID, list[Snapshot]] = defaultdict(list)
    for item in snapshots:
        lines[item.trajectory].append(item)
    kept: dict[SnapshotID, str] = {}
    for own in lines.values():
        newest = sorted((item for item in own if item.state in _HOLDS_FILES), key=lambda item: item.seq, reverse=True)
        kept.update(_apply_rules(newest, policy, now_ns))
    unmet = _describe_unmet(policy)
    return [_decide(item, protected, kept, unmet) for item in snapshots]


def _apply_rules(newest: Sequence[Snapshot], policy: Policy, now_ns: int) -> dict[SnapshotID, str]:
    """The snapshots of one trajectory that the rules keep, newest first, each with the first rule that keeps it."""
    if not _has_rules(policy):
        return dict.fromkeys((item.id for item in newest), "no rule is set")
    kept: dict[SnapshotID, str] = {}
    if policy.keep_last is not None:
        kept.update(dict.fromkeys((item.id for item in newest[: policy.keep_last]), f"newest {policy.keep_last}"))
    if policy.keep_within_s is not None:
        since_ns = now_ns - int(policy.keep_within_s * 1e9)
        text = f"younger than {duration(policy.keep_within_s)}"
        for item in newest:
            if item.created_at_ns > since_ns:
                kept.setdefault(item.id, text)
    if policy.keep_every is not None:
        for item in newest:
            if item.seq % policy.keep_every == 0:
                kept.setdefault(item.id, f"milestone (every {policy.keep_every})")
    if policy.keep_failed is not None:
        failed = [item for item in newest if item.call.status in (CallStatus.FAILED, CallStatus.TIMED_OUT)]
        for item in failed[: policy.keep_failed]:
            kept.setdefault(item.id, f"newest {policy.keep_failed} failed")
    return kept


def _decide(
    item: Snapshot, protected: Mapping[SnapshotID, str], kept: Mapping[SnapshotID, str], unmet: str
) -> RetentionDecision:
    if item.state is SnapshotState.PRUNED:
        return RetentionDecision(item, keep=True, reason="pruned before: it has no files to give up")
    if item.state is SnapshotState.LOST:
        return RetentionDecision(item, keep=True, reason="lost: it has no files to give up")
    if item.id in protected:
        return RetentionDecision(item, keep=True, reason=protected[item.id])
    if item.state is not SnapshotState.STORED:
        return RetentionDecision(item, keep=True, reason="not stored yet")
    if item.id in kept:
        return RetentionDecision(item, keep=True, reason=kept[item.id], rule=True)
    return RetentionDecision(item, keep=False, reason=unmet)


def _describe_unmet(policy: Policy) -> str:
    """Reason why no rule keeps a snapshot, in words."""
    parts = []
    if policy.keep_last is not None:
        parts.append(f"not among the newest {policy.keep_last}")
    if policy.keep_within_s is not None:
        parts.append(f"older than {duration(policy.keep_within_s)}")
    if policy.keep_every is not None:
        parts.append(f"no milestone (every {policy.keep_every})")
    if policy.keep_failed is not None:
        parts.append(f"not among the newest {policy.keep_failed} failed")
    return ", ".join(parts)


def trim(
    decisions: Sequence[RetentionDecision], sizes: Callable[[set[SnapshotID]], int], max_bytes: int | None
) -> list[RetentionDecision]:
    """Drop the oldest snapshots that only rules keep, as few as make the repository fit into `max_bytes` (None: any
    size fits).

    `sizes(kept)` returns the repository's size in bytes when exactly these snapshots keep their files; more of them
    never take less. It is asked log2(n) + 2 times. If even dropping all of them is not enough, the ones go whose loss
    frees space: the always-kept stay at any size, and no snapshot is dropped for no gain.
    """
    if max_bytes is None:
        return list(decisions)
    kept = {item.snapshot.id for item in decisions if item.keep and item.snapshot.state in _HOLDS_FILES}
    if sizes(kept) <= max_bytes:
        return list(decisions)
    order = sorted(
        (item.snapshot for item in decisions if item.rule), key=lambda s: (s.created_at_ns, s.trajectory, s.seq)
    )
    oldest = [item.id for item in order]
    target = max(max_bytes, sizes(kept.difference(oldest)))
    low, high = 0, len(oldest)  # how many must go: at least `low`; `high` suffices
    while low < high:
        middle = (low + high) // 2
        if sizes(kept.difference(oldest[:middle])) <= target:
            high = middle
        else:
            low = middle + 1
    gone = set(oldest[:low])
    reason = f"among the oldest, over the limit of {max_bytes} bytes"
    return [
        replace(item, keep=False, reason=reason, rule=False) if item.snapshot.id in gone else item for item in decisions
    ]


def _has_rules(policy: Policy) -> bool:
    return (policy.keep_last, policy.keep_within_s, policy.keep_every, policy.keep_failed) != (None, None, None, None)


# -- policies as the catalog keeps them --------------------------------------------------------------------------------


def format_policy(policy: Policy) -> str:
    """A policy as JSON, without the fields that are None. UsageError: a number makes no sense."""
    _check(policy)
    return json.dumps({key: value for key, value in asdict(policy).items() if value is not None}, sort_keys=True)


def parse_policy(text: str) -> Policy:
    """The other way. UsageError for anything that `format_policy` cannot have written."""
    try:
        data = json.loads(text)
    except ValueError as exc:
        raise UsageError(
            f"the retention policy {text[:80]!r} is not JSON ({exc}); set it again with `snapshotd policy`"
        ) from exc
    known = {each.name for each in fields(Policy)}
    if not isinstance(data, dict) or not data.keys() <= known:
        raise UsageError(
            f"the retention policy {text[:80]!r} has other rules than {', '.join(sorted(known))}; set it again"
        )
    policy = Policy(**data)
    _check(policy)
    return policy


def get_policy(catalog: Catalog, trajectory: TrajectoryID | None) -> Policy:
    """The policy that holds for a trajectory (its own, else the global one), or the global one; an empty one where none
    is set."""
    text = (catalog.get_meta(_key(trajectory)) if trajectory is not None else None) or catalog.get_meta(META_KEY)
    return parse_policy(text) if text else Policy()


def set_policy(catalog: Catalog, trajectory: TrajectoryID | None, policy: Policy | None) -> None:
    """Set the global policy, or a trajectory's own; None removes it (as an empty fact). UsageError."""
    catalog.set_meta(_key(trajectory), "" if policy is None else format_policy(policy))


def _key(trajectory: TrajectoryID | None) -> str:
    return META_KEY if trajectory is None else f"{META_KEY}.{trajectory}"


def _check(policy: Policy) -> None:
    """UsageError for a number out of range. `keep_last` may be 0: then only the always-kept stay."""
    for name, least in (("keep_last", 0), ("keep_every", 1), ("keep_failed", 1), ("max_bytes", 1)):
        value = getattr(policy, name)
        if value is not None and (type(value) is not int or not least <= value <= COUNT_MAX):
            raise UsageError(
                f"{value!r} cannot be {name} of a retention policy: give a whole number from {least} to {COUNT_MAX}"
            )
    within = policy.keep_within_s
    if within is None:
        return
    if (
        isinstance(within, bool) or not isinstance(within, int | float) or not 0 < within <= SECONDS_MOST
    ):  # false for nan, too
        raise UsageError(
            f"{within!r} cannot be keep_within_s of a retention policy: give a duration above zero, such as 7d"
        )
