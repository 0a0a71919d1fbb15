"""Knowledge about the clients that people run (clients.toml): the parts of their requests that are new in each run, and
their questions on the side."""

from __future__ import annotations

import re
import tomllib
from importlib import resources

_FILE = "clients.toml"
_KNOWN = tomllib.loads(resources.files("snapshotd.gateway").joinpath(_FILE).read_text())


def _all(name: str) -> list[str]:
    return [value for client in _KNOWN.values() for value in client.get(name, ())]


FIELDS = frozenset(_all("fields"))
"""Fields of an item that are no part of the message."""
_CHANGES = re.compile("|".join(f"(?:{pattern})" for pattern in _all("changes")).encode("ascii"))
_ASIDE = [re.compile(pattern) for pattern in _all("aside")]


def drop_changes(text: bytes) -> bytes:
    """A message as JSON without the parts that are new in each run."""
    return _CHANGES.sub(b"", text)


def is_aside(prompt: str) -> bool:
    """True for the system prompt of a question on the side."""
    return any(pattern.search(prompt) for pattern in _ASIDE)
