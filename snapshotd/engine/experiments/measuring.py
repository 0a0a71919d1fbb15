"""Measures of an experiment's branch beside its score: time, calls, tokens, and the files that it changed."""

from __future__ import annotations

import time
from dataclasses import replace

from snapshotd.engine.experiments.base import ExperimentRequest
from snapshotd.engine.experiments.comparing import seconds_between, tokens_of
from snapshotd.engine.experiments.parts import Services
from snapshotd.scores import ExperimentBranch
from snapshotd.types import SnapshotID, Trajectory

_PROTECTED_SHOWN = 20
_WORKSPACE = b"workspace"


def measure_use(
    services: Services, request: ExperimentRequest, branch: ExperimentBranch, line: Trajectory, *, tokens: bool = True
) -> ExperimentBranch:
    """The branch with its calls, and with `tokens` their tokens and cost, as they are now."""
    own = services.snapshots.log(line.id)
    spent = tokens_of(services, services.snapshots.get(line.head), {one.id for one in own}) if tokens else (0, 0)
    cost = sum(count * price for count, price in zip(spent, request.prices, strict=True)) / 1e6
    return replace(
        branch,
        seconds=seconds_between(line.created_at_ns, time.time_ns()),
        calls=sum(not services.snapshots.is_marker(one) for one in own),
        tokens=spent,
        cost=cost,
    )


def measure_end(
    services: Services, request: ExperimentRequest, branch: ExperimentBranch, line: Trajectory, source: SnapshotID
) -> ExperimentBranch:
    """The branch with all measures at its end, without a score."""
    head = services.snapshots.get(line.head)
    files = outside = 0
    protected: list[str] = []
    below = [one.strip("/").encode() for one in request.protected]
    for change in services.snapshots.diff(source, head.id) if head.id != source else ():
        inside = _is_below(change.path, _WORKSPACE)
        files, outside = files + inside, outside + (not inside)
        if len(protected) < _PROTECTED_SHOWN and any(_is_below(change.path, one) for one in below):
            protected.append("/" + change.path.decode(errors="replace"))
    took_steps = head.trajectory == line.id
    return replace(
        measure_use(services, request, branch, line),
        seconds=seconds_between(line.created_at_ns, head.created_at_ns) if took_steps else 0.0,
        files=files,
        lines=_lines(services, source, head.id) if files else 0,
        outside=outside,
        protected=tuple(protected),
    )


def _is_below(path: bytes, folder: bytes) -> bool:
    return path == folder or path.startswith(folder + b"/") or not folder


def _lines(services: Services, a: str, b: str) -> int:
    """Lines of the patch that are added or removed."""
    count, rest = 0, b""

    def add(data: bytes) -> None:
        nonlocal count, rest
        *lines, rest = (rest + data).split(b"\n")
        count += sum(line[:1] in (b"+", b"-") and line[:4] not in (b"+++ ", b"--- ") for line in lines)
        rest = rest[:_LINE_BEGINS]

    services.snapshots.patch(a, b, root=_WORKSPACE, write=add)
    return count


_LINE_BEGINS = 64
"""Bytes that are kept of a line that has not ended: a hostile file may be one line."""
