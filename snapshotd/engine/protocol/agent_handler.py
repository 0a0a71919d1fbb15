"""The meaning of an agent's requests, as a specification: `AgentHandler` is implemented by calls.py, and served by
agent_protocol.py."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from snapshotd.errors import Conflict
from snapshotd.types import CallStatus, EntryKind, Message, SideEffect

VERSION = 2
OPEN_CALL_LIMIT = 256
"""Calls of one connection that have begun and not ended."""
BODY_LIMIT_BYTES = 1 << 30
MESSAGE_LIMIT_BYTES = 8 << 20
"""Limit for a message, arguments, a value of the state or the store: the daemon takes them into memory."""
VALUE_LIMIT_BYTES = 1 << 20
"""Limit for a trajectory's state, and for a value of the store."""
PAGE_MESSAGES = 16
"""Messages read at once; with their size limit it bounds the memory of an answer."""
PAGE_BYTES = 4 << 20
ERROR_LIMIT_CHARS = 64 << 10

StreamName = Literal["stdout", "stderr"]
StoreOperation = Literal["get", "put", "delete", "search"]
Answer = dict[str, Any]
"""The fields of an answer; `body` (bytes) goes behind the line."""


class BodyWriter(Protocol):
    """Takes a result while it arrives. `repo.BlobWriter` is one."""

    def write(self, data: bytes) -> object: ...

    def discard(self) -> None:
        """Drop it. Called in any case in the end; must do nothing after the handler saved it."""


@dataclass(frozen=True, slots=True)
class Intent:
    """A `call_begin`. `approve`: the program itself wants a person's agreement, with its question if it is a text.
    `facts`: as `Entry.facts`. `reuse` False: its recorded outcome is for this run alone; `code`: a digest of the tool,
    which another run's has to equal. `waits`: the program asks again if it is answered with `later`."""

    call_id: str
    name: str
    arguments: Any
    kind: EntryKind = EntryKind.TOOL
    side_effect: SideEffect = SideEffect.LOCAL
    key: str | None = None
    approve: bool | str = False
    compensate: tuple[str, ...] | None = None
    task: str | None = None
    facts: tuple[Any, ...] = ()
    skippable: bool = False
    reuse: bool = True
    code: str | None = None
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """A `call_end`. `result` is JSON (bytes; checked), or the return value of `body_writer`, complete but not checked
    to be JSON."""

    status: CallStatus
    result: bytes | BodyWriter | None = None
    error: str | None = None
    exit_code: int | None = None
    usage: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """An `approve`: the program asks a person. `within`: the running call in whose body it does."""

    call_id: str
    question: str
    details: Any
    expires_s: float | None = None
    within: str | None = None


class AgentHandler(Protocol):
    """The handler of one container's requests. Any method may raise a SnapshotdError; the agent is told its one
    sentence.

    `pid` is the peer's process id in the daemon's pid namespace. `call_id` is the agent's choice, 32 hexadecimal
    characters, unique among the connection's open calls only: refuse one that the trajectory has seen (Conflict).
    `cancelled` is set when no client waits for the answer any more.
    """

    @property
    def closed(self) -> bool:
        """True if it serves no agent any more: its sandbox has ended."""

    def hello(self, pid: int) -> Answer:
        """Facts for the agent: `trajectory`, `snapshot` and `replaying`."""

    def claim(self, pid: int, call_ids: tuple[str, ...]) -> set[str]:
        """Take the calls that a process had begun on another connection: it has reconnected. Returns those that are open and
        wait for it."""

    def find_end(self, call_id: str) -> str | None:
        """Find the answer to a `call_end` that is sent again: the id that it gave, or would have given. None: the call has not
        ended."""

    def lose(self, pid: int, call_ids: tuple[str, ...]) -> None:
        """Give up these calls: their connection ended, so their ends will never come."""

    def call_begin(self, pid: int, intent: Intent, cancelled: threading.Event, *, again: bool = False) -> Answer:
        """Record the intent of a call that is about to run. May wait for a person. With `replayed` in the answer the call has
        ended already; with `later` it has not begun, because other calls of the replay come first. `again`, here and below:
        the request is sent again, and the first one may or may not have arrived."""

    def body_writer(self, call_id: str) -> BodyWriter:
        """The writer for a large result of a call."""

    def call_end(self, pid: int, call_id: str, outcome: Outcome) -> str:
        """End a call that this connection began: take the snapshot (unless it was a model call) and return the head's
        id."""

    def output(self, call_id: str, stream: StreamName, data: bytes, rid: str | None = None) -> None:
        """Take a piece of output of a call that this connection began. `rid`, here and below: the request's own name, the
        same when it is sent again."""

    def fact(self, kind: str, value: Any, rid: str | None = None) -> Any:
        """The value that is recorded here; if none is, record `value` and return it."""

    def message(self, role: str, content: Any, within: str | None, rid: str | None = None) -> None:
        """Append to the conversation."""

    def messages(self, offset: int, limit: int) -> list[Message]:
        """At most `limit` messages of the conversation, from number `offset` (0 is the oldest inherited one)."""

    def state(self) -> dict[str, Any]:
        """The agent's own state."""

    def state_set(self, key: str, value: tuple[Any] | None, within: str | None = None) -> None:
        """Set a key (a one-element tuple), or remove it."""

    def task(self, name: str, status: str, depends: tuple[str, ...], note: str | None) -> Answer:
        """Declare or change a subtask. The answer has its `status`."""

    def tasks(self) -> list[dict[str, Any]]:
        """All subtasks."""

    def checkpoint(self, pid: int, call_id: str, name: str, within: str | None, *, again: bool = False) -> Answer:
        """Take a snapshot without a call: `snapshot` is its id."""

    def approve(self, pid: int, question: Question, cancelled: threading.Event, *, again: bool = False) -> Answer:
        """Ask a person and wait: `approved`, `by`, `reason`, `answer`."""

    def store(self, op: StoreOperation, fields: dict[str, Any], within: str | None, rid: str | None = None) -> Answer:
        """Carry out a request to the key-value store. `fields` are the request's, checked; `value` is among them if it has
        one."""


class HandlerSlot:
    """The handler of one container's agents: there is none before the container has a trajectory."""

    def __init__(self) -> None:
        self.open = threading.Event()
        """The daemon answers no agent before this is set."""
        self.open.set()
        self._handler: AgentHandler | None = None

    def bind(self, handler: AgentHandler) -> None:
        """Have all requests from now on answered by this handler."""
        self._handler = handler

    def find(self) -> AgentHandler:
        """The handler, once the daemon answers. Conflict: there is none, or its sandbox has ended."""
        self.open.wait()
        if self._handler is None or self._handler.closed:
            raise Conflict("this sandbox belongs to no trajectory (yet, or any more); nothing was recorded")
        return self._handler

    def lose(self, pid: int, call_ids: tuple[str, ...]) -> None:
        """Tell the handler, if there is one, of a connection that ended with calls open."""
        if self._handler is not None:
            self._handler.lose(pid, call_ids)
