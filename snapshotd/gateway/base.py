"""The recording gateway: a model endpoint inside a sandbox that forwards to the real provider and reports the traffic
to a handler.

It speaks OpenAI chat completions and responses, Anthropic messages, and Gemini contents, plain and streamed, so that an
unchanged agent is captured by environment variables (`OPENAI_BASE_URL`, `ANTHROPIC_BASE_URL`, `GOOGLE_GEMINI_BASE_URL`).
docs/gateway.md describes the routes and the records.

Order, for one turn: the whole request is read and parsed -> `GatewayHandler.turn` -> forwarded (or replayed, or
refused) -> `ForwardedTurn.sent` -> the reply is passed on as it arrives -> `ForwardedTurn.replied` -> its last bytes are passed on. So
the handler has recorded a reply before the agent can act on it: no request built on a reply overtakes the record of
that reply.

Keys: the provider's key is set on the way out and masked on the way back. The agent's own credentials are dropped. The
handler gets no header of either side.

Trust: every client is an attacker inside the sandbox. Connections, heads, bodies, JSON values and waiting are bounded;
data from one connection never affect another, except that all share the memory budget.

Concurrency: one thread per connection; the handler is called from all of them, also at the same time.
Errors: a `SnapshotdError` from the handler becomes an HTTP error in the shape of the provider's API, with the status of
its class, marked `x-should-retry: false` so that the providers' clients report it at once instead of trying again.
Durability: none of its own; the handler stores.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import takewhile
from typing import Any, Protocol
from urllib.parse import urlsplit

from snapshotd.errors import UsageError
from snapshotd.gateway.clients import is_aside
from snapshotd.gateway.digest import DigestMemo, digest_of
from snapshotd.types import Message

CONNECTION_LIMIT = 64
BODY_LIMIT_BYTES = 64 << 20
"""Size limit of one request."""
REPLAY_LIMIT_BYTES = 8 << 20
"""Size limit of one reply that is kept as it came. A longer one is passed on and read, but cannot be replayed."""
NO_RETRY = ("x-should-retry", "false")
"""Header that the OpenAI and Anthropic clients obey: they do not repeat the request. Their default repeats every
409."""


class Api(StrEnum):
    """The API whose words a request speaks. The values are stored: they never change."""

    CHAT = "openai-chat"
    RESPONSES = "openai-responses"
    MESSAGES = "anthropic-messages"
    GEMINI = "gemini-contents"


class ProviderKind(StrEnum):
    """Key of `upstreams`: where requests of a family go."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    GEMINI = "gemini"


@dataclass(frozen=True, slots=True)
class Upstream:
    """A real provider. Raises UsageError for a base URL that is not one.

    `base_url`: the URL that the provider's own client would use: `https://api.openai.com/v1`,
    `https://api.anthropic.com`, or any compatible service, with or without a path, with or without a slash at its end.
    For OpenAI a missing path means `/v1`. `api_key` is sent as `Authorization: Bearer` (OpenAI), `x-api-key`
    (Anthropic) or `x-goog-api-key` (Gemini); None sends none. `headers` replace the agent's headers of the same names.
    `model`: every request for a reply asks for it; None: for the agent's.
    """

    base_url: str
    api_key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    model: str | None = None

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.base_url)
            _ = parts.port
        except ValueError as exc:
            raise UsageError(
                f"The base URL of a model provider is not a URL ({exc}); write https://host/path."
            ) from None
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or parts.query
            or parts.fragment
            or "@" in parts.netloc
        ):
            raise UsageError(
                "The base URL of a model provider is not http(s)://host/path without user, query or fragment; correct it."
            )
        for text in (self.api_key or "", *self.headers, *self.headers.values()):
            if not text.isascii() or not text.isprintable():
                raise UsageError(
                    "A key or header of a model provider holds characters that no HTTP header can; correct it."
                )


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Times to wait for a provider: for a connection, between two pieces of a reply, for taking a piece of the
    request."""

    connect_s: float = 10.0
    read_s: float = 600.0
    """The official clients' own limit; a model may think for minutes before its first byte."""
    write_s: float = 60.0


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A tool call that a model asks for. `arguments` is parsed JSON where it is JSON, else the text as it came."""

    id: str
    name: str
    arguments: Any


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a tool call, as the agent tells the model. `name` is None if the call is not in the same request.

    `message` is the number of the message that carries it. `content` is the provider's JSON as it came.
    """

    id: str
    name: str | None
    content: Any
    is_error: bool
    message: int


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens as the provider counted them; None where it did not say. `input_tokens` includes the cached ones."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None


