"""The requests that are answered, and their handling. Every other request is refused: with the daemon's key, a sandbox
may use models and nothing more."""

from __future__ import annotations

import re
from dataclasses import dataclass

from snapshotd.gateway.anthropic import AnthropicMessages
from snapshotd.gateway.base import ProviderKind
from snapshotd.gateway.dialect import Dialect
from snapshotd.gateway.openai_chat import OpenAIChat
from snapshotd.gateway.openai_responses import OpenAIResponses
from snapshotd.gateway.peer import HttpRequest

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


def family(path: str, anthropic_header: bool) -> ProviderKind:
    """The provider whose format an answer has: the header `anthropic-version` comes with every request of an Anthropic
    client."""
    return ProviderKind.ANTHROPIC if anthropic_header or path.startswith("/v1/messages") else ProviderKind.OPENAI
