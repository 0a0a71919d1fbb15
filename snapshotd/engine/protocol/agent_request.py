"""One request from inside a sandbox, and its fields, checked. docs/agent-protocol.md has the table.

The sender is an attacker. A field that is not what it should be raises `Malformed`, after which the connection is closed.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from snapshotd.engine.protocol.agent_handler import Intent, Question, StreamName
from snapshotd.engine.protocol.agent_wire import Malformed, parse_json
from snapshotd.types import EntryKind, SideEffect

_CALL_ID = re.compile(r"[0-9a-f]{32}")
_RID = re.compile(r"[0-9a-f]{16,32}")
_INTEGER_LIMIT = 1 << 53
_KINDS = (EntryKind.TOOL, EntryKind.MODEL, EntryKind.TASK)
_FACTS_LIMIT = 10_000
_ARGV_LIMIT = 64
_DEPENDS_LIMIT = 100
_SECONDS_LIMIT = 10 * 365 * 86400


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """One request line. `body_bytes` raw bytes follow it if that is not None. `key`, below, is the name of a field."""

    id: int
    op: str
    fields: dict[str, Any]
    body_bytes: int | None

    # -- one field -----------------------------------------------------------------------------------------------------

    def label(self, key: str, limit: int) -> str:
        """A printable text of 1 to `limit` characters. People see it in lists, so it holds nothing that moves a
        cursor."""
        return _label(key, self.fields.get(key), limit)

    def optional_label(self, key: str, limit: int) -> str | None:
        """As `label`, or None when it is left out."""
        return None if self.fields.get(key) is None else self.label(key, limit)

    def optional_text(self, key: str) -> str | None:
        """Any text, or None when it is left out."""
        value = self.fields.get(key)
        if value is not None and not isinstance(value, str):
            raise Malformed(f"The field {key} is not a text; correct the request or leave it out.")
        return value

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An integer from `low` to `high`."""
        value = self.fields.get(key, default)
        if type(value) is not int or not low <= value <= high:
            raise Malformed(f"The field {key} is not an integer from {low} to {high}; correct the request.")
        return value

    def version(self, key: str) -> int | None:
        """The version of a stored value, or None when it is left out."""
        return None if self.fields.get(key) is None else self.integer(key, 0, _INTEGER_LIMIT)

    def offset(self) -> int:
        """The field offset: the number of a message."""
        return self.integer("offset", 0, _INTEGER_LIMIT, default=0)

    def boolean(self, key: str, *, default: bool = False) -> bool:
        """True or false; `default` when it is left out."""
        value = self.fields.get(key, default)
        if not isinstance(value, bool):
            raise Malformed(f"The field {key} is neither true nor false; correct the request.")
        return value

    def one_of(self, key: str, choices: Sequence[str], default: str | None = None) -> str:
        """One of a few words."""
        value = self.fields.get(key, default)
        if not isinstance(value, str) or value not in choices:
            raise Malformed(f"The field {key} is none of {', '.join(choices)}; correct the request.")
        return value

    def seconds(self, key: str) -> float | None:
        """A time, or None when it is left out."""
        value = self.fields.get(key)
        if value is not None and (type(value) not in (int, float) or not 0 < value <= _SECONDS_LIMIT):
            raise Malformed(f"The field {key} is not a number of seconds; correct the request or leave it out.")
        return value

    # -- fields of many requests ---------------------------------------------------------------------------------------

    def call_id(self) -> str:
        """The field call."""
        return parse_call_id(self.fields.get("call"))

    def within(self) -> str | None:
        """The running call in whose body the request was made: its effects belong to that call, and a replay does not
        repeat them."""
        return None if self.fields.get("within") is None else parse_call_id(self.fields["within"])

    def rid(self) -> str | None:
        """The request's own name, the same when the agent sends it again; None where there is none."""
        value = self.fields.get("rid")
        if value is not None and (not isinstance(value, str) or not _RID.fullmatch(value)):
            raise Malformed("The field rid is not 16 to 32 hexadecimal characters; make random ones, or leave it out.")
        return value

    def is_again(self) -> bool:
        """True if such a request was sent before, and may have arrived."""
        return self.boolean("again")

    # -- whole requests ------------------------------------------------------------------------------------------------

    def intent(self, arguments: tuple[Any] | None) -> Intent:
        """A `call_begin`, with the value of its arguments."""
        approve = self.fields.get("approve", False)
        return Intent(
            self.call_id(),
            self.label("name", 200),
            arguments[0] if arguments else None,
            EntryKind(self.one_of("kind", _KINDS, default="tool")),
            SideEffect(self.one_of("side_effect", list(SideEffect), default="local")),
            self.optional_label("key", 200),
            approve if isinstance(approve, bool) else self.label("approve", 1000),
            self._compensation(),
            self.optional_label("task", 200),
            self._facts(),
            self.boolean("skippable"),
            self.boolean("reuse", default=True),
            self.optional_label("code", 64),
            self.boolean("waits"),
        )

    def _facts(self) -> tuple[Any, ...]:
        facts = self.fields.get("facts") or []
        if (
            not isinstance(facts, list)
            or len(facts) > _FACTS_LIMIT
            or not all(isinstance(fact, dict) and "kind" in fact for fact in facts)
        ):
            raise Malformed(f"The field facts is not a list of at most {_FACTS_LIMIT} facts; correct the request.")
        return tuple({"kind": fact["kind"], "value": fact.get("value")} for fact in facts)

    def _compensation(self) -> tuple[str, ...] | None:
        value = self.fields.get("compensate")
        if value is None:
            return None
        argv = value.get("argv") if isinstance(value, dict) else None
        if (
            not isinstance(argv, list)
            or not 1 <= len(argv) <= _ARGV_LIMIT
            or not all(isinstance(arg, str) and "\0" not in arg for arg in argv)
        ):
            raise Malformed(
                f'The field compensate is not {{"argv": [...]}} of 1 to {_ARGV_LIMIT} texts; correct the request.'
            )
        return tuple(argv)

    def question(self) -> Question:
        """An `approve`."""
        expires_s = self.seconds("expires_s")
        question = self.label("question", 1000)
        return Question(self.call_id(), question, self.fields.get("details"), expires_s, self.within())

    def usage(self) -> dict[str, Any] | None:
        """The field usage of a model's `call_end`."""
        usage = self.fields.get("usage")
        if usage is not None and not isinstance(usage, dict):
            raise Malformed("The field usage is not an object; correct the request or leave it out.")
        return usage

    def output(self) -> tuple[StreamName, bytes]:
        """A piece of output."""
        stream = self.one_of("stream", ["stdout", "stderr"])
        try:
            data = base64.b64decode(self.fields.get("data_b64", ""), validate=True)
        except (TypeError, ValueError, binascii.Error):
            raise Malformed("The field data_b64 is not base64; correct the request.") from None
        return "stdout" if stream == "stdout" else "stderr", data

    def depends(self) -> tuple[str, ...]:
        """The names of the tasks that a task depends on."""
        depends = self.fields.get("depends") or []
        if not isinstance(depends, list) or len(depends) > _DEPENDS_LIMIT:
            raise Malformed(f"The field depends is not a list of at most {_DEPENDS_LIMIT} names; correct the request.")
        return tuple(_label("depends", name, 200) for name in depends)

    def place(self) -> dict[str, Any]:
        """The place of a value in the store."""
        return {"namespace": self.label("namespace", 200), "key": self.label("key", 200)}

    def search(self) -> dict[str, Any]:
        """A `store_search`."""
        where = self.fields.get("where")
        if where is not None and not isinstance(where, dict):
            raise Malformed("The field where is not an object; correct the request or leave it out.")
        return {
            "namespace": self.label("namespace", 200),
            "prefix": self.optional_text("prefix") or "",
            "where": where,
            "limit": self.integer("limit", 1, 1000, default=100),
            "after": self.optional_text("after") or "",
        }


