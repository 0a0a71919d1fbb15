"""Token ids and log probabilities: the fields that the gateway asks a provider for, and takes out of the reply again.

    API                 added to the request                          in the reply
    chat completions    logprobs, return_token_ids (vLLM)             choices[].logprobs, choices[].token_ids, prompt_token_ids
    responses           include: message.output_text.logprobs         logprobs of a text part, and of the events about one
    messages            nothing: the API has neither
    contents (Gemini)   nothing: log probabilities of the API are not asked for

A field that the agent has asked for itself is not added, and stays in the reply. An event of a stream, or a plain reply,
is written anew only where something was taken out. A provider that refuses an added field (400, 422) is asked again with
less, and what it takes is remembered for its model.

Sources: OpenAI's API reference (chat `logprobs`, responses `include`); vLLM's OpenAI-compatible server (`return_token_ids`).
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from snapshotd.gateway import json_body
from snapshotd.gateway.base import Api
from snapshotd.gateway.dialect import mapping, objects, text

REFUSALS = (400, 422)
"""Statuses of a provider that does not know a field, or does not let this model have it."""
READ_LIMIT_BYTES = 16 << 20
"""Size limit of a plain reply that is read. A longer one passes as it is, and so does one of too many JSON values."""
EVENT_LIMIT_BYTES = 8 << 20
"""Size limit of one event of a stream. From a longer one on, the stream passes as it is."""
_MOST = 1 << 20
"""Numbers of one kind that are kept of one reply."""
_MODELS = 256
"""Models whose refusals are remembered."""
_LOGPROBS = "message.output_text.logprobs"
_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_PREFIX = "token_id:"
"""The beginning of a token's text where a server writes its id in place of the text."""


class TokenCapture(ABC):
    """The tokens of one request's reply. `steps`: the fields to add, one set after the other until the provider takes
    one."""

    def __init__(self, body: Mapping[str, Any], steps: list[dict[str, Any]], level: int) -> None:
        self._body, self._steps = body, steps
        self.level = min(level, len(steps))
        """The number of sets that were given up."""
        self._found: dict[str, list[Any]] = {}

    @property
    def added(self) -> dict[str, Any]:
        """The fields that are added now; none when all were refused."""
        return self._steps[self.level] if self.level < len(self._steps) else {}

    def body(self) -> bytes:
        """The request as it is sent."""
        return json.dumps({**self._body, **self.added}).encode()

    def give_up_fields(self) -> bool:
        """The provider refused the fields: go on with the next set. False if none was added."""
        if not self.added:
            return False
        self.level += 1
        return True

    @abstractmethod
    def take(self, value: dict[str, Any]) -> bool:
        """Read the tokens in a plain reply, or an event of a stream, and take out whatever the agent did not ask for.
        True if something was taken out."""

    def note(self, name: str, values: Iterator[Any], kinds: type | tuple[type, ...]) -> None:
        """Keep numbers that the provider sent."""
        kept = self._found.setdefault(name, [])
        kept += [value for value in values if isinstance(value, kinds) and not isinstance(value, bool)]
        del kept[_MOST:]

    @property
    def tokens(self) -> dict[str, list[Any]] | None:
        """The lists that came, by name: `prompt_token_ids`, `completion_token_ids`, `logprobs`. None if none did."""
        return {name: values for name, values in self._found.items() if values} or None

    @property
    def record(self) -> dict[str, Any]:
        """The way the provider was asked: the fields that were added, and those that it refused."""
        refused = {name for step in self._steps[: self.level] for name in step} - set(self.added)
        return {"added": sorted(self.added), **({"refused": sorted(refused)} if refused else {})}


class _ChatCapture(TokenCapture):
    def __init__(self, body: Mapping[str, Any], level: int) -> None:
        own = {"logprobs": body.get("logprobs") is True, "return_token_ids": body.get("return_token_ids") is True}
        both = {name: True for name, asked in own.items() if not asked}
        steps = [both, {name: True for name in both if name == "logprobs"}]
        super().__init__(
            body, [step for number, step in enumerate(steps) if step and step not in steps[:number]], level
        )
        self._own = own

    def take(self, value: dict[str, Any]) -> bool:
        changed = False
        if "prompt_token_ids" in value:
            self.note("prompt_token_ids", iter(value["prompt_token_ids"] or ()), int)
            changed = self._out(value, "prompt_token_ids")
        for choice in objects(value.get("choices")):
            first = choice.get("index") in (0, None)
            if first:
                self._read(choice)
            if choice.get("logprobs") is not None and not self._own["logprobs"]:
                choice["logprobs"] = None
                changed = True
            if "token_ids" in choice:
                changed |= self._out(choice, "token_ids")
        return changed

    def _out(self, holder: dict[str, Any], name: str) -> bool:
        if self._own["return_token_ids"]:
            return False
        del holder[name]
        return True

    def _read(self, choice: dict[str, Any]) -> None:
        entries = list(objects(mapping(choice.get("logprobs")).get("content")))
        self.note("logprobs", (entry.get("logprob") for entry in entries), (int, float))
        given = choice.get("token_ids")
        if isinstance(given, list):
            self.note("completion_token_ids", iter(given), int)
        else:
            names = [text(entry.get("token")) or "" for entry in entries]
            if all(name.startswith(_PREFIX) and name[len(_PREFIX) :].isdecimal() for name in names):
                self.note("completion_token_ids", (int(name[len(_PREFIX) :][:18]) for name in names), int)