class ItemReader(Protocol):
    """A dialect's knowledge about one item of a conversation (a message; for the Responses API any input item)."""

    def message(self, item: dict[str, Any]) -> Message:
        """The catalog form: role, and the provider's JSON as content."""

    def item(self, message: Message) -> dict[str, Any]:
        """The item that `message` has made a message of."""

    def normal(self, item: dict[str, Any]) -> Any:
        """The normal form that two items share if they are the same message: without the parts that clients change when
        they send a message again."""

    def results(self, item: dict[str, Any]) -> Iterable[tuple[str, Any, bool]]:
        """Tool results that it carries: call id, content, and True for an error."""

    def calls(self, item: dict[str, Any]) -> Iterable[ModelCall]:
        """Tool calls of the model that it carries."""

    def from_model(self, item: dict[str, Any]) -> bool:
        """True if a model wrote the item."""

    def read_again(self, request: TurnRequest, recorded: RecordedReply) -> ReplyContent:
        """The content of a recorded reply of status 200 to a request: the same as when it came."""


VOLATILE_PARAMS = frozenset({"metadata", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
"""Parameters that do not change the question to the model, and may differ when a program runs again."""


@dataclass(frozen=True, eq=False)
class TurnRequest:
    """One request for a model's reply, completely read and parsed. Cheap to make: messages and digests are worked out
    when asked for.

    `params` is every field of the body but the model, the stream flag and the conversation (tools, temperature, ...),
    as it came. `items` is the conversation on the wire, the system prompt first; `message(i)` belongs to `items[i]`.
    `sent_as` is the model that the provider is asked for, if it is another than the agent's.
    `previous` is the id of the reply (Responses API: `previous_response_id`, or the id of a `conversation`) that the
    messages continue; if it is not None, the messages are only the new ones. `store`: True if the provider was asked to
    remember the reply. Threads: may be read by several.
    """

    api: Api
    model: str
    stream: bool
    params: Mapping[str, Any]
    items: Sequence[dict[str, Any]] = field(repr=False)
    reader: ItemReader = field(repr=False)
    memo: DigestMemo = field(repr=False)
    previous: str | None = None
    store: bool = False
    body_bytes: int = 0
    sent_as: str | None = None

    @cached_property
    def digest(self) -> bytes:
        """The same for two requests that ask the same: a client's retry, or a program that runs again. Costs one pass
        over all messages."""
        params = {name: value for name, value in self.params.items() if name not in VOLATILE_PARAMS}
        texts = [digest.hex() for digest in self.digests]
        return digest_of([self.api, self.model, self.stream, self.previous, params, texts], self.memo.key)

    @cached_property
    def digests(self) -> tuple[bytes, ...]:
        """One per message, in order. The same when a client sends a message again in another spelling
        (`ItemReader.normal`)."""
        return tuple(self.memo.of(self.api.value, item, self.reader.normal) for item in self.items)

    @property
    def offers_tools(self) -> bool:
        """True if the model may ask for calls."""
        return bool(self.params.get("tools") or self.params.get("functions"))

    @cached_property
    def aside(self) -> bool:
        """True for a question of a known client that is no part of its conversation, such as one for a title."""
        if self.params.get("tools"):
            return False
        system = takewhile(lambda message: message.role in ("system", "developer"), self.new_messages(limit=8))
        return any(is_aside(json.dumps(message.content, ensure_ascii=False)) for message in system)

    def matching_prefix(self, known: Sequence[bytes]) -> int:
        """Number of leading messages that have the digests `known`, in order. Stops at the first that differs."""
        for number, (ours, theirs) in enumerate(zip(self.digests, known, strict=False)):
            if ours != theirs:
                return number
        return min(len(self.items), len(known))

    def new_messages(self, prefix_count: int = 0, limit: int | None = None) -> list[Message]:
        """The messages from number `prefix_count` on, at most `limit`, in catalog form. Costs nothing for the
        others."""
        end = None if limit is None else prefix_count + limit
        return [self.reader.message(item) for item in self.items[prefix_count:end]]

    def results_since(self, prefix_count: int) -> list[ToolResult]:
        """The tool results that messages from number `prefix_count` on carry."""
        found = [
            (number, *result)
            for number in range(prefix_count, len(self.items))
            for result in self.reader.results(self.items[number])
        ]
        if not found:
            return []
        names = self._names({call_id for _, call_id, _, _ in found}, found[-1][0])
        return [
            ToolResult(call_id, names.get(call_id), content, is_error, number)
            for number, call_id, content, is_error in found
        ]

    def _names(self, wanted: set[str], before: int) -> dict[str, str]:
        """Names of these calls, looked for from message `before` backwards: they are usually close."""
        names: dict[str, str] = {}
        for item in reversed(self.items[:before]):
            names.update(
                (call.id, call.name) for call in self.reader.calls(item) if call.id in wanted and call.id not in names
            )
            if len(names) == len(wanted):
                break
        return names


@dataclass(frozen=True, slots=True)
class ReplyContent:
    """The content of a reply, as far as it could be read."""

    messages: tuple[Message, ...] = ()
    """In catalog form: one for chat and messages, one per output item for the Responses API. Empty when nothing was
    said."""
    digests: tuple[bytes, ...] = ()
    """Digests of `messages`, as they will be in the next request that carries them."""
    calls: tuple[ModelCall, ...] = ()
    """Tool calls that the agent is asked to make (not the ones that the provider makes itself)."""
    stop_reason: str | None = None
    usage: TokenUsage = TokenUsage()
    response_id: str | None = None
    model: str | None = None
    error: str | None = None
    """The provider's error, or the reason why the reply cannot be read."""


@dataclass(frozen=True, slots=True)
class TurnReply:
    """The end of a forwarded turn.

    `status`: the one that the agent got, which is the provider's, or 502 and 504 if the provider gave none.
    `complete`: everything that the provider meant to send has come, with any status. Otherwise `error` names the side
    that cut it, and `content` is the part until then.
    `body` is every byte of the reply, for `RecordedReply`; None if it was longer than the replay limit (`body_bytes` says
    how long).
    """

    status: int
    content: ReplyContent
    complete: bool
    error: str | None
    content_type: str
    body: bytes | None = field(repr=False)
    body_bytes: int
    started_at_ns: int
    duration_ns: int
    capture: Mapping[str, Any] | None = None
    """The way the provider was asked for tokens (`tokens.TokenCapture.record`); None if it was not."""
    tokens: Mapping[str, Any] | None = field(default=None, repr=False)
    """Token ids and log probabilities, if it gave any (`tokens.TokenCapture.tokens`)."""

    @property
    def failed(self) -> bool:
        """True if the agent got no reply that it can go on with; its client may send the same request again."""
        return not self.complete or self.error is not None or not 200 <= self.status < 300


@dataclass(frozen=True, slots=True)
class RecordedReply:
    """A reply to send instead of asking the provider. An incomplete one is cut where it was cut the first time.

    `error`: a sentence that is sent in place of a body, in the shape of the provider's errors.
    """

    status: int
    content_type: str
    body: bytes = field(repr=False)
    complete: bool = True
    headers: tuple[tuple[str, str], ...] = ()
    error: str | None = None


class ForwardedTurn(Protocol):
    """A turn that is forwarded. The thread of its connection calls the methods; they may block (only the agent waits),
    and may raise a SnapshotdError."""

    def sent(self) -> None:
        """Called exactly once, when the provider has the whole request or will never have it, before anything of the
        reply is passed on: work here costs no time while the provider thinks.

        An error is sent to the agent, and the turn is over without `replied`.
        """

    def replied(self, reply: TurnReply) -> None:
        """Called exactly once after `sent`, at the turn's end, before the agent gets the last bytes.

        An error here keeps them from the agent: it is told the error, or sees a reply that was cut.
        """


class GatewayHandler(Protocol):
    """The handler of model requests. Called from connection threads, also at the same time; may block."""

    def turn(self, request: TurnRequest) -> RecordedReply | ForwardedTurn:
        """Decide about a request that was read and not forwarded yet: returns a recorded reply to send, or the turn to
        forward.

        With results in the request the calls they belong to have ended, and the agent waits for us: the moment for a
        snapshot. Any SnapshotdError is sent to the agent (409 for Conflict, 403 for NotPermitted), and the turn is over.
        """


class Budget:
    """Bytes of memory that several may use together."""

    def __init__(self, limit_bytes: int) -> None:
        self._left = limit_bytes
        self._lock = threading.Lock()

    def take(self, amount: int) -> bool:
        """Take `amount` bytes; False, and nothing taken, if there are not as many left. Never waits."""
        with self._lock:
            if amount > self._left:
                return False
            self._left -= amount
            return True

    def give(self, amount: int) -> None:
        """Give back memory that `take` took."""
        with self._lock:
            self._left += amount


class Gateway(ABC):
    """A running gateway on one listening socket, from construction until `close`."""

    @property
    @abstractmethod
    def port(self) -> int:
        """Port of the listening socket: agents use `http://127.0.0.1:PORT/v1` (OpenAI) and `http://127.0.0.1:PORT`
        (Anthropic, Gemini)."""

    @abstractmethod
    def close(self) -> None:
        """Refuse new connections, cut all others and the requests they wait for, close the listener. Idempotent; any
        thread.

        Waits for the connections' threads, except the calling one, for at most 10 s: one may be inside the handler,
        which is not interrupted. Cut turns are reported to the handler first.
        """

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