def parse_request(line: bytes) -> AgentRequest:
    """One line as a request. Raises Malformed."""
    fields = parse_json(line)
    if not isinstance(fields, dict):
        raise Malformed("A request is not a JSON object; send one object per line.")
    request_id = fields.pop("id", None)
    if type(request_id) is not int or not 0 <= request_id < _INTEGER_LIMIT:
        raise Malformed("A request's id is not an integer from 0 to 2^53; number the requests.")
    op = fields.pop("op", None)
    if not isinstance(op, str) or len(op) > 64:
        raise Malformed("A request's op is not the name of a request; see the table in docs/agent-protocol.md.")
    body_bytes = fields.pop("body_bytes", None)
    if body_bytes is not None and (type(body_bytes) is not int or not 0 <= body_bytes < 1 << 62):
        raise Malformed("A request's body_bytes is not a number of bytes; leave it out when there is no body.")
    return AgentRequest(request_id, op, fields, body_bytes)


def parse_call_id(value: Any) -> str:
    """The id of a call. Raises Malformed."""
    if not isinstance(value, str) or not _CALL_ID.fullmatch(value):
        raise Malformed("The field call is not an id of 32 hexadecimal characters; make a random one for each call.")
    return value


def _label(key: str, value: Any, limit: int) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= limit or not value.isprintable():
        raise Malformed(f"The field {key} is not a text of 1 to {limit} printable characters; correct the request.")
    return value
