"""A real engine in this process, whose sandboxes are plain folders."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from snapshotd.api.commands import ExecRequest
from snapshotd.config import UserPlaces, read
from snapshotd.daemon.host import Footing
from snapshotd.daemon.wiring import open_engine
from snapshotd.engine.engine import Engine
from snapshotd.kernel.abilities import Mode
from tests import forked


@contextlib.contextmanager
def small_engine() -> Iterator[Engine]:
    """It needs no root, and leaves nothing behind."""
    with tempfile.TemporaryDirectory(prefix="sd-") as name, forked.children():
        state_dir = Path(name, "state")
        state_dir.mkdir()
        places = UserPlaces(state_dir, state_dir.parent, state_dir.parent / "run", state_dir.parent / "share")
        engine = open_engine(replace(read(), state_dir=str(state_dir)), Footing(places, Mode.FOLDER))
        try:
            yield engine
        finally:
            engine.life.close()


def execute(engine: Engine, ref: str, *words: str) -> None:
    """Run a command in a sandbox."""
    engine.runs.exec(ref, ExecRequest(words), sink=lambda _stream, _data: None)