class _ResponsesCapture(TokenCapture):
    def __init__(self, body: Mapping[str, Any], level: int) -> None:
        include = body.get("include")
        include = include if isinstance(include, list) else []
        self._own = _LOGPROBS in include
        super().__init__(body, [] if self._own else [{"include": [*include, _LOGPROBS]}], level)

    def take(self, value: dict[str, Any]) -> bool:
        kind = text(value.get("type")) or ""
        if kind == "response.output_text.done":
            self._note(value)
        elif not kind:  # a plain reply
            for item in objects(value.get("output")):
                for part in objects(item.get("content")):
                    self._note(part)
        return not self._own and self._strip(value)

    def _note(self, part: dict[str, Any]) -> None:
        self.note("logprobs", (entry.get("logprob") for entry in objects(part.get("logprobs"))), (int, float))

    def _strip(self, value: dict[str, Any]) -> bool:
        """Empty the lists in an event or a reply: without the field in `include` they are empty."""
        holders = [value, mapping(value.get("part"))]
        for holder in (value, mapping(value.get("response"))):
            for item in (*objects(holder.get("output")), mapping(holder.get("item"))):
                holders += objects(item.get("content"))
        found = [holder for holder in holders if isinstance(holder.get("logprobs"), list) and holder["logprobs"]]
        for holder in found:
            holder["logprobs"] = []
        return bool(found)


class Refusals:
    """The sets of fields that a provider's models do not take. Thread-safe."""

    def __init__(self) -> None:
        self._levels: dict[tuple[Api, str], int] = {}
        self._lock = threading.Lock()

    def level(self, api: Api, model: str) -> int:
        with self._lock:
            return self._levels.get((api, model), 0)

    def remember(self, api: Api, model: str, level: int) -> bool:
        """True if this is new."""
        with self._lock:
            new = self._levels.get((api, model), 0) != level
            self._levels[api, model] = level
            while len(self._levels) > _MODELS:
                del self._levels[next(iter(self._levels))]
        return new


def capture_of(api: Api, body: bytes, level: int) -> TokenCapture | None:
    """The capture of a request, whose body is a JSON object; None for an API that has no tokens."""
    if api is Api.CHAT:
        return _ChatCapture(json.loads(body), level)
    return _ResponsesCapture(json.loads(body), level) if api is Api.RESPONSES else None


class TokenFilter:
    """A reply's bytes on their way to the agent. `streamed`: it is a stream of events."""

    def __init__(self, capture: TokenCapture, streamed: bool) -> None:
        self._capture, self._streamed = capture, streamed
        self._held = bytearray()
        self._passing = False

    def feed(self, piece: bytes) -> bytes:
        """The bytes that may go on now."""
        if self._passing:
            return piece
        self._held += piece
        if len(self._held) > (EVENT_LIMIT_BYTES if self._streamed else READ_LIMIT_BYTES):
            self._passing = True
            return self._rest()
        return b"".join(self._events()) if self._streamed else b""

    def end(self) -> bytes:
        """The rest of a reply that has ended, or was cut."""
        rest = self._rest()
        return rest if self._passing or self._streamed else self._rewrite(rest) or rest

    def _rest(self) -> bytes:
        rest = bytes(self._held)
        self._held.clear()
        return rest

    def _events(self) -> Iterator[bytes]:
        """The whole events that are held."""
        while True:
            ends = [(place, len(end)) for end in _ENDS if (place := self._held.find(end)) >= 0]
            if not ends:
                return
            place, length = min(ends)
            event = bytes(self._held[: place + length])
            del self._held[: place + length]
            yield self._event(event)

    def _event(self, event: bytes) -> bytes:
        lines = event.splitlines()
        data = [line.partition(b":")[2].removeprefix(b" ") for line in lines if line.startswith(b"data:")]
        if not data or (written := self._rewrite(b"\n".join(data))) is None:
            return event
        others = [line for line in lines if line and not line.startswith(b"data:")]
        return b"\n".join([*others, b"data: " + written, b"", b""])

    def _rewrite(self, data: bytes) -> bytes | None:
        """The JSON without whatever was taken out; None if nothing was."""
        value = json_body.parse_or_none(data)
        if not isinstance(value, dict) or not self._capture.take(value):
            return None
        return json.dumps(value, separators=(",", ":")).encode()
