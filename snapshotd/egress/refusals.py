"""Sentences about what was refused: each at most once in a while, and not more than anybody can read."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from snapshotd.egress.base import REFUSAL_MAX, printable

_QUIET_S = 2.0
"""For so long the same sentence is not said again: the snapshot of the step it belongs to has it."""
_BURST, _PER_S = 100, 10.0
_MOST_REMEMBERED = 512


class RefusalLog:
    """Passes on what is refused, within bounds."""

    def __init__(self, say: Callable[[str], bool], now: Callable[[], float] = time.monotonic) -> None:
        """`say`: False, and the sentence is lost, where nobody takes it."""
        self._say, self._now = say, now
        self._said: OrderedDict[str, float] = OrderedDict()
        self._left, self._at = float(_BURST), now()

    def add(self, sentence: str) -> None:
        """Pass on that something was refused."""
        sentence, now = printable(sentence, REFUSAL_MAX), self._now()
        if now - self._said.get(sentence, float("-inf")) < _QUIET_S:
            return
        self._left = min(_BURST, self._left + (now - self._at) * _PER_S)
        self._at = now
        if self._left < 1 or not self._say(sentence):
            return
        self._left -= 1
        self._said[sentence] = now
        self._said.move_to_end(sentence)
        if len(self._said) > _MOST_REMEMBERED:
            self._said.popitem(last=False)
