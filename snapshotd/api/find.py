"""Finding text in what trajectories have recorded."""

from __future__ import annotations

from typing import Annotated

from snapshotd.api.operation import READ, Operation
from snapshotd.api.record import ApiRecord, OneOf, record

FIND_MAX = 200
"""Most hits of one answer."""
FIND_CHARS_MAX = 1000
"""Longest text to look for."""


@record(frozen=True)
class HitInfo(ApiRecord):
    """One record that has the text. A fork's history is its origin's: a hit is given once, with the trajectory that made it."""

    trajectory: str
    name: str | None
    """The trajectory's."""
    snapshot: str
    """The snapshot that the record came with."""
    seq: int
    kind: Annotated[str, OneOf("argument", "output", "message")]
    """`argument`: name and arguments of the call. `output`: what it printed, or its error."""
    part: str
    """The output (`stdout`, `stderr`, `output`, `error`), the message's number in the conversation (from 0), or the tool's
    name."""
    excerpt: str
    """The text around the first match. Empty where the record cannot be read any more."""
    matches: tuple[tuple[int, int], ...]
    """Beginning and end of each match, in characters of `excerpt`."""
    cut: bool
    """Only a part of the record is looked at: it is longer than the index takes."""
    created_at: str
    """The snapshot's."""


@record(frozen=True)
class FindInfo(ApiRecord):
    """Hits, the newest first."""

    hits: tuple[HitInfo, ...]
    """Records that have the text."""
    next: int | None
    """Where the next hits begin, for `before`; null: these are all."""
    waiting: int
    """Number of snapshots that are not in the index yet."""


FIND = Operation("GET", "/find", FindInfo, READ, "trajectories", by="find")
