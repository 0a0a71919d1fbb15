"""The vault: it holds the originals of redacted secrets, and markers stand in their place.

A secret in recorded text is replaced by a *marker*, `[secret:NAME:DIGEST]`. NAME is its kind (`github-token`,
`env-OPENAI_API_KEY`), DIGEST is the first 64 bits of a keyed hash of the value: equal secrets of one state directory
have equal digests, and a guess cannot be tested without the vault's key. The vault holds, for each trajectory, the
original of every marker that the trajectory has recorded.

A marker is revealed only to trajectories that recorded it (a fork passes its ancestors too). Markers are plain text
that any program can write, so a marker by itself is no claim to the secret behind it.

Durability: a secret that `keep` has returned survives `kill -9` of the process, and power loss after the next `flush`.
Concurrency: all methods are thread-safe; one process opens a vault at a time.
Errors: DataLoss when key, file or a row is damaged or belongs to another key; NotPermitted; OutOfSpace (nothing
changed); VersionMismatch.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MARKER = re.compile(r"\[secret:([A-Za-z0-9][A-Za-z0-9_.-]{0,63}):([0-9a-f]{16})\]")
"""The form of a marker. Groups: name, digest."""
MARKER_BYTES = re.compile(MARKER.pattern.encode())
MARKER_MAX_BYTES = len("[secret::]") + 64 + 16


class Found(NamedTuple):
    """A secret in a text: its kind, and its bytes as they stand there."""

    name: str
    value: bytes
