"""Progress of long work on standard error: a bar on a terminal, else lines. Among lines that only count, some are
left out, never the last."""

from __future__ import annotations

import re
import sys
import time
from typing import TYPE_CHECKING

from snapshotd.cli.follow import note
from snapshotd.cli.text import printable, size

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_OF = re.compile(r"(\d+) (?:of|/) (\d+)|(\d+)/(\d+)")
"""`120 of 400 packs`: how far it is."""
_COUNT_EVERY_S = 5.0


class Meter:
    """`with Meter("exporting best") as meter:` shows the bar, `meter.line(text)` describes the present step, and its
    counts move the bar.

    Lines and counts may come from different threads. With `quiet`, nothing is shown.
    """

    def __init__(self, title: str, *, total_bytes: int | None = None, quiet: bool = False) -> None:
        self._title = printable(title)
        self._total_bytes = total_bytes
        self._quiet = quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._next_count = 0.0

    def __enter__(self) -> Meter:
        if not self._quiet and sys.stderr.isatty():
            self._bar = _bar()
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=self._total_bytes, detail="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def line(self, text: str) -> None:
        """One line of progress. `N of M` in it moves the bar, unless bytes do."""
        if self._quiet:
            return
        found = _OF.search(text)
        done, total = (int(number) for number in found.groups() if number is not None) if found else (0, 0)
        if self._bar is None or self._task is None:
            if done >= total or time.monotonic() >= self._next_count:
                note(text)
                self._next_count = time.monotonic() + _COUNT_EVERY_S
            return
        if found and self._total_bytes is None:
            self._bar.update(self._task, completed=min(done, total), total=total)
        self._bar.update(self._task, description=printable(text))

    def show_bytes(self, count: int) -> None:
        """Show the number of bytes that have been moved so far."""
        if self._bar is None or self._task is None:
            return
        if self._total_bytes is not None:
            self._bar.update(self._task, completed=count)
        self._bar.update(self._task, detail=size(count))


def _bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[detail]}", markup=False),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, transient=True)
