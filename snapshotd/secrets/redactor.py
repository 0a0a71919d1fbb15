"""The funnel: everything recorded for a trajectory goes in through it, and everything that an agent needs again comes
out through it.

A text that went in once may go in again: markers stay as they are. A text that came in without markers of its own comes
out unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from snapshotd.errors import LimitExceeded
from snapshotd.secrets.base import MARKER, Found
from snapshotd.secrets.configured import MIN_VALUE_BYTES, Configured
from snapshotd.secrets.scan import PIECE_BYTES, Patterns, Scan
from snapshotd.secrets.stream import Concealer, reveal_stream
from snapshotd.secrets.vault import Vault
from snapshotd.types import TrajectoryID

MAX_JSON_LEVELS = 256
"""Lists and objects within each other. Above the engine's limit for input (200), with room for its own envelopes."""
_REMEMBERED = 10_000
_AWS_KEY = re.compile(r"(?i)(?:aws)?[_-]?secret[_-]?access[_-]?key")
_AWS_VALUE = re.compile(r"[A-Za-z0-9/+]{40}")


class Redactor:
    """Makes funnels over one vault. Thread-safe."""

    def __init__(self, vault: Vault) -> None:
        self._vault = vault

    def funnel(
        self,
        trajectory: TrajectoryID,
        configured: Mapping[str, str] | None = None,
        ancestors: Collection[TrajectoryID] = (),
    ) -> Funnel:
        """The funnel of one trajectory. `configured`: name to value of secrets to look for besides the shapes of
        tokens; `ancestors`: the trajectories that it was forked from, whose markers it may reveal. Errors: as
        `Configured`. Costs about 1 ms for ten secrets."""
        return Funnel(self._vault, trajectory, Configured(configured or {}), ancestors)


class Funnel:
    """Conceals and reveals for one trajectory. Thread-safe. The vault has kept a secret before its concealed form is
    returned."""

    def __init__(
        self, vault: Vault, trajectory: TrajectoryID, configured: Configured, ancestors: Collection[TrajectoryID]
    ) -> None:
        self._vault = vault
        self._trajectory = trajectory
        self._owners = tuple(dict.fromkeys((trajectory, *ancestors)))
        self._patterns = Patterns(configured)
        self._kept: set[str] = set()

    def conceal_text(self, text: str) -> str:
        """The text with a marker in place of every secret. Any text, lone surrogates included. Raises the errors of
        `Vault.keep`."""
        if len(text) < MIN_VALUE_BYTES:
            return text
        data = text.encode(errors="surrogatepass")
        if len(data) <= PIECE_BYTES and self._patterns.none_in(data):
            return text
        scan = Scan(self._patterns)
        pieces = [self._put_markers(scan.feed(data[at : at + PIECE_BYTES])) for at in range(0, len(data), PIECE_BYTES)]
        return b"".join((*pieces, self._put_markers(scan.feed(b"", final=True)))).decode(errors="surrogatepass")

    def conceal(self, value: Any) -> Any:
        """A JSON value with all its texts concealed, keys too. LimitExceeded when it nests deeper than
        `MAX_JSON_LEVELS`."""
        return _rewrite(value, self.conceal_text, self._conceal_field)

    def reveal_text(self, text: str) -> str:
        """The text with the originals of the markers that this trajectory or an ancestor recorded. Other markers stay.
        DataLoss as the vault."""
        return MARKER.sub(lambda match: self._reveal(match[0]), text) if "[secret:" in text else text

    def reveal(self, value: Any) -> Any:
        """The reverse of `conceal`."""
        return _rewrite(value, self.reveal_text, lambda _key, text: self.reveal_text(text))

    def concealer(self, write: Callable[[bytes], object]) -> Concealer:
        """For a stream of bytes, of any encoding: call its `write` with each piece and `finish` at the end; the output
        goes to `write`."""
        return Concealer(Scan(self._patterns), self._put_markers, write)

    def reveal_stream(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """The reverse of a `concealer`."""
        return reveal_stream(chunks, lambda marker: self._vault.reveal(marker.decode(), self._owners) or marker)

    def _conceal_field(self, key: str, text: str) -> str:
        """A text under a key: some secrets look like nothing without it."""
        concealed = self.conceal_text(text)
        if concealed == text and _AWS_VALUE.fullmatch(text) and _AWS_KEY.fullmatch(key):
            return self._put_markers([Found("aws-secret-key", text.encode())]).decode()
        return concealed

    def _put_markers(self, pieces: list[bytes | Found]) -> bytes:
        """Join the pieces, with markers in place of secrets. The vault keeps the secrets before this returns."""
        markers = {found: self._vault.marker(found) for found in pieces if isinstance(found, Found)}
        new = [found for found, marker in markers.items() if marker not in self._kept]
        if new:
            self._vault.keep(self._trajectory, new)
            if len(self._kept) > _REMEMBERED:
                self._kept = set()
            self._kept.update(markers[found] for found in new)
        return b"".join(markers[piece].encode() if isinstance(piece, Found) else piece for piece in pieces)

    def _reveal(self, marker: str) -> str:
        value = self._vault.reveal(marker, self._owners)
        try:
            return marker if value is None else value.decode(errors="surrogatepass")
        except UnicodeDecodeError:  # recorded in a stream of bytes: no text has ever held it
            return marker


def _rewrite(value: Any, change: Callable[[str], str], change_field: Callable[[str, str], str]) -> Any:
    """A copy of a JSON value with its texts changed. Iterative, because the value may be hostile."""
    result = [None]
    todo: list[tuple[Any, Any, Any, int]] = [(value, result, 0, 0)]
    while todo:
        item, parent, place, level = todo.pop()
        if isinstance(item, str):
            parent[place] = change(item)
        elif isinstance(item, dict | list):
            if level == MAX_JSON_LEVELS:
                raise LimitExceeded(
                    f"a JSON value nests deeper than {MAX_JSON_LEVELS} levels, which cannot be recorded: flatten it"
                )
            copy: Any = {} if isinstance(item, dict) else [None] * len(item)
            parent[place] = copy
            for key, child in item.items() if isinstance(item, dict) else enumerate(item):
                name = change(key) if isinstance(key, str) and isinstance(item, dict) else key
                if isinstance(child, str):
                    copy[name] = change_field(key, child) if isinstance(key, str) else change(child)
                elif isinstance(child, dict | list):
                    copy[name] = None  # its place among the keys
                    todo.append((child, copy, name, level + 1))
                else:
                    copy[name] = child
        else:
            parent[place] = item
    return result[0]
