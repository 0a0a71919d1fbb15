"""The answers of the tools: the API's records without what a model has no use for, and bounded.

A field that has the name of one of the API's is taken over from there (`from_attributes`). The docstring of a field is its
description in the tool's schema.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict

from snapshotd.api.snapshots import SnapshotInfo
from snapshotd.client.twofold import closing

TEXT_BYTES = 32 << 10
"""Bytes of text in an answer, if the client does not say how many it wants."""
TEXT_MAX_BYTES = 1 << 20
ITEMS, ITEMS_MAX = 100, 1000
"""Items of a list, the same."""
_ARGUMENTS_CHARS = 2000
T = TypeVar("T")


def _shorten(value: Any) -> Any:
    text = json.dumps(value, ensure_ascii=False)
    return value if len(text) <= _ARGUMENTS_CHARS else f"{text[:_ARGUMENTS_CHARS]}... ({len(text)} characters)"


class Answer(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True, from_attributes=True, extra="ignore")


class CallAnswer(Answer):
    """The call that a snapshot was taken after."""

    name: str
    arguments: Annotated[Any, BeforeValidator(_shorten)]
    """As JSON; cut, as text, where it is long."""
    status: str
    """done, failed, timed-out, interrupted, or unknown (it began, and its end was not recorded)."""
    exit_code: int | None
    error: str | None
    outputs: list[str]
    """Outputs that `read_output` has."""


class CountsAnswer(Answer):
    added: int
    changed: int
    deleted: int


class SnapshotAnswer(Answer):
    id: str
    trajectory: str
    seq: int
    """Its number in its trajectory."""
    parent: str | None
    tool: CallAnswer
    files: CountsAnswer | None
    """Files that differ from the parent's; null until they are counted."""
    state: str
    """captured: survives a crash of the daemon; stored: also a power loss; lost, pruned: its files are gone."""
    tags: list[str]
    messages: int
    """Length of the conversation that was recorded up to it."""
    created_at: str


class TrajectoryAnswer(Answer):
    """A sandbox with its history."""

    id: str
    name: str | None
    status: str
    """running, stopped (it starts again with the next command), finished, failed or interrupted."""
    head: str
    """Its newest snapshot."""
    image: str
    network: str
    """The network that it reaches: none, bridge (the outside), or host."""
    forked_from: str | None
    exit_code: int | None
    """The exit code of its own program, if it had one that has ended."""


class PartAnswer(Answer):
    """A part of a text."""

    text: str
    """UTF-8, with U+FFFD for other bytes; base64 if that was asked for."""
    next_offset: int | None
    """There is more: call again with this `offset`. Null: this is the end."""


class CommandAnswer(Answer):
    exit_code: int | None
    """0: it succeeded. 124 with the status timed-out: it took longer than `timeout_s`. Null: its end is not known."""
    status: str
    """done, failed, timed-out, interrupted or unknown."""
    stdout: str
    stderr: str
    cut: bool
    """The middle of an output is left out; `read_output` has it (not of a throw-away fork)."""
    error: str | None
    """Why it ended, where the exit code does not say it."""
    snapshot: str | None
    """The snapshot after it. Null in a throw-away fork."""


class RunAnswer(CommandAnswer):
    trajectory: str


class ChangeAnswer(Answer):
    change: str
    """added, changed or deleted."""
    path: str


class DiffAnswer(Answer):
    changes: list[ChangeAnswer]
    next_offset: int | None
    """There are more: call again with this `offset`."""
    patch: PartAnswer | None = None
    """The changes of text below /workspace, if a patch was asked for."""


class LogAnswer(Answer):
    snapshots: list[SnapshotAnswer]
    """Oldest first."""
    older: int
    """Number of older ones that are not shown: ask for more with `last`."""


class ShowAnswer(SnapshotAnswer):
    conversation: list[PartAnswer] = []
    """The newest messages up to it, oldest first, each as JSON."""


class TrajectoriesAnswer(Answer):
    trajectories: list[TrajectoryAnswer]
    """Newest first."""
    more: int
    """Number of older ones that are not shown."""


class FileAnswer(Answer):
    path: str
    kind: str
    mode: str
    size: int


class FilesAnswer(Answer):
    files: list[FileAnswer]
    next_offset: int | None
    """There are more: call again with this `offset`."""


