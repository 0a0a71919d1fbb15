"""The conversations that agents keep themselves, in files of their own: read as they grow, and cut at a snapshot.

Claude Code writes one JSON object a line. A line of a conversation has `uuid` and names the line before it in
`parentUuid`; the result of a call is in a line of the user, under `tool_use_id`. The file is written while the agent
goes on: when a call has ended, its result is not there yet. So a result comes from the hook that tells of it, and the
line that repeats it later is recognised by the id.

The files are the user's, and another process opens them (`user_files.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from snapshotd.engine.folders.events import HookEvent
from snapshotd.engine.folders.user_files import OwnFiles
from snapshotd.errors import Conflict, LimitExceeded, UsageError
from snapshotd.formats.foreign_json import parse
from snapshotd.types import Message

MOST_BYTES, MOST_AT_ONCE_BYTES = 64 << 20, 8 << 20
"""The most that is read of a transcript, for a session with its history, and at one hook."""
RESUME = {
    "claude": "claude --resume {session}",
    "codex": "codex resume {session}",
    "gemini": "gemini --resume {session}",
}
"""How each agent goes on with a session of its own."""


@dataclass(slots=True)
class TranscriptReader:
    """Reads what a session's transcript has grown by. `told`: ids of calls and results that are recorded already."""

    offset: int = 0
    last: str | None = None
    """The `uuid` of the last line that was read."""
    told: set[tuple[str, str]] = field(default_factory=set)

    def read(self, event: HookEvent, own: OwnFiles) -> list[Message]:
        """The messages since the last time, with the call and the result that the event tells of."""
        messages = []
        for line in self._read_lines(event.transcript, own):
            self.last = line["uuid"]
            message = self._take_new(line["message"]) if isinstance(line.get("message"), dict) else None
            if message is not None and not line.get("isSidechain"):
                messages.append(message)
        if event.call_id is not None and event.lane is None and event.stage == "after":
            messages += self._take_event(event, event.call_id)
        return messages

    def _read_lines(self, path: str | None, own: OwnFiles) -> Iterator[dict[str, Any]]:
        if path is None or not path.startswith("/"):
            return
        data = read_text(own, path, self.offset, MOST_AT_ONCE_BYTES)
        end = data.rfind(b"\n") + 1
        if not end and len(data) == MOST_AT_ONCE_BYTES:
            end = len(data)  # no conversation has a line so long
        self.offset += end
        yield from conversation_lines(data[:end])

    def place(self) -> dict[str, Any]:
        """The reader's place, for `at`."""
        return {"offset": self.offset, "last": self.last}

    @staticmethod
    def at(place: dict[str, Any], recorded: Iterable[Message]) -> TranscriptReader:
        """A reader that goes on from a place. `recorded`: the messages of the session so far."""
        told = {key for message in recorded for key in _ids(message.content)}
        return TranscriptReader(place.get("offset", 0), place.get("last"), told)

    def _take_new(self, message: dict[str, Any]) -> Message | None:
        """The message without what is recorded already; None if nothing is left."""
        role, content = str(message.get("role", "")), message.get("content")
        if isinstance(content, list):
            content = [block for block in content if not (_ids([block]) & self.told)]
            if not content:
                return None
            self.told |= _ids(content)
        return Message(role, content)

    def _take_event(self, event: HookEvent, call_id: str) -> Iterator[Message]:
        if ("tool_use", call_id) not in self.told:
            self.told.add(("tool_use", call_id))
            call = {"type": "tool_use", "id": call_id, "name": event.tool, "input": event.arguments}
            yield Message("assistant", [call])
        if ("tool_result", call_id) not in self.told:
            self.told.add(("tool_result", call_id))
            result = {"type": "tool_result", "tool_use_id": call_id, "content": event.error or event.result}
            yield Message("user", [{**result, "is_error": True} if event.error is not None else result])


def read_text(own: OwnFiles, path: str, offset: int = 0, most: int = MOST_BYTES) -> bytes:
    """A user's file from an offset, or b"" where there is none, or none that can be read in time."""
    try:
        return own.read(path, offset, most)
    except OSError:
        return b""


