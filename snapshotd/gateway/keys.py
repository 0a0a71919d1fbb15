"""Headers and keys at the border: the agent's headers that go out, and the provider's that come in."""

from __future__ import annotations

from collections.abc import Iterable

from snapshotd.gateway.base import ProviderKind, Upstream

Header = tuple[bytes, bytes]

_HOP_BY_HOP = frozenset(
    (
        b"connection keep-alive proxy-connection te trailer transfer-encoding upgrade content-length host expect "
        b"accept-encoding content-encoding"
    ).split()
)
"""RFC 9110 section 7.6.1, and framing, which each side has its own of. We ask for replies as they are, not compressed:
they are read."""
_CREDENTIALS = frozenset(
    (
        b"authorization x-api-key api-key x-goog-api-key x-goog-user-project cookie proxy-authorization "
        b"openai-organization openai-project"
    ).split()
)
"""The agent's own: with the daemon's key they would be wrong, or choose whose account pays."""
_KEY_HEADERS = {
    ProviderKind.OPENAI: (b"authorization", b"Bearer "),
    ProviderKind.ANTHROPIC: (b"x-api-key", b""),
    ProviderKind.GEMINI: (b"x-goog-api-key", b""),
}
_PASSED_ON = frozenset(
    (
        b"content-type cache-control date retry-after retry-after-ms x-should-retry x-request-id request-id "
        b"openai-processing-ms openai-version"
    ).split()
)
_PASSED_ON_PREFIXES = (b"x-ratelimit-", b"ratelimit-", b"anthropic-ratelimit-")
_SECRET_NAMES = ("auth", "key", "token", "secret", "cookie")
"""Parts of a header's name that mark a secret."""
_SECRET_MIN_BYTES = 8
"""A shorter "key" (`none`, `local`) is a word that replies may hold, and protects nothing."""


def outgoing(headers: Iterable[Header], provider: ProviderKind, upstream: Upstream) -> list[Header]:
    """The headers of a request for the provider: the agent's without credentials and framing, and the daemon's own."""
    given = [(name.lower(), value) for name, value in headers]
    named = {token.strip().lower() for name, value in given if name == b"connection" for token in value.split(b",")}
    own = {name.lower().encode(): value.encode() for name, value in upstream.headers.items()}
    if upstream.api_key is not None:
        name, prefix = _KEY_HEADERS[provider]
        own.setdefault(name, prefix + upstream.api_key.encode())
    dropped = _HOP_BY_HOP | _CREDENTIALS | named | own.keys()
    return [
        *((name, value) for name, value in given if name not in dropped),
        *own.items(),
        (b"accept-encoding", b"identity"),
    ]


def incoming(headers: Iterable[Header]) -> list[Header]:
    """The headers of a reply that the agent needs. No names of accounts, no cookies."""
    return [
        (name, value)
        for name, value in headers
        if name.lower() in _PASSED_ON or name.lower().startswith(_PASSED_ON_PREFIXES)
    ]


class KeyMask:
    """Replaces secrets in a stream of bytes by as many asterisks: a provider that repeats its key must not give it to
    the sandbox.

    Bytes pass as they come, but for an ending that may be the beginning of a secret.
    """

    def __init__(self, upstream: Upstream) -> None:
        values = [
            value for name, value in upstream.headers.items() if any(word in name.lower() for word in _SECRET_NAMES)
        ]
        # Without "Bearer ".
        secrets = {value.rpartition(" ")[2].encode() for value in (upstream.api_key or "", *values)}
        self._secrets = [secret for secret in secrets if len(secret) >= _SECRET_MIN_BYTES]
        self._held = b""

    def feed(self, piece: bytes) -> bytes:
        """The bytes so far that can be shown now and have not been shown."""
        data = self._mask(self._held + piece)
        keep = max((self._overlap(data, secret) for secret in self._secrets), default=0)
        self._held = data[len(data) - keep :]
        return data[: len(data) - keep]

    def flush(self) -> bytes:
        """The bytes kept back, at the end of the stream."""
        data, self._held = self._held, b""
        return data

    def text(self, message: str) -> str:
        """A whole text, masked."""
        return self._mask(message.encode("utf-8", "replace")).decode("utf-8", "replace")

    def _mask(self, data: bytes) -> bytes:
        for secret in self._secrets:
            data = data.replace(secret, b"*" * len(secret))
        return data

    @staticmethod
    def _overlap(data: bytes, secret: bytes) -> int:
        """The length of the longest end of `data` that a secret begins with."""
        for length in range(min(len(data), len(secret) - 1), 0, -1):
            if data.endswith(secret[:length]):
                return length
        return 0
