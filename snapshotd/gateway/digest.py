"""JSON values as 32 bytes: equal values have equal digests."""

from __future__ import annotations

import hmac
import json
from typing import Any

_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), check_circular=False)
"""One for all: making it costs more than encoding a short message."""


def canonical_json(value: Any) -> bytes:
    """One byte string for equal values: sorted keys, no spaces, ASCII. `value` is what `json_body` parsed, so it has a limited depth."""
    return _ENCODER.encode(value).encode("ascii")


def digest_of(value: Any, key: bytes = b"") -> bytes:
    """HMAC-SHA-256 of the canonical JSON: 32 bytes. With a secret key, digests at rest do not let anybody test guesses."""
    return hmac.digest(key, canonical_json(value), "sha256")
