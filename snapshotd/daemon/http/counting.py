"""The number of requests, by operation and status. The operations are known, so their number is bounded."""

from __future__ import annotations

from starlette.types import Scope

from snapshotd.api.service import RequestStats
from snapshotd.api.wire import API_PREFIX

_OTHER = "other"


class RequestCounts:
    """In the event loop alone, but for `stats`, which may see a request's count without its duration."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], list[float]] = {}

    def add(self, scope: Scope, status: int, duration_s: float) -> None:
        """Count a request that has been answered."""
        route = scope.get("route")
        path = getattr(route, "path", None)
        operation = _OTHER if path is None else f"{scope['method']} {path.removeprefix(API_PREFIX)}"
        found = self._counts.setdefault((operation, status), [0, 0.0])
        found[0] += 1
        found[1] += duration_s

    def stats(self) -> tuple[RequestStats, ...]:
        """All so far."""
        return tuple(
            RequestStats(operation, str(status), int(count), round(duration_s * 1000, 3))
            for (operation, status), (count, duration_s) in sorted(self._counts.copy().items())
        )
