"""The client that one of its parts belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from snapshotd.client.client import Snapshotd
    from snapshotd.client.verbs import Verbs


def client_of(part: Verbs) -> Snapshotd:
    """A part is never used apart from the whole client."""
    return cast("Snapshotd", part)
