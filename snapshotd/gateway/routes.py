"""The requests that are answered, and their handling. Every other request is refused: with the daemon's key, a sandbox
may use models and nothing more."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from snapshotd.gateway.anthropic import AnthropicMessages
from snapshotd.gateway.base import Api, ProviderKind, RecordedReply, TurnRequest
from snapshotd.gateway.dialect import Dialect
from snapshotd.gateway.digest import DigestMemo
from snapshotd.gateway.gemini import GeminiContent
from snapshotd.gateway.keys import Header
from snapshotd.gateway.openai_chat import OpenAIChat
from snapshotd.gateway.openai_responses import OpenAIResponses
from snapshotd.gateway.peer import HttpRequest
from snapshotd.types import Message

_DIALECTS: tuple[Dialect, ...] = (OpenAIChat(), OpenAIResponses(), AnthropicMessages(), GeminiContent())
_MODELS = re.compile(r"/v1/models(/[A-Za-z0-9._:@-]+)*|/v1(alpha|beta)/models(/[A-Za-z0-9._-]+)?")
_PASSED = {"/v1/embeddings": ProviderKind.OPENAI, "/v1/messages/count_tokens": ProviderKind.ANTHROPIC}
_GEMINI_PASSED = re.compile(r"/v1(alpha|beta)?/models/[A-Za-z0-9._-]+:(countTokens|embedContent|batchEmbedContents)")
_GEMINI = re.compile(r"/v1(alpha|beta)/|/v1/models/[^/:]+:")


@dataclass(frozen=True, slots=True)
class GatewayRoute:
    """The route of a request. With a dialect it is a turn; without one, it is passed on without a record. `said`: fields
    that its path says in place of its body."""

    provider: ProviderKind
    dialect: Dialect | None = None
    said: Mapping[str, Any] = field(default_factory=dict)


def find(request: HttpRequest) -> GatewayRoute | None:
    """The route of a request; None if there is none."""
    if request.method == "POST":
        for dialect in _DIALECTS:
            if (said := dialect.read_path(request.path)) is not None:
                return GatewayRoute(dialect.provider, dialect, said)
        if request.path in _PASSED or _GEMINI_PASSED.fullmatch(request.path):
            return GatewayRoute(_PASSED.get(request.path, ProviderKind.GEMINI))
    elif request.method == "GET" and _MODELS.fullmatch(request.path):
        return GatewayRoute(family(request.path, request.headers))
    return None


def read_recorded(api: str, reply: RecordedReply) -> tuple[Message, ...]:
    """The messages of a recorded reply of status 200. `api` is one of `Api`."""
    dialect = next(one for one in _DIALECTS if one.api == api)
    asked = TurnRequest(Api(api), "", False, {}, (), dialect, DigestMemo(b""))
    return dialect.read_again(asked, reply).messages


def family(path: str, headers: Iterable[Header]) -> ProviderKind:
    """The provider whose format an answer has: the header `anthropic-version` comes with every request of an Anthropic
    client, and `x-goog-api-key` with nearly every one of a Gemini client."""
    names = {name for name, _ in headers}
    if _GEMINI.match(path) or b"x-goog-api-key" in names:
        return ProviderKind.GEMINI
    anthropic = b"anthropic-version" in names or path.startswith("/v1/messages")
    return ProviderKind.ANTHROPIC if anthropic else ProviderKind.OPENAI
