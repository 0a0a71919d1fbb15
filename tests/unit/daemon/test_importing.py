"""What is imported while nothing is collected, in a process of its own: what is frozen stays so."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import gc
from contextlib import nullcontext
from snapshotd.daemon.importing import uncollected

looks = []
gc.callbacks.append(lambda phase, info: looks.append(phase))
with {}():
    import http.client, unittest.mock
print(gc.isenabled(), len(looks), gc.get_freeze_count() > 0)
"""


def _run(around: str) -> list[str]:
    program = [sys.executable, "-c", _PROGRAM.format(around)]
    return subprocess.run(program, capture_output=True, text=True, check=True, timeout=60).stdout.split()


def test_modules_are_imported_without_a_look_for_garbage() -> None:
    assert _run("uncollected") == ["True", "0", "True"]
    enabled, looks, frozen = _run("nullcontext")
    assert (enabled, frozen) == ("True", "False")
    assert int(looks) > 10