class PreviewAnswer(Answer):
    target: str
    changes: list[ChangeAnswer]
    """Changes of files, from the head to what would be there."""
    change_count: int
    """Number of all changes; at most 100 are listed."""
    messages_dropped: int
    effects: list[str]
    """Irreversible calls that would be left behind, and stay done."""


class ForksAnswer(Answer):
    trajectories: list[TrajectoryAnswer]


class SideAnswer(Answer):
    ref: str
    status: str
    exit_code: int | None
    call_count: int
    """Calls since the fork point."""
    failed: int
    seconds: float
    added: int
    changed: int
    deleted: int


class CompareAnswer(Answer):
    fork_point: str | None
    """The last snapshot that all have."""
    sides: list[SideAnswer]
    first_differences: list[str]
    """For each side after the first: the first call that differs from the first side's."""
    differing_files: list[list[ChangeAnswer]]
    """For each side after the first: files of the two heads that differ, at most 100."""


class ScoreAnswer(Answer):
    ref: str
    snapshot: str
    rank: int | None
    score: float | None
    """The mean of its runs; null: none could be scored."""
    errors: list[str]


class ScoresAnswer(Answer):
    rows: list[ScoreAnswer]
    """The best first."""


class BisectAnswer(Answer):
    first_bad: SnapshotAnswer
    """The snapshot whose call broke it."""
    last_good: str
    unknown: list[str]
    """Snapshots between them that could not be tested: the call of each may have broken it as well."""
    flaky: bool
    """The same snapshot passed once and failed once: do not trust the answer."""


class MergeAnswer(Answer):
    snapshot: str | None
    """The new head. Null: nothing was merged."""
    changes: list[ChangeAnswer]
    conflicts: list[str]
    """With any, nothing is merged."""
    warnings: list[str]


class ApprovalAnswer(Answer):
    id: str
    trajectory: str
    name: str
    arguments: Annotated[Any, BeforeValidator(_shorten)]
    digest: str
    status: str
    question: str | None


class ApprovalsAnswer(Answer):
    approvals: list[ApprovalAnswer]


def snapshot_of(info: SnapshotInfo) -> SnapshotAnswer:
    return SnapshotAnswer.model_validate(info)


class KeptText:
    """The beginning and the end of an output that comes piece by piece."""

    def __init__(self, most: int) -> None:
        self._first, self._last = most // 4, most - most // 4
        self._head, self._tail = bytearray(), bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._first - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._last:
            del self._tail[: -self._last]

    @property
    def is_cut(self) -> bool:
        return self.total > self._first + self._last

    def text(self) -> str:
        """The output, or its two ends with a note between them."""
        if not self.is_cut:
            return bytes(self._head + self._tail).decode(errors="replace")
        left_out = self.total - self._first - self._last
        note = f"\n[... {left_out} of {self.total} bytes are left out ...]\n"
        return self._head.decode(errors="replace") + note + bytes(self._tail[-self._last :]).decode(errors="replace")


async def text_part(pieces: AsyncIterator[bytes], offset: int, most: int) -> PartAnswer:
    """`most` bytes of a text from byte `offset` on, cut between characters."""
    data, end = await bytes_part(pieces, offset, most)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data, final=end is None)
    return PartAnswer(text=text, next_offset=None if end is None else end - len(decoder.getstate()[0]))


async def bytes_part(pieces: AsyncIterator[bytes], offset: int, most: int) -> tuple[bytes, int | None]:
    """`most` bytes from byte `offset` on, and where the rest begins; None: there is none."""
    kept, at = bytearray(), 0
    async with closing(pieces):
        async for piece in pieces:
            kept += piece[max(0, offset - at) :]
            at += len(piece)
            if len(kept) > most:
                return bytes(kept[:most]), offset + most
    return bytes(kept), None


async def items_part(items: AsyncIterator[T], offset: int, most: int) -> tuple[list[T], int | None]:
    """`most` items from number `offset` on, and the number of the next one; None: there is none."""
    kept: list[T] = []
    number = 0
    async with closing(items):
        async for item in items:
            if number >= offset + most:
                return kept, number
            if number >= offset:
                kept.append(item)
            number += 1
    return kept, None
