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

_THREADS = """
import sys, threading
from snapshotd.kernel import memory

if sys.argv[1] == "share" and not memory.share_freed():
    sys.exit("no such settings")

def busy(turn):
    taken = [bytearray(100_000) for _ in range(160)]
    kept.append(bytearray(100_000))  # above what is freed: it does not go back to the kernel
    del taken
    turn.wait()

kept = []
turns = [threading.Event() for _ in range(8)]
threads = []
for turn in turns:
    threads.append(threading.Thread(target=busy, args=(turn,)))
    threads[-1].start()
    while len(kept) < len(threads):
        pass
print(sum(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")))
for turn in turns:
    turn.set()
"""


def run(program: str, mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", program, mode], capture_output=True, text=True, check=False)
    if "no such settings" in done.stderr:
        pytest.skip("this C library has no mallopt")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_what_is_freed_is_given_out_again_without_page_faults() -> None:
    """80 MiB, taken and freed for the third time: 20,480 pages."""
    assert run(_FAULTS, "keep") < 2_000
    assert run(_FAULTS, "leave") > 15_000


def test_threads_share_what_is_free() -> None:
    """Eight, one after the other, each 16 MB at its busiest; in kB."""
    assert run(_THREADS, "share") < 60_000
    assert run(_THREADS, "leave") > 100_000
