"""What keeping freed memory means, in a process of its own: the setting is for ever."""

from __future__ import annotations

import subprocess
import sys

import pytest

_FAULTS = """
import resource, sys
from snapshotd.kernel import memory

if sys.argv[1] == "keep" and not memory.keep_freed():
    sys.exit("no such settings")
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    buffers = [bytes(range(256)) * 4096 for _ in range(80)]
    del buffers
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str) -> int:
    run = subprocess.run([sys.executable, "-c", _FAULTS, mode], capture_output=True, text=True, check=False)
    if "no such settings" in run.stderr:
        pytest.skip("this C library has no mallopt")
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


def test_what_is_freed_is_given_out_again_without_page_faults() -> None:
    """80 MiB, taken and freed for the third time: 20,480 pages."""
    assert faults("keep") < 2_000
    assert faults("leave") > 15_000
