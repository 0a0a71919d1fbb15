"""A folder that takes too long is not tried at every hook: an agent would wait each time, and for nothing."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from snapshotd.engine.folders import ignore
from snapshotd.engine.folders.scan import LONGEST_S, Mark, mark_of
from snapshotd.errors import LimitExceeded

AGAIN_S = 600.0
"""So long after a refusal the folder is tried again, and at once after a change of the rules at its top."""


class Refusal:
    """The last refusal of one folder. The caller has the folder's lock."""

    def __init__(self) -> None:
        self._sentence = ""
        self._until = 0.0
        self._rules: tuple[Mark | None, ...] = ()

    def check(self, root: int) -> None:
        """LimitExceeded: it was refused a short while ago, and its rules are those of then."""
        if self._sentence and time.monotonic() < self._until and self._rules == _rules(root):
            raise LimitExceeded(self._sentence)
        self._sentence = ""

    @contextlib.contextmanager
    def noted(self, root: int) -> Iterator[None]:
        """Note a refusal inside that came after a long time."""
        began, rules = time.monotonic(), _rules(root)
        try:
            yield
        except LimitExceeded as exc:
            ended = time.monotonic()
            if ended - began >= LONGEST_S / 2:
                self._sentence, self._until, self._rules = exc.message, ended + AGAIN_S, rules
            raise


def _rules(root: int) -> tuple[Mark | None, ...]:
    """The marks of the files with rules at the top, as they lie there."""
    found: list[Mark | None] = []
    for name in ignore.RULES:
        try:
            found.append(mark_of(os.stat(name, dir_fd=root, follow_symlinks=False)))
        except OSError:
            found.append(None)
    return tuple(found)
