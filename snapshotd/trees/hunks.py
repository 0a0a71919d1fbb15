"""Find changed lines, in bounded time for any lines, and group them into hunks.

The standard library's difflib is cubic on hostile input (minutes for 10,000 lines). So: cut the common head and tail,
split at lines that occur once on both sides (as patience diff does, O(n log n)), look for the shortest edit between
those (Myers, "An O(ND) Difference Algorithm and Its Variations", 1986) while a total budget of steps lasts; the rest is
replaced as a whole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from snapshotd.kernel import turns

CONTEXT_LINES = 3
STEP_BUDGET = 5_000_000
"""Steps for one file: about two seconds."""
MAX_EDITS = 1000
"""Edits between two splitting lines; memory grows with its square (8 MB)."""


@dataclass(frozen=True, slots=True)
class Hunk:
    """`start` counts from 1; with a count of 0 it is the line before (as unified diffs have it). `lines`: (sign, line
    with its end)."""

    old_start: int
    old_count: int
    new_start: int
    new_count: int
    lines: tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class _Block:
    """`size` equal lines."""

    a: int
    b: int
    size: int


def hunks(old: Sequence[bytes], new: Sequence[bytes], context: int) -> Iterator[Hunk]:
    """The differences of two lists of lines, with `context` equal lines around each. Nothing if they are equal."""
    changes: list[tuple[int, int, int, int]] = []
    at_a = at_b = 0
    for block in [*_matching(old, new), _Block(len(old), len(new), 0)]:
        if block.a > at_a or block.b > at_b:
            changes.append((at_a, block.a, at_b, block.b))
        at_a, at_b = block.a + block.size, block.b + block.size
    group: list[tuple[int, int, int, int]] = []
    for change in changes:
        if group and change[0] - group[-1][1] > 2 * context:
            yield _hunk(old, new, group, context)
            group = []
        group.append(change)
    if group:
        yield _hunk(old, new, group, context)


def _hunk(old: Sequence[bytes], new: Sequence[bytes], group: list[tuple[int, int, int, int]], context: int) -> Hunk:
    first_a, _, first_b, _ = group[0]
    lead = min(context, first_a, first_b)
    at, start_b = first_a - lead, first_b - lead
    lines: list[tuple[bytes, bytes]] = []
    for a1, a2, b1, b2 in group:
        lines += [(b" ", line) for line in old[at:a1]]
        lines += [(b"-", line) for line in old[a1:a2]]
        lines += [(b"+", line) for line in new[b1:b2]]
        at = a2
    lines += [(b" ", line) for line in old[at : at + context]]
    count_a = sum(sign != b"+" for sign, _ in lines)
    count_b = sum(sign != b"-" for sign, _ in lines)
    start_a = first_a - lead
    return Hunk(start_a + bool(count_a), count_a, start_b + bool(count_b), count_b, tuple(lines))


def _matching(old: Sequence[bytes], new: Sequence[bytes]) -> list[_Block]:
    """Blocks of equal lines, ascending on both sides."""
    head = 0
    while head < min(len(old), len(new)) and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    end_a, end_b = len(old) - tail, len(new) - tail
    ids: dict[bytes, int] = {}
    ids_a = [ids.setdefault(line, len(ids)) for line in old]
    ids_b = [ids.setdefault(line, len(ids)) for line in new]
    blocks = [_Block(0, 0, head)]
    budget = STEP_BUDGET
    at_a, at_b = head, head
    for a, b in [*_anchors(ids_a[head:end_a], ids_b[head:end_b], head), (end_a, end_b)]:
        found, steps = _shortest_edit(ids_a[at_a:a], ids_b[at_b:b], budget)
        budget -= steps
        blocks += [_Block(at_a + block.a, at_b + block.b, block.size) for block in found]
        if a < end_a:
            blocks.append(_Block(a, b, 1))
        at_a, at_b = a + 1, b + 1
    blocks.append(_Block(end_a, end_b, tail))
    return [block for block in blocks if block.size]


def _anchors(old: Sequence[int], new: Sequence[int], offset: int) -> list[tuple[int, int]]:
    """Positions of lines that occur once on each side, as many as are in the same order on both."""
    in_old, in_new = Counter(old), Counter(new)
    where = {line: i for i, line in enumerate(new) if in_new[line] == 1}
    pairs = [(i, where[line]) for i, line in enumerate(old) if in_old[line] == 1 and line in where]
    tops: list[int] = []  # longest increasing subsequence of the second numbers
    ends: list[int] = []
    before: list[int] = []
    for i, (_, b) in enumerate(pairs):
        at = bisect_left(tops, b)
        before.append(ends[at - 1] if at else -1)
        tops[at : at + 1] = [b]
        ends[at : at + 1] = [i]
    chain: list[tuple[int, int]] = []
    i = ends[-1] if ends else -1
    while i >= 0:
        chain.append((pairs[i][0] + offset, pairs[i][1] + offset))
        i = before[i]
    return chain[::-1]


def _shortest_edit(old: Sequence[int], new: Sequence[int], budget: int) -> tuple[list[_Block], int]:
    """Equal blocks on a shortest way from `old` to `new`, and the steps it took; no blocks if that is beyond the budget
    or MAX_EDITS."""
    n, m = len(old), len(new)
    if not n or not m:
        return [], 0
    limit = min(n + m, MAX_EDITS)
    reach = [0] * (2 * limit + 3)  # per diagonal k (at index k + limit + 1): the furthest position in `old`
    zero = limit + 1
    trace: list[list[int]] = []
    steps = 0
    for edits in range(limit + 1):
        turns.give_way()
        trace.append(reach[zero - edits - 1 : zero + edits + 2])
        for k in range(-edits, edits + 1, 2):
            down = k == -edits or (k != edits and reach[zero + k - 1] < reach[zero + k + 1])
            start = x = reach[zero + k + 1] if down else reach[zero + k - 1] + 1
            while x < n and x - k < m and old[x] == new[x - k]:
                x += 1
            reach[zero + k] = x
            steps += x - start + 1
            if x >= n and x - k >= m:
                return _way_back(trace, n, m), steps
        if steps > budget:
            break
    return [], steps


def _way_back(trace: list[list[int]], n: int, m: int) -> list[_Block]:
    blocks: list[_Block] = []
    x, y = n, m
    for edits in range(len(trace) - 1, -1, -1):
        reach, zero, k = trace[edits], edits + 1, x - y
        if edits == 0:
            before_x, before_y, start = 0, 0, 0
        else:
            down = k == -edits or (k != edits and reach[zero + k - 1] < reach[zero + k + 1])
            before_k = k + 1 if down else k - 1
            before_x = reach[zero + before_k]
            before_y = before_x - before_k
            start = before_x if down else before_x + 1
        if x > start:
            blocks.append(_Block(start, start - k, x - start))
        x, y = before_x, before_y
    return blocks[::-1]
