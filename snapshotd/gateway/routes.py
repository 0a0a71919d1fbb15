"""The requests that are answered, and their handling. Every other request is refused: with the daemon's key, a sandbox
may use models and nothing more."""

from __future__ import annotations

import re
from dataclasses import dataclass

from snapshotd.gateway.anthropic import AnthropicMessages
from snapshotd.gateway.base import Api, ProviderKind, RecordedReply, TurnRequest
from snapshotd.gateway.dialect import Dialect
from snapshotd.gateway.digest import DigestMemo
from snapshotd.gateway.openai_chat import OpenAIChat
from snapshotd.gateway.openai_responses import OpenAIResponses
from snapshotd.gateway.peer import HttpRequest
from snapshotd.types import Message

_DIALECTS: dict[str, Dialect] = {
    dialect.path: dialect for dialect in (OpenAIChat(), OpenAIResponses(), AnthropicMessages())
}
_MODELS = re.compile(r"/v1/models(/[A-Za-z0-9._:@-]+)*")
_PASSED = {"/v1/embeddings": ProviderKind.OPENAI, "/v1/messages/count_tokens": ProviderKind.ANTHROPIC}


@dataclass(frozen=True, slots=True)
class GatewayRoute:
    """The route of a request. With a dialect it is a turn; without one, it is passed on without a record."""

    provider: ProviderKind
    dialect: Dialect | None = None


def find(request: HttpRequest) -> GatewayRoute | None:
    """The route of a request; None if there is none."""
    if request.method == "POST":
        if (dialect := _DIALECTS.get(request.path)) is not None:
            return GatewayRoute(dialect.provider, dialect)
        if request.path in _PASSED:
            return GatewayRoute(_PASSED[request.path])
    elif request.method == "GET" and _MODELS.fullmatch(request.path):
        return GatewayRoute(family(request.path, request.header(b"anthropic-version") is not None))
    return None


def said(api: str, reply: RecordedReply) -> tuple[Message, ...]:
    """The messages of a recorded reply of status 200. `api` is one of `Api`."""
    dialect = next(one for one in _DIALECTS.values() if one.api == api)
    asked = TurnRequest(Api(api), "", False, {}, (), dialect, DigestMemo(b""))
    return dialect.read_again(asked, reply).messages


def family(path: str, anthropic_header: bool) -> ProviderKind:
    """The provider whose format an answer has: the header `anthropic-version` comes with every request of an Anthropic
    client."""
    return ProviderKind.ANTHROPIC if anthropic_header or path.startswith("/v1/messages") else ProviderKind.OPENAI