def conversation_lines(data: bytes) -> Iterator[dict[str, Any]]:
    """The lines of a transcript that belong to its conversation."""
    for text in data.splitlines():
        with contextlib.suppress(ValueError, LimitExceeded):
            line = parse(text)
            if isinstance(line, dict) and isinstance(line.get("uuid"), str):
                yield line


def _ids(content: Any) -> set[tuple[str, str]]:
    """The calls and results in a message's content."""
    found = set()
    for block in content if isinstance(content, list) else ():
        if isinstance(block, dict) and block.get("type") in ("tool_use", "tool_result"):
            key = block.get("id") if block["type"] == "tool_use" else block.get("tool_use_id")
            if isinstance(key, str):
                found.add((block["type"], key))
    return found


def _content(line: dict[str, Any]) -> Any:
    message = line.get("message")
    return message.get("content") if isinstance(message, dict) else None


def _is_prompt(line: dict[str, Any]) -> bool:
    return line.get("type") == "user" and not line.get("isMeta") and not _ids(_content(line))


@dataclass(frozen=True, slots=True)
class CutSession:
    """A session that `cut_session` made: its id, its transcript, and where a reader goes on in it."""

    session: str
    transcript: str
    offset: int
    last: str


def cut_session(own: OwnFiles, transcript: str, last: str | None, call_id: str | None) -> CutSession | None:
    """Write a new session beside a transcript, with its history up to a snapshot. None: that history is empty. The old
    session stays as it is.

    `last`: the `uuid` of the last line that the snapshot knew; `call_id`: the call whose result it ends with (None: it
    ends before the next words of a person). UsageError, Conflict: that place is not in the transcript (any more).
    """
    lines = [line for line in conversation_lines(read_text(own, transcript)) if not line.get("isSidechain")]
    if not lines:
        raise UsageError(f"the transcript {transcript} is empty or cannot be read; rewind the files alone")
    kept = _link_lines(_drop_open_calls(lines[: _find_end(lines, transcript, last, call_id)]))
    if not kept:
        return None
    session = str(uuid.uuid4())
    text = b"".join(json.dumps({**line, "sessionId": session}).encode() + b"\n" for line in kept)
    path = os.path.join(os.path.dirname(transcript), f"{session}.jsonl")
    own.create(path, text)
    return CutSession(session, path, len(text), kept[-1]["uuid"])


def _find_end(lines: list[dict[str, Any]], transcript: str, last: str | None, call_id: str | None) -> int:
    if call_id is not None:
        for number, line in enumerate(lines):
            if ("tool_result", call_id) in _ids(_content(line)):
                return number + 1
        raise Conflict(
            f"the result of the call {call_id} is not in {transcript} yet; try again when the agent has gone on"
        )
    start = 0
    if last is not None:
        start = next((number + 1 for number, line in enumerate(lines) if line["uuid"] == last), -1)
        if start < 0:
            raise Conflict(f"the place of the snapshot is not in {transcript} any more; rewind the files alone")
    return next((n for n, line in enumerate(lines[start:], start) if _is_prompt(line)), len(lines))


def _drop_open_calls(lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The lines without calls that have no result among them: a provider refuses a history with such a call."""
    answered = {key for line in lines for kind, key in _ids(_content(line)) if kind == "tool_result"}
    for line in lines:
        content = _content(line)
        open_calls = {key for kind, key in _ids(content) if kind == "tool_use"} - answered
        if not open_calls:
            yield line
            continue
        left = [block for block in content if not (isinstance(block, dict) and block.get("id") in open_calls)]
        if left:
            yield {**line, "message": {**line["message"], "content": left}}


def _link_lines(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines as one chain: one whose parent was left out follows the line before it."""
    kept: list[dict[str, Any]] = []
    known: set[str] = set()
    for line in lines:
        parent = line.get("parentUuid")
        if parent is not None and parent not in known:
            line = {**line, "parentUuid": kept[-1]["uuid"] if kept else None}
        known.add(line["uuid"])
        kept.append(line)
    return kept
